"""Check an allocation against its problem, by plain arithmetic that shares nothing with the solver's path."""

from __future__ import annotations

import math
from collections import defaultdict

from coral_core.domain.allocation import SPARE_WEIGHT, AllocationProblem, AllocationResult, AllocationStatus, DemandRow
from coral_core.domain.workload import Phase
from coral_core.errors import SolverError

_FRAC_TOLERANCE = 2e-9
_COST_TOLERANCE = 1e-9
_BUDGET_TOLERANCE = 1e-8


class PlanViolationError(SolverError):
    """A plan that does not hold what it states. It must not be used."""

    kind = "plan_violation"


def verify_allocation(problem: AllocationProblem, result: AllocationResult) -> None:
    """Raise PlanViolationError unless the plan respects every limit and states its cost, shortfall and bound rightly.

    Checked: names and counts, capacity per region and configuration, pools, exclusions, budget, caps, floors and their deficit, shortfall of every
    row (by one variant in one region where that is on, in the regions asked for, without spot nodes as far as asked for) and how much of it is
    missing redundancy alone, cost, churn, preferences, bound <= objective, and the status against the gap.
    """
    held = _counts(problem, result)
    _check_capacity(problem, held)
    _check_pools(problem, held)
    _check_exclusions(problem, held)
    _check_rows(problem, result, held)
    _check_cost(problem, result, held)


def _counts(problem: AllocationProblem, result: AllocationResult) -> dict[tuple[int, int], int]:
    used = {item.template for item in result.instances}
    template = {name: i for i, name in enumerate(problem.templates.ids) if name in used}
    region = {name: r for r, name in enumerate(problem.regions)}
    held: dict[tuple[int, int], int] = {}
    for index, item in enumerate(result.instances):
        where = f"instances[{index}]"
        if item.template not in template or item.region not in region:
            raise PlanViolationError(f"unknown template {item.template!r} or region {item.region!r}", where=where)
        key = (template[item.template], region[item.region])
        if item.count < 1 or key in held:
            raise PlanViolationError(
                f"{item.template!r} in {item.region!r}: count below 1, or stated twice", where=where
            )
        held[key] = item.count
    return held


def _check_capacity(problem: AllocationProblem, held: dict[tuple[int, int], int]) -> None:
    used: dict[tuple[int, int], int] = defaultdict(int)
    for (t, r), count in held.items():
        for c, nodes in enumerate(problem.templates.nodes[t].tolist()):
            used[r, c] += nodes * count
    for (r, c), nodes in used.items():
        if nodes > problem.available[r, c]:
            raise PlanViolationError(
                f"{nodes} nodes of {problem.configs[c]!r} used, {problem.available[r, c]} available",
                where=f"regions.{problem.regions[r]}.{problem.configs[c]}",
            )


def _check_pools(problem: AllocationProblem, held: dict[tuple[int, int], int]) -> None:
    for index, pool in enumerate(problem.pools):
        units = dict(pool.units)
        used = math.fsum(
            units.get(problem.configs[c], 0.0) * nodes * count
            for (t, r), count in held.items()
            if problem.regions[r] == pool.region
            for c, nodes in enumerate(problem.templates.nodes[t].tolist())
            if nodes
        )
        if not used <= pool.limit * (1 + _BUDGET_TOLERANCE):
            raise PlanViolationError(
                f"{used:g} of {pool.name!r} in {pool.region!r} used, the limit is {pool.limit:g}",
                where=f"pools[{index}]",
            )


def _check_exclusions(problem: AllocationProblem, held: dict[tuple[int, int], int]) -> None:
    for t, r in held:
        for index, item in enumerate(problem.exclusions):
            model = item.model in (None, problem.templates.models[t])
            region = item.region in (None, problem.regions[r])
            config = item.config is None or problem.templates.nodes[t][problem.configs.index(item.config)] > 0
            if model and region and config:
                name = problem.templates.ids[t]
                raise PlanViolationError(
                    f"{name!r} in {problem.regions[r]!r} is excluded", where=f"exclusions[{index}]"
                )


def _enters(model: str, phase: Phase, row: DemandRow) -> bool:
    if model != row.model:
        return False
    return phase is row.phase or (phase is Phase.AGGREGATED and row.requests_per_s is not None)


def _check_rows(problem: AllocationProblem, result: AllocationResult, held: dict[tuple[int, int], int]) -> None:
    if len(result.shortfall) != len(problem.demand):
        raise PlanViolationError(f"{len(result.shortfall)} entries for {len(problem.demand)} rows", where="shortfall")
    for i in result.floor_deficit:
        if not 0 <= i < len(problem.demand):
            raise PlanViolationError(f"there are {len(problem.demand)} rows", where=f"floor_deficit[{i}]")
    for i, row in enumerate(problem.demand):
        templates = problem.templates
        inside = (n for (t, _), n in held.items() if _enters(templates.models[t], templates.phases[t], row))
        _check_bounds(result, i, row, sum(inside))
    for i, row in enumerate(problem.demand):
        _check_shortfall(result, i, row, *_missing(problem, held, i))


def _missing(problem: AllocationProblem, held: dict[tuple[int, int], int], i: int) -> tuple[float, float]:
    """What counts as missing of the row, and the part of that which is missing redundancy."""
    if not _asks(problem.demand[i]):
        return 0.0, 0.0
    together = [i, *_partners(problem, i)]
    floor = 1.0 - _floor_met(problem, held, i)
    now = max(0.0, floor, 1.0 - _served(problem, held, together))
    after = now
    for (t, r), count in held.items():
        kind = (problem.templates.models[t], problem.templates.phases[t])
        if any(problem.demand[k].spare_instances and _enters(*kind, problem.demand[k]) for k in together):
            after = max(after, 1.0 - _served(problem, {**held, (t, r): count - 1}, together))
    spare = SPARE_WEIGHT * (after - now)
    return now + spare, spare


def _partners(problem: AllocationProblem, i: int) -> list[int]:
    """The other phase's row of a model whose phases are served together."""
    row = problem.demand[i]
    if not problem.options.pd_same_region or row.phase is Phase.AGGREGATED:
        return []
    return [k for k, other in enumerate(problem.demand) if other.model == row.model and k != i and _asks(other)]


def _served(problem: AllocationProblem, held: dict[tuple[int, int], int], together: list[int]) -> float:
    """The fraction of demand that `held` serves of rows which are served together."""
    templates = problem.templates
    apart = problem.options.pd_same_region and templates.variants is not None
    covered: list[dict[tuple[int, str], float]] = []
    for row in (problem.demand[k] for k in together):
        own: dict[tuple[int, str], float] = defaultdict(float)
        for (t, r), count in held.items():
            if _enters(templates.models[t], templates.phases[t], row):
                demand = row.requests_per_s if templates.phases[t] is Phase.AGGREGATED else row.tokens_per_s
                assert demand is not None
                variant = templates.variants[t] if apart and templates.variants is not None else ""
                own[r, variant] += float(templates.throughput[t]) * count / demand
        covered.append(own)
    by_region: dict[str, float] = defaultdict(float)
    for place in covered[0]:
        by_region[problem.regions[place[0]]] += min(own.get(place, 0.0) for own in covered)
    asked: dict[str, float] = defaultdict(float)
    for k in together:
        for region, frac in problem.demand[k].region_fracs:
            asked[region] = max(asked[region], frac)
    # each region's own part first; what it has beyond that, and the other regions, serve the rest
    whole = max(1.0, math.fsum(asked.values()))
    inside = math.fsum(min(by_region[region], frac / whole) for region, frac in asked.items())
    beyond = math.fsum(max(0.0, served - asked[region] / whole) for region, served in by_region.items())
    return inside + min(beyond, max(0.0, 1.0 - math.fsum(asked.values()) / whole))


def _asks(row: DemandRow) -> bool:
    return (row.requests_per_s if row.phase is Phase.AGGREGATED else row.tokens_per_s) not in (None, 0)


def _check_bounds(result: AllocationResult, i: int, row: DemandRow, instances: int) -> None:
    if row.max_instances is not None and instances > row.max_instances:
        raise PlanViolationError(f"{instances} instances, at most {row.max_instances}", where=f"demand[{i}]")
    if result.floor_deficit.get(i, 0) != max(0, row.min_instances - instances):
        raise PlanViolationError(
            f"{instances} instances, at least {row.min_instances}, stated deficit {result.floor_deficit.get(i, 0)}",
            where=f"floor_deficit[{i}]",
        )


def _floor_met(problem: AllocationProblem, held: dict[tuple[int, int], int], i: int) -> float:
    """How far the on-demand floors of the row, and of the one it is served with, are met; infinite without any."""
    spot = [problem.configs.index(name) for name in problem.spot_configs]
    met = math.inf
    for k, row in enumerate(problem.demand):
        together = problem.options.pd_same_region and row.model == problem.demand[i].model and _asks(row)
        if row.on_demand_frac == 0 or not (k == i or together):
            continue
        covered = 0.0
        for (t, _), count in held.items():
            phase = problem.templates.phases[t]
            if _enters(problem.templates.models[t], phase, row) and not problem.templates.nodes[t][spot].any():
                demand = row.requests_per_s if phase is Phase.AGGREGATED else row.tokens_per_s
                assert demand is not None
                covered += float(problem.templates.throughput[t]) * count / demand
        met = min(met, covered / row.on_demand_frac)
    return met


def _check_shortfall(result: AllocationResult, i: int, row: DemandRow, missing: float, spare: float) -> None:
    stated, where = result.shortfall[i], f"shortfall[{i}]"
    if (stated.model, stated.phase) != (row.model, row.phase):
        raise PlanViolationError(f"stands for {stated.model} {stated.phase}, not {row.model} {row.phase}", where=where)
    if not abs(stated.frac - missing) <= _FRAC_TOLERANCE:
        raise PlanViolationError(f"fraction {stated.frac} stated, {missing} found", where=where)
    if not abs(stated.spare_frac - spare) <= _FRAC_TOLERANCE:
        raise PlanViolationError(f"missing redundancy {stated.spare_frac} stated, {spare} found", where=where)
    for name in ("tokens_per_s", "requests_per_s"):
        demand, short = getattr(row, name), getattr(stated, name)
        if (demand is None) != (short is None):
            raise PlanViolationError(f"{name} is {short} for a demand of {demand}", where=where)
        if demand is not None and not abs(short - stated.frac * demand) <= _COST_TOLERANCE * max(demand, 1e-300):
            raise PlanViolationError(f"{name} {short} is not {stated.frac} of {demand}", where=where)


def _check_cost(problem: AllocationProblem, result: AllocationResult, held: dict[tuple[int, int], int]) -> None:
    runs: dict[tuple[str, str], int] = defaultdict(int)
    for item in problem.running:
        runs[item.template, item.region] += item.count
    cost = churn = counted = 0.0
    for (t, r), count in held.items():
        price = sum(
            nodes * float(problem.price_usd_per_h[r, c])
            for c, nodes in enumerate(problem.templates.nodes[t].tolist())
            if nodes
        )
        cost += price * count
        counted += _counted(problem, t, r) * count
        churn += max(0, count - runs[problem.templates.ids[t], problem.regions[r]]) * price * problem.churn_k
    for name, stated, found in (
        ("cost", result.cost_usd_per_h, cost),
        ("churn", result.churn_usd_per_h, churn),
        ("preference", result.preference_usd_per_h, counted - cost),
    ):
        if not abs(stated - found) <= _COST_TOLERANCE * max(1.0, cost, counted, churn):
            raise PlanViolationError(f"{stated} USD/h stated, {found} found", where=f"{name}_usd_per_h")
    budget = problem.options.budget_usd_per_h
    if budget is not None and not cost <= budget * (1 + _BUDGET_TOLERANCE):
        raise PlanViolationError(f"{cost} USD/h, the budget is {budget}", where="options.budget_usd_per_h")
    objective = counted + churn
    if not 0 <= result.bound_usd_per_h <= objective + _COST_TOLERANCE * max(1.0, objective):
        raise PlanViolationError(
            f"bound {result.bound_usd_per_h} USD/h, objective {objective}", where="bound_usd_per_h"
        )
    if result.status is AllocationStatus.OPTIMAL and not result.gap_frac <= problem.options.gap_frac + _COST_TOLERANCE:
        raise PlanViolationError(f"optimal is stated at a gap of {result.gap_frac}", where="status")


def _counted(problem: AllocationProblem, t: int, r: int) -> float:
    """What an instance counts by the preferences, node by node."""
    total = 0.0
    for c, nodes in enumerate(problem.templates.nodes[t].tolist()):
        price = nodes * float(problem.price_usd_per_h[r, c]) if nodes else 0.0
        for item in problem.preferences:
            named = (item.model, item.config, item.region)
            is_so = (problem.templates.models[t], problem.configs[c], problem.regions[r])
            if all(name in (None, own) for name, own in zip(named, is_so, strict=True)):
                price *= item.price_factor
        total += price
    return total
