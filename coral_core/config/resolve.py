"""From a scenario's names to the things themselves, and on to the allocation problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coral_core.allocation.policies import policy
from coral_core.catalog import load_catalog, load_gpus, load_models
from coral_core.config.availability import look_up, supply
from coral_core.config.market_spec import ExclusionSpec, PreferenceSpec
from coral_core.config.scenario import (
    Ample,
    InstanceLimits,
    LengthsSpec,
    ModelSpec,
    OwnConfig,
    Scenario,
    TraceSpec,
    load_scenario,
)
from coral_core.config.spot import SpotMarket, spot_market, with_spot_twins
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    Exclusion,
    Preference,
    Running,
    TemplateColumns,
)
from coral_core.domain.hardware import Catalog, Market, NodeConfig, Price, market_name, split_market
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Demand, Lengths, Phase, Slo
from coral_core.errors import DataGapError, InputError, unknown_name
from coral_core.units import GBIT_PER_S
from coral_core.workload import length_statistics, named_lengths, read_trace

Chosen = TypeVar("Chosen", ExclusionSpec, PreferenceSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """One model of a scenario, its names looked up."""

    shape: ModelShape
    variants: tuple[str, ...]
    phases: tuple[Phase, ...]
    demand: Demand
    spec: ModelSpec

    @property
    def variant(self) -> str:
        """The variant that is named first; the others compete with it."""
        return self.variants[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScenario:
    """A scenario whose names are looked up: configurations and models in the scenario's order."""

    scenario: Scenario
    catalog: Catalog
    configs: tuple[NodeConfig, ...]
    models: tuple[ResolvedModel, ...]
    spot: SpotMarket | None = None

    @property
    def offers(self) -> tuple[str, ...]:
        """The configurations of the allocation problem: the scenario's, then those on the spot market."""
        return (*(config.name for config in self.configs), *(() if self.spot is None else self.spot.names))


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
    for name in scenario.capacity.headroom:  # of a model that is not served it has no effect, but a typo must show
        look_up(shapes, name, "model", f"capacity.headroom.{name}", "the catalogue and the added models")
    models = tuple(
        _resolve_model(spec, shapes, scenario.regions, f"models[{i}]") for i, spec in enumerate(scenario.models)
    )
    resolved = ResolvedScenario(scenario=scenario, catalog=catalog, configs=configs, models=models)
    if scenario.spot is not None:
        market = spot_market(
            scenario.spot,
            catalog=catalog.name,
            regions=scenario.regions,
            configs=names,
            on_demand_usd_per_h=on_demand_prices(resolved),
        )
        resolved = replace(resolved, spot=market)
    selected_offers(resolved, scenario.exclusions, "exclusions")
    selected_offers(resolved, scenario.preferences, "preferences")
    return resolved


def allocation_problem(
    resolved: ResolvedScenario,
    templates: TemplateColumns,
    running: Iterable[Running] = (),
    *,
    available: NDArray[np.int64] | None = None,
) -> AllocationProblem:
    """The allocation problem of a scenario over a library's templates (`templates.nodes` in the order of its configs).

    Where the scenario has a spot market, each template that can runs there too (`with_spot_twins`). `available`
    (R, offers) replaces the scenario's own supply in its first epoch (`available_nodes`). A pair of region and
    configuration without a price is not sold there: price NaN, availability 0.
    """
    scenario = resolved.scenario
    price = node_prices(resolved)
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
        configs=resolved.offers,
        available=np.where(np.isnan(price), 0, available),
        price_usd_per_h=price,
        templates=problem_templates(resolved, templates),
        demand=tuple(row for model in resolved.models for row in demand_rows(model)),
        running=tuple(running),
        exclusions=tuple(
            Exclusion(model=item.model, config=config, region=item.region)
            for item, config in selected_offers(resolved, scenario.exclusions, "exclusions")
        ),
        preferences=tuple(
            Preference(model=item.model, config=config, region=item.region, price_factor=item.price_factor)
            for item, config in selected_offers(resolved, scenario.preferences, "preferences")
        ),
        spot_configs=() if resolved.spot is None else resolved.spot.names,
        churn_k=scenario.allocation.churn_k,
        options=AllocationOptions(
            pd_same_region=scenario.allocation.pd_same_region,
            budget_usd_per_h=scenario.allocation.budget_usd_per_h,
            gap_frac=scenario.allocation.gap_frac,
            time_limit_s=scenario.allocation.time_limit_s,
            solver=scenario.allocation.solver,
        ),
    )


def problem_templates(resolved: ResolvedScenario, templates: TemplateColumns) -> TemplateColumns:
    """A library's templates as the scenario's problem has them: those on spot nodes beside them."""
    if resolved.spot is None:
        return templates
    return with_spot_twins(templates, [config.name for config in resolved.configs], resolved.spot.configs)


def selected_offers(resolved: ResolvedScenario, items: Sequence[Chosen], key: str) -> list[tuple[Chosen, str | None]]:
    """Each exclusion or preference with the configurations of the problem that it means, one by one.

    A plain name means both markets, `name@spot` its spot nodes only. Raises InputError for what the scenario lacks.
    """
    models = [model.shape.name for model in resolved.models]
    found: list[tuple[Chosen, str | None]] = []
    for i, item in enumerate(items):
        for what, name, known in (
            ("model", item.model, models),
            ("configuration", item.config, resolved.offers),
            ("region", item.region, resolved.scenario.regions),
        ):
            if name is not None and name not in known:
                where = f"{key}[{i}].{'config' if what == 'configuration' else what}"
                raise unknown_name(f"{what} in the scenario", name, known, where=where)
        on_spot = None if item.config is None else market_name(item.config, Market.SPOT)
        found.append((item, item.config))
        if on_spot in resolved.offers:
            found.append((item, on_spot))
    return found


def available_nodes(resolved: ResolvedScenario, templates: TemplateColumns) -> NDArray[np.int64]:
    """The scenario's supply, (epochs, R, offers); that of spot nodes is the same in every epoch.

    Where it is scaled to an ample plan, that plan is made from `templates`, a library's own.
    """
    on_demand = supply(
        resolved.scenario.availability,
        regions=resolved.scenario.regions,
        configs=resolved.configs,
        sold=~np.isnan(on_demand_prices(resolved)),
        epochs=resolved.scenario.epochs,
        ample_memory_bytes=lambda: ample_plan_memory_bytes(resolved, templates),
    )
    if resolved.spot is None:
        return on_demand
    spot = np.broadcast_to(resolved.spot.nodes, (len(on_demand), *resolved.spot.nodes.shape))
    return np.concatenate((on_demand, spot), axis=2)


def ample_plan_memory_bytes(resolved: ResolvedScenario, templates: TemplateColumns) -> float:
    """GPU memory of all nodes that policy `coral_paper` rents on demand where there is no scarcity."""
    on_demand, offers = len(resolved.configs), len(resolved.offers)
    ample = np.where(np.arange(offers) < on_demand, Ample().nodes, 0)
    available = np.tile(ample, (len(resolved.scenario.regions), 1))
    instances = policy("coral_paper").solve(allocation_problem(resolved, templates, available=available)).instances
    nodes = dict(zip(templates.ids, templates.nodes, strict=True))
    memory_bytes = np.array([float(config.memory_bytes) for config in resolved.configs])
    return float(sum(item.count * (nodes[item.template] @ memory_bytes) for item in instances))


def demand_rows(model: ResolvedModel) -> list[DemandRow]:
    """One row per phase that has to be covered.

    Aggregated templates beside prefill and decode cover both of their rows; served aggregated only, the model has one
    row of its own in requests/s.
    """
    disaggregated = Phase.PREFILL in model.phases
    spec = model.spec
    rows: list[DemandRow] = []
    for phase in (Phase.PREFILL, Phase.DECODE) if disaggregated else (Phase.AGGREGATED,):
        limits = spec.limits.get(phase, InstanceLimits())
        rows.append(
            DemandRow(
                model=model.shape.name,
                phase=phase,
                tokens_per_s=model.demand.tokens_per_s(phase) if disaggregated else None,
                requests_per_s=model.demand.requests_per_s,
                weight=model.demand.weight,
                min_instances=limits.min_instances,
                max_instances=limits.max_instances,
                on_demand_frac=spec.on_demand_frac,
                spare_instances=spec.spare_instances,
                region_fracs=tuple(spec.region_fracs.items()),
            )
        )
    return rows


def catalog_of(name: str) -> Catalog:
    """The catalogue called `name`, or that of the scenario in the YAML file `name`, with what it has of its own."""
    if Path(name).suffix not in {".yaml", ".yml"}:
        return load_catalog(name)
    scenario = load_scenario(name)
    return _with_own_configs(load_catalog(scenario.catalog), scenario.own_configs)


def _with_own_configs(catalog: Catalog, own: Mapping[str, OwnConfig]) -> Catalog:
    """The catalogue and the scenario's own configurations beside it."""
    configs, prices = dict(catalog.configs), dict(catalog.prices)
    for name, spec in own.items():
        where = f"own_configs.{name}"
        if split_market(name)[1] is not Market.ON_DEMAND:
            raise InputError(f"{name!r} ends like the name of spot nodes", where=where, fix="use another name")
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


def _resolve_model(
    spec: ModelSpec, shapes: Mapping[str, ModelShape], regions: Sequence[str], where: str
) -> ResolvedModel:
    shape = look_up(shapes, spec.model, "model", f"{where}.model", "the catalogue and the added models")
    variants = spec.variants or (spec.variant or shape.default_variant,)
    for i, variant in enumerate(variants):
        place = f"{where}.variants[{i}]" if spec.variants else f"{where}.variant"
        look_up(shape.variants, variant, "variant", place, f"model {shape.name}")
    for region in spec.region_fracs:
        look_up(dict.fromkeys(regions), region, "region", f"{where}.region_fracs.{region}", "the scenario")
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
    return ResolvedModel(shape=shape, variants=variants, phases=spec.phases, demand=demand, spec=spec)


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


def node_prices(resolved: ResolvedScenario) -> NDArray[np.float64]:
    """(R, offers) prices on demand and then on the spot market, NaN where not sold."""
    on_demand = on_demand_prices(resolved)
    return on_demand if resolved.spot is None else np.hstack((on_demand, resolved.spot.price_usd_per_h))
