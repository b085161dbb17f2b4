"""What each lever that `homo_joint` lacks is worth, alone and together: cost as planned, goodput as simulated.

A lever is a setting of the scenario or of the policy. Every plan of a table counts on the same headroom, meets the same
demand and, where supply is scarce, draws on the same nodes: those that are to be had are a multiple of what the published
plan (mixed replicas, equal split, no other lever) holds at ample supply and the same rate. One library for each method,
with all variants and phases in it, serves all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from artifacts.library import LibrarySnapshot
from artifacts.templates import template_columns
from coral_core import __version__
from coral_core.allocation.policies import Policy, policy
from coral_core.catalog import load_models
from coral_core.catalog.spot import load_spot
from coral_core.config.headroom import headroom_rows
from coral_core.config.market_spec import SpotDefault, SpotSpec
from coral_core.config.resolve import (
    ResolvedScenario,
    ample_plan_memory_bytes,
    available_nodes,
    on_demand_prices,
    resolve_scenario,
)
from coral_core.config.scenario import (
    Ample,
    CapacitySpec,
    EpochsSpec,
    HeadroomSpec,
    LibraryMethod,
    ModelSpec,
    RandomWalk,
    Scenario,
)
from coral_core.domain.allocation import AllocationResult
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import Market, split_market
from coral_core.domain.workload import Phase
from coral_core.errors import CoralError, InputError
from coral_core.units import GIB
from tasks.library import build_spec_from_scenario, capacity_tables
from tasks.plan import scenario_templates, selected_rows
from tasks.plan_documents import selections
from tasks.policy_plans import PolicyPlans, instance_counts, plan_epochs
from tasks.replay import Replay, fleet_of, replay, why_not_simulated
from tasks.template_source import TemplateSource

SCHEMA_VERSION: Final = 1
RATES: Final = (10.0, 25.0, 100.0)
ON_DEMAND_FRAC: Final = 0.5
"""Share of the demand that on-demand nodes must be able to serve in rows with spot nodes."""
SPOT_NODES: Final = 1000
"""Spot nodes of each configuration and region at ample supply, where the scenario does not say."""
ASSUMED_SPOT: Final = SpotDefault(
    price_frac=0.4,
    interruptions_per_h=0.05,
    source="assumption of the lever table: 40% of the on-demand price, one loss in 20 hours",
    as_of=date(2026, 11, 29),
)
QUANTISED: Final = "fp8"
"""The variant that competes with a model's own where it has one; smaller ones change answers more."""

Supply = Literal["ample", "scarce"]
Nodes = NDArray[np.int64]
Row = dict[str, Any]


class Lever(StrEnum):
    """What a plan may use beyond `homo_joint`."""

    MIXED = "mixed replicas"
    FREE_SPLIT = "free split"
    AGGREGATED = "aggregated"
    VARIANTS = "variants"
    SPOT = "spot"


Levers = frozenset[Lever]
OTHERS: Final = tuple(lever for lever in Lever if lever is not Lever.MIXED)
SETS: Final[tuple[Levers, ...]] = (
    frozenset(),
    *(frozenset({lever}) for lever in OTHERS),
    frozenset(OTHERS),
    frozenset({Lever.MIXED}),
    *(frozenset({Lever.MIXED, lever}) for lever in OTHERS),
    frozenset(Lever),
)
"""Each lever alone on `homo_joint`, all but mixed replicas; mixed replicas, each other one on top of them, all."""


def lever_text(levers: Levers) -> str:
    """`homo_joint + spot`, `mixed replicas + aggregated`, in words."""
    base = [str(Lever.MIXED) if Lever.MIXED in levers else "homo_joint"]
    others = [lever for lever in OTHERS if lever in levers]
    return " + ".join([*base, *(["all others"] if len(others) == len(OTHERS) else map(str, others))])


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRun:
    """What a table is made for. `memory_frac` scales scarce supply; no seeds: nothing is simulated."""

    rates: tuple[float, ...] = RATES
    supplies: tuple[Supply, ...] = ("ample", "scarce")
    seeds: tuple[int, ...] = (0,)
    simulated_s: float = 180.0
    memory_frac: float = 2.5

    def __post_init__(self) -> None:
        """Raise InputError for settings without a meaning."""
        for name, values, most in (
            ("rates", self.rates, 1e6),
            ("minutes", (self.simulated_s / 60,), 10_080.0),
            ("memory_frac", (self.memory_frac,), 1000.0),
        ):
            wrong = next((value for value in values if not 0 < value <= most), None)
            if wrong is not None:
                raise InputError(f"{wrong:g} is not above 0 and at most {most:g}", where=f"--{name.replace('_', '-')}")
        if not self.rates or not self.supplies:
            raise InputError("there is nothing to plan for", where="--rates, --supply", fix="give at least one of each")
        if min(self.seeds, default=0) < 0:
            raise InputError(f"{min(self.seeds)} is below 0", where="--seeds")


def full_scenario(scenario: Scenario, method: LibraryMethod, *, user_models: Path | None = None) -> ResolvedScenario:
    """The scenario with all that any lever may use, on a library of its own: what `lever_table` needs one of per method."""
    if scenario.capacity.layer_times is not None:
        raise InputError(
            "measured layer times are of one variant, and say nothing of aggregated service",
            where=f"scenario {scenario.name}, capacity.layer_times",
            fix="use a scenario whose capacities are estimated",
        )
    library = scenario.library.model_copy(
        update={"name": f"{scenario.library_name}-levers-{method}", "method": method, "keep_all": False}
    )
    return resolve_scenario(
        _with_levers(_prepared(scenario, user_models), frozenset(Lever)).model_copy(update={"library": library}),
        user_models=user_models,
    )


def lever_methods(scenario: Scenario) -> tuple[LibraryMethod, LibraryMethod]:
    """The equal split as the scenario makes it, and the free one."""
    return ("ilp" if scenario.library.method == "ilp" else "lattice", "lattice-free")


def _prepared(scenario: Scenario, user_models: Path | None) -> Scenario:
    """No lever is used yet; headroom is stated for aggregated service too, the smaller share of the two phases'."""
    shapes = load_models(user_models)
    models, headroom = [], dict(scenario.capacity.headroom)
    for spec in scenario.models:
        shape = shapes.get(spec.model)  # an unknown one is for resolving to report
        variants = spec.variants
        if variants is None and shape is not None:
            own = spec.variant or shape.default_variant
            variants = (own, *({QUANTISED} & set(shape.variants) - {own}))
        models.append(spec.model_copy(update={"variant": None, "variants": variants, "phases": tuple(Phase)}))
        headroom[spec.model] = _with_aggregated(scenario.capacity, spec.model)
    capacity = scenario.capacity.model_copy(update={"headroom": headroom})
    return scenario.model_copy(update={"models": tuple(models), "capacity": capacity})


def _with_aggregated(capacity: CapacitySpec, model: str) -> HeadroomSpec:
    own = capacity.headroom.get(model, HeadroomSpec())
    phases = (Phase.PREFILL, Phase.DECODE)
    slo = {phase: capacity.slo_frac_of(model, phase) for phase in phases}
    used = {phase: capacity.max_utilization_frac_of(model, phase) for phase in phases}
    given_slo = {**capacity.slo_frac, **own.slo_frac}
    given_used = {**capacity.max_utilization_frac, **own.max_utilization_frac}
    return HeadroomSpec(
        slo_frac={**slo, Phase.AGGREGATED: given_slo.get(Phase.AGGREGATED, min(slo.values()))},
        max_utilization_frac={**used, Phase.AGGREGATED: given_used.get(Phase.AGGREGATED, min(used.values()))},
    )


def _with_levers(prepared: Scenario, levers: Levers) -> Scenario:
    """The prepared scenario with these levers and no others; mixed replicas and the split are the policy's to choose."""
    spot = None
    if Lever.SPOT in levers:
        from_catalog = bool(load_spot(prepared.catalog))
        spot = prepared.spot or SpotSpec(
            nodes=SPOT_NODES, from_catalog=from_catalog, default=None if from_catalog else ASSUMED_SPOT
        )
    update: dict[str, Any] = {"spot": spot, "models": tuple(_model_with(model, levers) for model in prepared.models)}
    if spot is None:  # what only concerns spot nodes names nothing
        for key in ("exclusions", "preferences"):
            items = getattr(prepared, key)
            update[key] = tuple(item for item in items if split_market(item.config or "")[1] is Market.ON_DEMAND)
    return prepared.model_copy(update=update)


def _model_with(model: ModelSpec, levers: Levers) -> ModelSpec:
    variants = model.variants or ()
    return model.model_copy(
        update={
            "variants": variants if Lever.VARIANTS in levers else variants[:1],
            "phases": tuple(Phase) if Lever.AGGREGATED in levers else (Phase.PREFILL, Phase.DECODE),
            "on_demand_frac": max(model.on_demand_frac, ON_DEMAND_FRAC) if Lever.SPOT in levers else 0.0,
        }
    )


def lever_table(
    scenario: Scenario,
    snapshots: Mapping[LibraryMethod, LibrarySnapshot],
    run: LeverRun,
    *,
    user_models: Path | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> Row:
    """Plan, and simulate, every set of levers at every rate and supply: one document for JSON.

    Snapshots are of `full_scenario`, by method.

    A row whose plan or simulation fails says why, and has no figures; a row that cannot be simulated has those of its plan.
    Raises InputError for a scenario or settings without a meaning.
    """
    bench = _Bench(_prepared(scenario, user_models), snapshots, user_models)
    rows: list[Row] = []
    for rate in run.rates:
        for supply in run.supplies:
            nodes = bench.scarce_nodes(rate, run) if supply == "scarce" else None
            base: Row | None = None
            for levers in SETS:
                on_step(f"{rate:g} requests/s, {supply}: {lever_text(levers)}")
                row = bench.row(levers, rate, nodes, run)
                base = base or row
                rows.append({"requests_per_s": rate, "supply": supply, **row, **_beside(row, base)})
    full = bench.full
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "levers",
        "code_version": __version__,
        "scenario": scenario.name,
        "kinds": {"cost": "predicted", "goodput": "simulated", "solve_s": "measured on this machine"},
        "run": asdict(run),
        "headroom": headroom_rows(full),
        "variants": {model.shape.name: list(model.variants) for model in full.models},
        "spot_sources": [] if full.spot is None else list(full.spot.sources),
        "on_demand_frac": ON_DEMAND_FRAC,
        "n_max": scenario.library.n_max,
        "rows": rows,
    }


def _beside(row: Row, base: Row) -> Row:
    """How the row compares with `homo_joint`."""
    cost, of_base = row.get("cost_usd_per_h"), base.get("cost_usd_per_h")
    return {"ratio_to_homo_joint": cost / of_base if cost is not None and of_base else None}


class _Bench:
    """The libraries, read once, and the plans made from them."""

    def __init__(
        self, prepared: Scenario, snapshots: Mapping[LibraryMethod, LibrarySnapshot], user_models: Path | None
    ) -> None:
        self.prepared = prepared
        self.user_models = user_models
        self.rows: dict[LibraryMethod, pa.Table] = {}
        self.tables: dict[LibraryMethod, tuple[CapacityTable, ...]] = {}
        for method, snapshot in snapshots.items():
            full = full_scenario(prepared, method, user_models=user_models)
            self.rows[method] = scenario_templates(full, snapshot)
            self.tables[method] = tuple(capacity_tables(build_spec_from_scenario(full)))
        self.full = full

    def resolved(self, levers: Levers, rate: float, simulated_s: float) -> ResolvedScenario:
        """The scenario with these levers at this rate, supply ample."""
        method = lever_methods(self.prepared)[Lever.FREE_SPLIT in levers]
        scenario = _with_levers(self.prepared, levers)
        return resolve_scenario(
            scenario.model_copy(
                update={
                    "library": scenario.library.model_copy(update={"method": method}),
                    "models": tuple(model.model_copy(update={"requests_per_s": rate}) for model in scenario.models),
                    "availability": Ample(),
                    "epochs": EpochsSpec(count=1, duration_s=simulated_s),
                }
            ),
            user_models=self.user_models,
        )

    def source(self, resolved: ResolvedScenario) -> TemplateSource:
        method = resolved.scenario.library.method
        return TemplateSource(resolved, {}, rows={method: selected_rows(selections(resolved), self.rows[method])})

    def scarce_nodes(self, rate: float, run: LeverRun) -> Nodes:
        """(R, C) nodes: `memory_frac` x the memory of the published plan at this rate, spread by a seeded draw."""
        resolved = self.resolved(frozenset({Lever.MIXED}), rate, run.simulated_s)
        columns = template_columns(self.source(resolved).rows[resolved.scenario.library.method], resolved.offers)
        held_gib = ample_plan_memory_bytes(resolved, columns) / GIB
        own = self.prepared.availability
        walk = own if isinstance(own, RandomWalk) else RandomWalk(kind="random_walk", seed=1, memory_gib=1.0)
        spec = walk.model_copy(update={"memory_gib": held_gib * run.memory_frac, "memory_frac_of_ample": None})
        scarce = replace(resolved, scenario=resolved.scenario.model_copy(update={"availability": spec}))
        nodes: Nodes = available_nodes(scarce, columns)[0]
        return nodes

    def row(self, levers: Levers, rate: float, nodes: Nodes | None, run: LeverRun) -> Row:
        found: Row = {"levers": [str(lever) for lever in Lever if lever in levers], "name": lever_text(levers)}
        try:
            resolved = self.resolved(levers, rate, run.simulated_s)
            source = self.source(resolved)
            source.supply = _supply(resolved, nodes)
            plans = plan_epochs(source, _policy(levers))
            found |= _planned(plans)
            found |= self._served(resolved, plans, run.seeds)
        except CoralError as error:
            found["failed"] = str(error)
        return found

    def _served(self, resolved: ResolvedScenario, plans: PolicyPlans, seeds: Sequence[int]) -> Row:
        reason = why_not_simulated(resolved)
        if reason or not seeds:
            return {"notes": [f"not simulated: {reason}"] if reason else []}
        fleet = fleet_of(resolved, plans, tables=self.tables[plans.method])
        runs = [replay(resolved, plans, seed=seed, fleet=fleet) for seed in seeds]
        return _simulated(runs, plans)


def _policy(levers: Levers) -> Policy:
    """Whichever split the row's scenario names is the one it plans from."""
    return replace(policy("coral" if Lever.MIXED in levers else "homo_joint"), published_split=False)


def _supply(resolved: ResolvedScenario, nodes: Nodes | None) -> Nodes:
    """(1, R, offers). Scarce nodes are the same in number with a spot market: there half of each kind, rounded down, is spot."""
    if nodes is None or resolved.spot is None:
        on_demand = np.where(np.isnan(on_demand_prices(resolved)), 0, Ample().nodes) if nodes is None else nodes
        spot = [] if resolved.spot is None else [resolved.spot.nodes]
        return np.concatenate([on_demand, *spot], axis=1)[None]
    names = [config.name for config in resolved.configs]
    at = [names.index(name) for name in resolved.spot.configs]
    spot_nodes = np.where(np.isnan(resolved.spot.price_usd_per_h), 0, nodes[:, at] // 2)
    on_demand = nodes.copy()
    on_demand[:, at] -= spot_nodes
    return np.concatenate([on_demand, spot_nodes], axis=1)[None]


def _planned(plans: PolicyPlans) -> Row:
    (epoch,) = plans.epochs
    result, counts = epoch.result, instance_counts(plans, 0)
    return {
        "cost_usd_per_h": result.objective_usd_per_h,
        "startup_usd_per_h": result.churn_usd_per_h,
        "shortfall_frac": max((item.frac for item in result.shortfall), default=0.0),
        "not_served_frac": _not_served_frac(result),
        "bound_usd_per_h": result.bound_usd_per_h,
        "gap_frac": result.gap_frac,
        "status": result.status.value,
        "solve_s": epoch.solve_s,
        **asdict(counts),
        **dict(_shares(plans)),
    }


def _not_served_frac(result: AllocationResult) -> float:
    """Mean over the models of the share of their demand that some phase does not cover."""
    worst: dict[str, float] = {}
    for item in result.shortfall:
        worst[item.model] = max(worst.get(item.model, 0.0), item.frac)
    return fmean(worst.values()) if worst else 0.0


def _shares(plans: PolicyPlans) -> Iterator[tuple[str, int]]:
    """Instances that use a lever: on spot nodes, of both phases, of another variant than the model's first."""
    (epoch,) = plans.epochs
    chosen = [(plans.templates[name], name, count) for (name, _), count in epoch.counts.items()]
    yield "spot_instances", sum(count for _, name, count in chosen if name.endswith("@spot"))
    yield "aggregated_instances", sum(count for one, _, count in chosen if one.phase is Phase.AGGREGATED)
    yield "quantised_instances", sum(count for one, _, count in chosen if one.variant == QUANTISED)


def _simulated(runs: Sequence[Replay], plans: PolicyPlans) -> Row:
    whole = [run.whole["*"] for run in runs]
    goodput = fmean(one.goodput_tokens_per_s for one in whole)
    offered = fmean(one.offered_tokens_per_s for one in whole)
    cost = plans.epochs[0].result.objective_usd_per_h
    return {
        "goodput_tokens_per_s": goodput,
        "goodput_frac": goodput / offered if offered > 0 else None,
        "attainment_frac": fmean(one.attainment_frac for one in whole),
        "usd_per_million_good_tokens": cost / (goodput * 3600 / 1e6) if goodput > 0 else None,
        "requests": int(sum(one.offered_requests for one in whole)),
        "simulate_s": sum(run.wall_s for run in runs),
        "notes": sorted({note for run in runs for note in run.notes}),
    }
