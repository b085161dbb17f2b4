"""Error bars of what a plan counts on: between which its capacities lie in nine of ten comparisons, and what that would mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from coral_core.allocation.cost_comparison import CostPart, compare_costs
from coral_core.config.scenario import ProfilesSpec
from coral_core.domain.allocation import AllocationResult
from coral_core.domain.templates import CapacitySource, ServingTemplate

SERVED_ALIKE_FRAC: Final = 1e-6
"""Shares of a demand that two plans leave unserved and that differ by less are the same."""

_UNKNOWN_SHOWN: Final = 0.005
"""A smaller share of unknown error is not worth a reader's time."""


def with_error_bars(parts: Sequence[tuple[float, float | None]], *, at_slow_end: float = 0.0) -> dict[str, Any]:
    """Bounds of a capacity made of (throughput, 90th percentile of its times' relative error, None where not known).

    Errors are of predicted over measured times, which is measured over predicted throughput: a capacity T lies in T (1 - e) to
    T (1 + e), down to 0. All parts are taken to be off by their own bar at once, in the same direction: no capacity is further off in nine of
    ten comparisons of each. Parts of unknown error stand as they are; `error_unknown_frac` is their share,
    and both bounds are None where no error is known. `at_slow_end` is throughput beside the parts that is the slow end of its own bar already (`capacity.pessimistic`):
    what it is at most is then not said.
    """
    capacity = sum(throughput for throughput, _ in parts) + at_slow_end
    known = [(throughput, 0.0 if error is None else error) for throughput, error in parts]
    unknown = sum(throughput for throughput, error in parts if error is None)
    if parts and not at_slow_end and all(error is None for _, error in parts):
        return {"capacity_low": None, "capacity_high": None, "error_unknown_frac": 1.0}
    return {
        "capacity_low": at_slow_end + sum(throughput * max(1 - error, 0.0) for throughput, error in known),
        "capacity_high": None if at_slow_end else sum(throughput * (1 + error) for throughput, error in known),
        "error_unknown_frac": unknown / capacity if capacity else 0.0,
    }


def error_bar_notes(coverage: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of the error bars: demand that their slow end would not meet, and errors not known."""
    notes = []
    short = [
        f"{row['model']} {row['phase']} {1 - row['capacity_low'] / row['demand']:.0%}"
        for row in coverage
        if row["capacity_low"] is not None and 0 < row["capacity_low"] < row["demand"] <= row["capacity"]
    ]
    if short:
        notes.append(
            "at the slow end of their error bars (nine of ten comparisons) the capacities would not meet "
            f"{', '.join(short)} of the demand; `capacity.pessimistic: true` plans with times that nine of ten did not exceed"
        )
    unknown = [
        f"{row['model']} {row['phase']} {row['error_unknown_frac']:.0%}"
        for row in coverage
        if row["error_unknown_frac"] > _UNKNOWN_SHOWN
    ]
    if unknown:
        notes.append(
            f"capacity whose error is not known, since nothing was measured on its GPUs or its profile states no variation: {', '.join(unknown)}"
        )
    return notes


def unprofiled_notes(instances: Sequence[Mapping[str, Any]], profiles: ProfilesSpec | None) -> list[str]:
    """Which instances of a plan rest on estimates although its scenario names profiles."""
    if profiles is None:
        return []
    estimated = {
        f"{row['model']} {row['phase']}" for row in instances if row["source"] == CapacitySource.ESTIMATED.value
    }
    if not estimated:
        return []
    return [
        f"estimated, since {profiles.engine} has no profile for all of their nodes: instances of {', '.join(sorted(estimated))}"
    ]


def cost_parts(
    result: AllocationResult,
    templates: Mapping[str, ServingTemplate],
    prices: Mapping[tuple[str, str], float],
    *,
    careful: bool,
    epochs: int = 1,
) -> list[CostPart]:
    """What a plan spends on what, in one of so many epochs; `prices` in USD/h by (template, region).

    Start-ups and preferences are spread over the parts by their share. A template that is not the library's has no known error.
    `careful`: estimates are at the slow end of their bars already, so that their costs stand.
    """
    parts: list[CostPart] = []
    for item in result.instances:
        template = templates.get(item.template)
        if template is None:
            return [
                CostPart(what=(result.method,), cost_usd_per_h=result.objective_usd_per_h / epochs, error_frac=None)
            ]
        stands = careful and template.source is CapacitySource.ESTIMATED
        parts.append(
            CostPart(
                what=(template.model, template.variant, template.phase.value, *template.placement.combination),
                cost_usd_per_h=item.count * prices[item.template, item.region],
                error_frac=0.0 if stands else template.error_frac,
            )
        )
    total = sum(part.cost_usd_per_h for part in parts) * epochs
    scale = result.objective_usd_per_h / total if total > 0 else 0.0
    return [
        CostPart(what=part.what, cost_usd_per_h=scale * part.cost_usd_per_h, error_frac=part.error_frac)
        for part in parts
    ]


def serves_alike(one: AllocationResult, other: AllocationResult) -> bool:
    """Whether two answers to one problem leave the same shares of its demands unmet."""
    rows = zip(one.shortfall, other.shortfall, strict=True)
    return one.floor_deficit == other.floor_deficit and all(abs(a.frac - b.frac) <= SERVED_ALIKE_FRAC for a, b in rows)


def cost_comparison(ours: Sequence[CostPart], theirs: Sequence[CostPart], *, same_demand: bool) -> dict[str, Any]:
    """Their cost over ours, between which it lies within the error bars, and what that says: `cost_ratio`, `cost_verdict`, ..."""
    found = {
        f"cost_{name}": value for name, value in asdict(compare_costs(ours, theirs, same_demand=same_demand)).items()
    }
    return {**found, "cost_verdict": str(found["cost_verdict"])}
