"""From a scenario's names to the things themselves, and on to the allocation problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coral_core.allocation.policies import policy
from coral_core.catalog import load_catalog, load_gpus, load_models
from coral_core.config.availability import look_up, supply
from coral_core.config.scenario import (
    Ample,
    InstanceLimits,
    LengthsSpec,
    ModelSpec,
    OwnConfig,
    Scenario,
    TraceSpec,
)
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    Running,
    TemplateColumns,
)
from coral_core.domain.hardware import Catalog, Market, NodeConfig, Price
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Demand, Lengths, Phase, Slo
from coral_core.errors import DataGapError, InputError
from coral_core.units import GBIT_PER_S
from coral_core.workload import length_statistics, named_lengths, read_trace


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
    catalog = _with_own_configs(load_catalog(scenario.catalog), scenario.own_configs)
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
    resolved: ResolvedScenario,
    templates: TemplateColumns,
    running: Iterable[Running] = (),
    *,
    available: NDArray[np.int64] | None = None,
) -> AllocationProblem:
    """The allocation problem of a scenario over given templates (`templates.nodes` in the order of its configs).

    `available` (R, C) replaces the scenario's own supply in its first epoch (`available_nodes`). A pair of region and
    configuration without a price is not sold there: price NaN, availability 0.
    """
    scenario = resolved.scenario
    price = on_demand_prices(resolved)
    if np.isnan(price).all():
        raise DataGapError(
            f"none of the configurations is sold in {', '.join(scenario.regions)}",
            where=f"scenario {scenario.name}",
            fix="choose other regions or configurations; see `coral catalog show`",
        )
    if available is None:
        available = available_nodes(resolved, templates)[0]
    return AllocationProblem(
        regions=scenario.regions,
        configs=tuple(config.name for config in resolved.configs),
        available=np.where(np.isnan(price), 0, available),
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


def available_nodes(resolved: ResolvedScenario, templates: TemplateColumns) -> NDArray[np.int64]:
    """The scenario's supply, (epochs, R, C). Where it is scaled to an ample plan, that plan is made from `templates`."""
    return supply(
        resolved.scenario.availability,
        regions=resolved.scenario.regions,
        configs=resolved.configs,
        sold=~np.isnan(on_demand_prices(resolved)),
        epochs=resolved.scenario.epochs,
        ample_memory_bytes=lambda: ample_plan_memory_bytes(resolved, templates),
    )


def ample_plan_memory_bytes(resolved: ResolvedScenario, templates: TemplateColumns) -> float:
    """GPU memory of all nodes that policy `coral_paper` rents where there is no scarcity."""
    shape = (len(resolved.scenario.regions), len(resolved.configs))
    problem = allocation_problem(resolved, templates, available=np.full(shape, Ample().nodes, dtype=np.int64))
    instances = policy("coral_paper").solve(problem).instances
    nodes = dict(zip(templates.ids, templates.nodes, strict=True))
    memory_bytes = np.array([float(config.memory_bytes) for config in resolved.configs])
    return float(sum(item.count * (nodes[item.template] @ memory_bytes) for item in instances))


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


def _with_own_configs(catalog: Catalog, own: Mapping[str, OwnConfig]) -> Catalog:
    """The catalogue and the scenario's own configurations beside it."""
    configs, prices = dict(catalog.configs), dict(catalog.prices)
    for name, spec in own.items():
        where = f"own_configs.{name}"
        if name in catalog.configs:
            raise InputError(f"catalogue {catalog.name} has a {name!r} already", where=where, fix="use another name")
        configs[name] = NodeConfig(
            name=name,
            gpu=look_up(load_gpus(), spec.gpu, "GPU", f"{where}.gpu", "the catalogue"),
            gpu_count=spec.gpu_count,
            nic_bytes_per_s=spec.nic_gbit_per_s * GBIT_PER_S,
            cloud="own",
            source=spec.source,
            as_of=spec.as_of,
        )
        for region, usd_per_h in spec.price_usd_per_h.items():
            prices[region, name, Market.ON_DEMAND] = Price(
                config=name,
                region=region,
                market=Market.ON_DEMAND,
                price_usd_per_h=usd_per_h,
                source=spec.source,
                as_of=spec.as_of,
            )
    return replace(catalog, configs=configs, prices=prices)


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


def on_demand_prices(resolved: ResolvedScenario) -> NDArray[np.float64]:
    """(R, C) on-demand prices, NaN where not sold."""
    offers = resolved.catalog.prices
    rows = []
    for region in resolved.scenario.regions:
        found = [offers.get((region, config.name, Market.ON_DEMAND)) for config in resolved.configs]
        rows.append([np.nan if price is None else price.price_usd_per_h for price in found])
    return np.array(rows, dtype=np.float64)
