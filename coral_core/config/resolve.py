"""From a scenario's names to the things themselves, and on to the allocation problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coral_core.catalog import load_catalog, load_models
from coral_core.config.scenario import Ample, Constant, InstanceLimits, LengthsSpec, ModelSpec, Scenario, TraceSpec
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    Running,
    TemplateColumns,
)
from coral_core.domain.hardware import Catalog, Market, NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Demand, Lengths, Phase, Slo
from coral_core.errors import DataGapError, InputError, unknown_name
from coral_core.workload import length_statistics, named_lengths, read_trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """One model of a scenario, its names looked up."""

    shape: ModelShape
    variant: str
    phases: tuple[Phase, ...]
    demand: Demand
    limits: Mapping[Phase, InstanceLimits]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScenario:
    """A scenario whose names are looked up: configurations and models in the scenario's order."""

    scenario: Scenario
    catalog: Catalog
    configs: tuple[NodeConfig, ...]
    models: tuple[ResolvedModel, ...]


def resolve_scenario(scenario: Scenario, *, user_models: Path | None = None) -> ResolvedScenario:
    """Look up catalogue, configurations, models and lengths; InputError names the unknown one and its place."""
    catalog = load_catalog(scenario.catalog)
    names = scenario.configs or tuple(sorted(catalog.configs))
    configs = tuple(
        look_up(catalog.configs, name, "configuration", f"configs[{i}]", catalog.name) for i, name in enumerate(names)
    )
    for i, region in enumerate(scenario.regions):
        look_up(dict.fromkeys(catalog.regions), region, "region", f"regions[{i}]", catalog.name)
    shapes = load_models(user_models)
    models = tuple(_resolve_model(spec, shapes, f"models[{i}]") for i, spec in enumerate(scenario.models))
    return ResolvedScenario(scenario=scenario, catalog=catalog, configs=configs, models=models)


def allocation_problem(
    resolved: ResolvedScenario, templates: TemplateColumns, running: Iterable[Running] = ()
) -> AllocationProblem:
    """The allocation problem of a scenario over given templates (`templates.nodes` in the order of its configs).

    A pair of region and configuration without a price is not sold there: price NaN, availability 0.
    """
    scenario = resolved.scenario
    price = _prices(resolved)
    available = np.where(np.isnan(price), 0, _availability(resolved))
    if not available.any():
        raise DataGapError(
            f"none of the configurations is sold in {', '.join(scenario.regions)}",
            where=f"scenario {scenario.name}",
            fix="choose other regions or configurations; see `coral catalog show`",
        )
    return AllocationProblem(
        regions=scenario.regions,
        configs=tuple(config.name for config in resolved.configs),
        available=available,
        price_usd_per_h=price,
        templates=templates,
        demand=tuple(row for model in resolved.models for row in demand_rows(model)),
        running=tuple(running),
        churn_k=scenario.allocation.churn_k,
        options=AllocationOptions(
            pd_same_region=scenario.allocation.pd_same_region,
            gap_frac=scenario.allocation.gap_frac,
            time_limit_s=scenario.allocation.time_limit_s,
            solver=scenario.allocation.solver,
        ),
    )


def demand_rows(model: ResolvedModel) -> list[DemandRow]:
    """One row per phase that has to be covered.

    Aggregated templates beside prefill and decode cover both of their rows; served aggregated only, the model has one
    row of its own in requests/s.
    """
    disaggregated = Phase.PREFILL in model.phases
    rows: list[DemandRow] = []
    for phase in (Phase.PREFILL, Phase.DECODE) if disaggregated else (Phase.AGGREGATED,):
        limits = model.limits.get(phase, InstanceLimits())
        rows.append(
            DemandRow(
                model=model.shape.name,
                phase=phase,
                tokens_per_s=model.demand.tokens_per_s(phase) if disaggregated else None,
                requests_per_s=model.demand.requests_per_s,
                weight=model.demand.weight,
                min_instances=limits.min_instances,
                max_instances=limits.max_instances,
            )
        )
    return rows


def _resolve_model(spec: ModelSpec, shapes: Mapping[str, ModelShape], where: str) -> ResolvedModel:
    shape = look_up(shapes, spec.model, "model", f"{where}.model", "the catalogue and the added models")
    variant = spec.variant or shape.default_variant
    look_up(shape.variants, variant, "variant", f"{where}.variant", f"model {shape.name}")
    lengths, rate = _lengths(spec, f"{where}.lengths")
    needed = lengths.mean_input_tokens + lengths.mean_output_tokens
    if needed > shape.max_context_tokens:
        raise InputError(
            f"a mean request of {needed:.0f} tokens exceeds the context of {shape.max_context_tokens} tokens of "
            f"{shape.name}",
            where=f"{where}.lengths",
        )
    demand = Demand(
        model=shape.name,
        requests_per_s=spec.requests_per_s if spec.requests_per_s is not None else rate,
        lengths=lengths,
        slo=Slo(ttft_s=spec.slo.ttft_s, tpot_s=spec.slo.tpot_s),
        weight=spec.weight,
    )
    return ResolvedModel(shape=shape, variant=variant, phases=spec.phases, demand=demand, limits=spec.limits)


def _lengths(spec: ModelSpec, where: str) -> tuple[Lengths, float]:
    """Mean lengths, and the trace's own rate (0 where there is no trace: the schema then requires a rate)."""
    if isinstance(spec.lengths, LengthsSpec):
        return Lengths(**spec.lengths.model_dump()), 0.0
    if isinstance(spec.lengths, TraceSpec):
        statistics = length_statistics(read_trace(spec.lengths.trace, spec.lengths.format))
        lengths = Lengths(
            mean_input_tokens=statistics.mean_input_tokens,
            mean_output_tokens=statistics.mean_output_tokens,
            source=f"trace {spec.lengths.trace.name}",
        )
        return lengths, statistics.requests_per_s
    try:
        return named_lengths(spec.lengths), 0.0
    except InputError as error:
        raise InputError(error.what, where=where, fix=error.fix) from None


def _prices(resolved: ResolvedScenario) -> NDArray[np.float64]:
    """(R, C) on-demand prices, NaN where not sold."""
    offers = resolved.catalog.prices
    rows = []
    for region in resolved.scenario.regions:
        found = [offers.get((region, config.name, Market.ON_DEMAND)) for config in resolved.configs]
        rows.append([np.nan if price is None else price.price_usd_per_h for price in found])
    return np.array(rows, dtype=np.float64)


def _availability(resolved: ResolvedScenario) -> NDArray[np.int64]:
    spec = resolved.scenario.availability
    shape = (len(resolved.scenario.regions), len(resolved.configs))
    if isinstance(spec, Ample):
        return np.full(shape, spec.nodes, dtype=np.int64)
    return _constant(spec, resolved.scenario.regions, [config.name for config in resolved.configs], shape)


def _constant(
    spec: Constant, regions: Sequence[str], configs: Sequence[str], shape: tuple[int, int]
) -> NDArray[np.int64]:
    nodes = np.zeros(shape, dtype=np.int64)
    for region, counts in spec.nodes.items():
        where = f"availability.nodes.{region}"
        look_up(dict.fromkeys(regions), region, "region", where, "the scenario")
        for config, count in counts.items():
            look_up(dict.fromkeys(configs), config, "configuration", f"{where}.{config}", "the scenario")
            nodes[regions.index(region), configs.index(config)] = count
    return nodes


def look_up(known: Mapping[str, T], name: str, what: str, where: str, place: str) -> T:
    """`known[name]`, or an InputError at `where` that suggests the nearest name."""
    if name not in known:
        raise unknown_name(f"{what} in {place}", name, known, where=where)
    return known[name]
