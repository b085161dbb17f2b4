"""The limits of a plan by family: how far it uses each, and what it is worth at the prices of the relaxation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import pools_used
from coral_core.allocation.coverage import Floats, fraction
from coral_core.allocation.prices import Prices
from coral_core.allocation.reduce import excluded
from coral_core.allocation.rows import Family
from coral_core.domain.allocation import AllocationProblem, AllocationResult, Exclusion

_PRICE_NOISE = 1e-9
_FRAC_NOISE = 1e-9
PD_SAME_REGION = "pd_same_region"
EXCLUSION = "exclusion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit and how far the plan uses it. `binding`: the plan reaches it, or it has a price in the relaxation.

    `name` is what it limits (region and configuration, model and phase). `used` and `limit` are nodes for capacity,
    instances for floors and caps, USD/h for the budget, units of a pool for `quota`, and fractions of the demand for the rest: covered without spot nodes
    (`on_demand`), served in a region (`region_demand`), left after the worst loss (`redundancy`), served by pairs against what
    would be if either phase could lie anywhere (`pd_same_region`). `shadow_usd_per_h` >= 0: what it would save, at the plan's
    own shortfall, to have one more node (capacity), one instance more (cap) or less (floor), one USD/h more of budget, one unit more of a pool, a whole
    demand less to cover so (`on_demand`, `region_demand`, `redundancy`: in proportion for less), or one instance, the best,
    that may serve partners anywhere (`pd_same_region`) or is not excluded (`exclusion`).
    """

    family: str
    name: tuple[str, str]
    used: float
    limit: float
    shadow_usd_per_h: float
    binding: bool


def limits_of(problem: AllocationProblem, result: AllocationResult, prices: Prices) -> tuple[Limit, ...]:
    """Every limit of every family that the problem has."""
    return (*_of_rows(problem, result, prices), *_pairs(problem, prices), *_exclusions(problem, prices))


def _of_rows(problem: AllocationProblem, result: AllocationResult, prices: Prices) -> Iterator[Limit]:
    """Limits that are rows of the program; of redundancy all rows of a unit together."""
    used = prices.counts.T @ problem.templates.nodes
    taken = pools_used(problem, prices.counts)
    redundancy: dict[int, float] = {}
    for (family, a, b), value in priced_rows(prices):
        if family is Family.CAPACITY:
            name, limit = (problem.regions[a], problem.configs[b]), float(problem.available[a, b])
            yield _limit(family, name, float(used[a, b]), limit, value)
        elif family is Family.ON_DEMAND:
            row = problem.demand[a]
            steady = _covered_without_spot(prices, problem, a)
            yield _limit(family, (row.model, row.phase.value), steady, row.on_demand_frac, value)
        elif family is Family.BUDGET:
            budget = problem.options.budget_usd_per_h
            assert budget is not None
            yield _limit(family, ("fleet", "usd_per_h"), result.cost_usd_per_h, budget, value)
        elif family is Family.QUOTA:
            pool = problem.pools[a]
            yield _limit(family, (pool.region, pool.name), float(taken[a]), pool.limit, value)
        elif family in (Family.FLOOR, Family.CAP):
            row = problem.demand[a]
            bound = row.min_instances if family is Family.FLOOR else row.max_instances
            assert bound is not None
            yield _limit(family, (row.model, row.phase.value), float(prices.instances(a)), float(bound), value)
        elif family is Family.REGION_DEMAND:
            asked = dict(prices.coverage.region_fracs[a])[b]
            model, phases = _unit_name(problem, prices, a)
            served = float(_served(prices, a)[b])
            yield _limit(family, (model, f"{phases} in {problem.regions[b]}"), served, asked, value)
        elif family is Family.REDUNDANCY:
            redundancy[a] = redundancy.get(a, 0.0) + value
    plan = prices.assessment
    for a, value in redundancy.items():
        left = 1.0 - plan.unserved_frac[a] - plan.exposed_frac[a]
        yield _limit(
            Family.REDUNDANCY, _unit_name(problem, prices, a), left, 1.0, value, reached=left < 1 - _FRAC_NOISE
        )


def priced_rows(prices: Prices) -> Iterator[tuple[tuple[Family, int, int], float]]:
    """Each row's key, and what one unit of it is worth."""
    formulation = prices.formulation
    for key, scale, dual in zip(formulation.row_key, formulation.row_scale, prices.relaxation.duals, strict=True):
        yield key, abs(float(dual) * float(scale))


def _pairs(problem: AllocationProblem, prices: Prices) -> Iterator[Limit]:
    """What an instance would save that may serve partners anywhere: its reduced cost at the best place's prices."""
    columns, coverage = prices.formulation.columns, prices.coverage
    place = coverage.place(columns.template, columns.region)
    paid: dict[int, Floats] = {
        i: np.zeros(len(problem.regions) * coverage.n_variants) for u in coverage.pairs for i in u
    }
    for (family, a, b), value in priced_rows(prices):
        if family is Family.REGION:
            paid[a][b] = value
    for pair in coverage.pairs:
        saved = 0.0
        for g, group in enumerate(coverage.groups):
            if len(group.rows) > 1 or group.rows[0] not in pair:
                continue
            own = np.flatnonzero(coverage.group_of[columns.template] == g)
            own = own[columns.upper[own] > 0]
            frac = fraction(problem.templates.throughput[columns.template[own]], group.amounts[0], capped=False)
            best = paid[group.rows[0]]
            elsewhere = prices.relaxation.reduced[own] - frac * (best.max(initial=0.0) - best[place[own]])
            saved = max(saved, -float(elsewhere.min(initial=0.0)))
        covered = prices.assessment.covered_frac[list(pair)]
        free = min(float(covered.sum(axis=1).min()), 1.0)
        together = min(float(_served(prices, pair[0]).sum()), 1.0)
        name = _unit_name(problem, prices, pair[0])
        yield _limit(PD_SAME_REGION, name, together, free, saved, reached=together < free - _FRAC_NOISE)


def _exclusions(problem: AllocationProblem, prices: Prices) -> Iterator[Limit]:
    """What the best instance would save that this exclusion alone forbids."""
    columns = prices.formulation.columns
    forbidden = [excluded(replace(problem, exclusions=(item,))) for item in problem.exclusions]
    times = np.sum(forbidden, axis=0)
    for index, (item, own) in enumerate(zip(problem.exclusions, forbidden, strict=True)):
        alone = (own & (times == 1))[columns.template, columns.region]
        useful = alone & (prices.coverage.group_of[columns.template] >= 0)
        saved = -float(prices.relaxation.reduced[: len(columns)][useful].min(initial=0.0))
        yield _limit(EXCLUSION, (f"exclusions[{index}]", _named(item)), 0.0, 0.0, saved, reached=False)


def _named(item: Exclusion) -> str:
    parts = (("model", item.model), ("config", item.config), ("region", item.region))
    return ", ".join(f"{kind} {name}" for kind, name in parts if name is not None)


def _unit_name(problem: AllocationProblem, prices: Prices, row: int) -> tuple[str, str]:
    unit = next(unit for unit in prices.coverage.units() if row in unit)
    return problem.demand[row].model, "+".join(problem.demand[i].phase.value for i in unit)


def _served(prices: Prices, row: int) -> Floats:
    """(regions,): the fraction of the row's unit that each region serves."""
    unit = next(unit for unit in prices.coverage.units() if row in unit)
    covered = prices.assessment.covered_frac[list(unit)].min(axis=0)
    return np.asarray(covered.reshape(-1, prices.coverage.n_variants).sum(axis=1))


def _covered_without_spot(prices: Prices, problem: AllocationProblem, row: int) -> float:
    covered = 0.0
    steady = ~prices.coverage.spot_of
    for group in prices.coverage.groups:
        if row in group.rows and steady[group.members[0]]:
            amount = group.amounts[group.rows.index(row)]
            covered += (
                float(prices.counts[group.members].sum(axis=1) @ problem.templates.throughput[group.members]) / amount
            )
    return covered


def _limit(
    family: Family | str, name: tuple[str, str], used: float, limit: float, value: float, *, reached: bool | None = None
) -> Limit:
    if reached is None:
        least = family in (Family.FLOOR, Family.ON_DEMAND, Family.REGION_DEMAND)
        reached = used <= limit if least else used >= limit
    return Limit(
        family=str(family),
        name=name,
        used=used,
        limit=limit,
        shadow_usd_per_h=value,
        binding=reached or value > _PRICE_NOISE,
    )
