"""Planned demand: what was measured -> forecast -> hysteresis -> the scenario with these rates, and where each is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from artifacts.demand import read_demand
from artifacts.keys import demand_group
from artifacts.plans import StoredPlan
from artifacts.store import Store
from coral_core.config.demand import DemandSpec
from coral_core.config.resolve import ResolvedModel, ResolvedScenario
from coral_core.errors import DataGapError
from coral_core.forecast import (
    DemandForecast,
    DemandUnknown,
    ForecastMethod,
    demand_history,
    forecast_demand,
    hysteresis,
    needed_windows,
)

_FAULTS_TOLD: Final = 5
_LENGTHS_DIFFER_FRAC: Final = 0.1
"""Requests whose mean lengths differ by more from the scenario's are told: latencies were computed at the latter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousDemand:
    """What the last plan was made for, requests/s by model, and when."""

    at: datetime
    requests_per_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """What is planned for one model (requests/s), and how that came about.

    `source` is the method that was used, `held`, or `scenario`. `measured_requests_per_s` is the forecast of requests;
    times `length_factor` it is `forecast_requests_per_s`, in requests of the scenario's mean lengths. None: not known.
    """

    model: str
    planned_requests_per_s: float
    source: str
    previous_requests_per_s: float | None = None
    measured_requests_per_s: float | None = None
    forecast_requests_per_s: float | None = None
    length_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDemand:
    """The scenario at the planned rates, the figures by model, and what to know. All is predicted."""

    resolved: ResolvedScenario
    models: tuple[ModelDemand, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per model, for tables and records."""
        return [asdict(model) for model in self.models]


def planned_demand(
    resolved: ResolvedScenario,
    store: Store,
    fleet: str,
    spec: DemandSpec,
    *,
    now: datetime,
    last: StoredPlan | None = None,
) -> PlannedDemand:
    """The demand to plan for: the fleet's forecast, smoothed from what its `last` plan was made for.

    A model whose history is missing or stale gets what `spec.when_unknown` says, and a note; its demand is never taken
    as zero. Raises DataGapError where that is `refuse`, or `hold` and no plan to hold to; StoreError.
    """
    if spec.method == "scenario":
        stated = tuple(
            ModelDemand(model=model.shape.name, planned_requests_per_s=model.demand.requests_per_s, source="scenario")
            for model in resolved.models
        )
        return PlannedDemand(resolved=resolved, models=stated, notes=())
    forecasts, notes = measured_demand(resolved, store, fleet, spec, now=now)
    previous = previous_demand(last) if last else None
    where = store.url_of(demand_group(fleet))
    models = []
    for model in resolved.models:
        found = forecasts[model.shape.name]
        if isinstance(found, DemandUnknown):
            models.append(_unknown(model, found, spec, previous, where=where))
        else:
            models.append(_known(model, found, spec, previous, now=now))
            notes.extend(f"{found.model}: {note}" for note in found.notes)
        notes.extend(_remarks(model, found, models[-1]))
    return PlannedDemand(resolved=_at_rates(resolved, models), models=tuple(models), notes=tuple(notes))


def measured_demand(
    resolved: ResolvedScenario, store: Store, fleet: str, spec: DemandSpec, *, now: datetime
) -> tuple[dict[str, DemandForecast | DemandUnknown], list[str]]:
    """The forecast of each of the scenario's models from the fleet's history, and what of that could not be used."""
    method = ForecastMethod.LAST if spec.method == "scenario" else ForecastMethod(spec.method)
    stored = read_demand(store, fleet, needed_windows(method, now.timestamp(), spec.horizon_s, spec.tuning))
    history, overlaps = demand_history(stored.samples)
    names = [model.shape.name for model in resolved.models]
    forecasts = forecast_demand(history, method, now.timestamp(), spec.horizon_s, models=names, tuning=spec.tuning)
    notes = [*stored.faults[:_FAULTS_TOLD], *overlaps]
    if len(stored.faults) > _FAULTS_TOLD:
        notes.append(f"{len(stored.faults) - _FAULTS_TOLD} more lines of measured demand cannot be read")
    others = sorted(set(history) - set(names))
    if others:
        notes.append(f"demand was measured for {', '.join(others)} too, which the scenario does not serve")
    return forecasts, notes


def previous_demand(last: StoredPlan) -> PreviousDemand:
    """What a recorded plan was made for; several phases of a model share one rate."""
    rates = {row["model"]: row["requests_per_s"] for row in last.decision["demand"]}
    return PreviousDemand(
        at=last.record.time, requests_per_s={model: rate for model, rate in rates.items() if rate is not None}
    )


def length_factor(model: ResolvedModel, found: DemandForecast) -> float | None:
    """How many requests of the scenario's mean lengths one measured request comes to: the larger of both phases'.

    None where no lengths were measured. Templates were computed at the scenario's lengths, so demand is put in them.
    """
    stated = model.demand.lengths
    pairs = (
        (found.mean_input_tokens, stated.mean_input_tokens),
        (found.mean_output_tokens, stated.mean_output_tokens),
    )
    ratios = [measured / planned for measured, planned in pairs if measured is not None and planned > 0]
    return max(ratios) if len(ratios) == len(pairs) else None


def _known(
    model: ResolvedModel, found: DemandForecast, spec: DemandSpec, previous: PreviousDemand | None, *, now: datetime
) -> ModelDemand:
    factor = length_factor(model, found)
    forecast = found.requests_per_s * (1.0 if factor is None else factor)
    held = previous.requests_per_s.get(found.model) if previous else None
    elapsed_s = max(0.0, (now - previous.at).total_seconds()) if previous else 0.0
    return ModelDemand(
        model=found.model,
        planned_requests_per_s=hysteresis(held, forecast, elapsed_s, spec.up_s, spec.down_s),
        source=found.method.value,
        previous_requests_per_s=held,
        measured_requests_per_s=found.requests_per_s,
        forecast_requests_per_s=forecast,
        length_factor=factor,
    )


def _unknown(
    model: ResolvedModel, found: DemandUnknown, spec: DemandSpec, previous: PreviousDemand | None, *, where: str
) -> ModelDemand:
    held = previous.requests_per_s.get(found.model) if previous else None
    if spec.when_unknown == "scenario":
        return ModelDemand(
            model=found.model,
            planned_requests_per_s=model.demand.requests_per_s,
            source="scenario",
            previous_requests_per_s=held,
        )
    if spec.when_unknown == "hold" and held is not None:
        return ModelDemand(model=found.model, planned_requests_per_s=held, source="held", previous_requests_per_s=held)
    raise DataGapError(
        f"{found.model}: {found.reason}"
        + (", and no earlier plan holds a rate for it" if spec.when_unknown == "hold" else ""),
        where=where,
        fix="see that the gateway records demand, or plan for the scenario's rates: demand.when_unknown: scenario",
    )


def _remarks(model: ResolvedModel, found: DemandForecast | DemandUnknown, planned: ModelDemand) -> list[str]:
    rate = f"{planned.planned_requests_per_s:.4g} requests/s"
    if isinstance(found, DemandUnknown):
        of = "that the last plan held" if planned.source == "held" else "of the scenario"
        return [f"{found.model}: {found.reason}; planned for the {rate} {of}"]
    if planned.length_factor is None:
        return [f"{found.model}: the lengths of recent requests are not known; the scenario's are assumed"]
    stated = model.demand.lengths
    remarks = []
    for what, measured, expected in (
        ("prompts", found.mean_input_tokens, stated.mean_input_tokens),
        ("responses", found.mean_output_tokens, stated.mean_output_tokens),
    ):
        if measured is not None and abs(measured - expected) > _LENGTHS_DIFFER_FRAC * expected:
            remarks.append(
                f"{found.model}: {what} have {measured:.0f} tokens on average, {expected:.0f} in the scenario that the "
                "templates were computed for; demand is put in requests of that length"
            )
    return remarks


def _at_rates(resolved: ResolvedScenario, planned: list[ModelDemand]) -> ResolvedScenario:
    models = tuple(
        replace(model, demand=replace(model.demand, requests_per_s=of.planned_requests_per_s))
        for model, of in zip(resolved.models, planned, strict=True)
    )
    return replace(resolved, models=models)
