"""What a set of instances costs and leaves unmet, computed from the whole numbers alone.

Every method ends here, so that no plan carries a solver's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from coral_core.allocation.coverage import DEMAND_TOLERANCE_FRAC, Coverage, Floats, Ints
from coral_core.allocation.preferences import preference_usd_per_h
from coral_core.domain.allocation import (
    SPARE_WEIGHT,
    AllocationProblem,
    AllocationResult,
    AllocationStatus,
    DemandRow,
    InstanceCount,
    Shortfall,
)

BUDGET_TOLERANCE_FRAC = 1e-8
"""A budget is kept when the cost is at most 1 plus this times it: room for the solvers' tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """Per demand row: `missing_frac`, `deficit` (instances missing from the floor), `covered_frac` (rows, places).

    `missing_frac` = `unserved_frac` + SPARE_WEIGHT x `exposed_frac`, what is served but would not survive the worst loss.
    """

    cost_usd_per_h: float
    churn_usd_per_h: float
    preference_usd_per_h: float
    unserved_frac: tuple[float, ...]
    exposed_frac: tuple[float, ...]
    deficit: tuple[int, ...]
    covered_frac: Floats

    @property
    def objective_usd_per_h(self) -> float:
        """Cost plus churn plus what preferences add."""
        return self.cost_usd_per_h + self.churn_usd_per_h + self.preference_usd_per_h

    @property
    def missing_frac(self) -> tuple[float, ...]:
        """What counts as shortfall."""
        pairs = zip(self.unserved_frac, self.exposed_frac, strict=True)
        return tuple(unserved + SPARE_WEIGHT * exposed for unserved, exposed in pairs)


def running_instances(problem: AllocationProblem) -> tuple[Ints, Ints, Ints]:
    """Template, region and number of what runs now; running templates that are not on the list are left out."""
    wanted = {item.template for item in problem.running}
    index = {name: t for t, name in enumerate(problem.templates.ids) if name in wanted} if wanted else {}
    region = {name: r for r, name in enumerate(problem.regions)}
    known = [(index[x.template], region[x.region], x.count) for x in problem.running if x.template in index]
    table = np.array(known, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def running_counts(problem: AllocationProblem) -> Ints:
    """Instances that run now, (templates, regions); running templates that are not on the list are left out."""
    counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
    template, region, number = running_instances(problem)
    np.add.at(counts, (template, region), number)
    return counts


def assess(problem: AllocationProblem, coverage: Coverage, counts: Ints) -> Assessment:
    """Assess `counts` (templates, regions), integers >= 0 that respect availability and caps."""
    t, r = np.nonzero(counts)
    number = counts[t, r]
    price = np.where(problem.templates.nodes[t] > 0, problem.price_usd_per_h[r] * problem.templates.nodes[t], 0.0)
    price_usd_per_h = price.sum(axis=1)
    added = np.maximum(number - _running_of(problem, t, r), 0)
    rows = len(problem.demand)
    covered = np.zeros((rows, len(problem.regions) * coverage.n_variants))
    place = coverage.place(t, r)
    instances = np.zeros(rows, dtype=np.int64)
    steady = np.zeros(rows)
    kind = coverage.group_of[t]
    for g, group in enumerate(coverage.groups):
        own = kind == g
        for row, amount in zip(group.rows, group.amounts, strict=True):
            instances[row] += number[own].sum()
            if amount > 0:
                with np.errstate(over="ignore"):  # a tiny demand is covered infinitely often, which is enough
                    np.add.at(covered[row], place[own], problem.templates.throughput[t[own]] * number[own] / amount)
                    kept = own & ~coverage.spot_of[t]
                    steady[row] += problem.templates.throughput[t[kept]] @ number[kept] / amount
    floor = np.array([row.on_demand_frac for row in problem.demand])
    of_floor = np.divide(steady, floor, out=np.full(rows, np.inf), where=floor > 0)
    unserved, exposed = _missing(problem, coverage, covered, of_floor, (t, r))
    return Assessment(
        cost_usd_per_h=math.fsum(price_usd_per_h * number),
        churn_usd_per_h=math.fsum(price_usd_per_h * added * problem.churn_k),
        preference_usd_per_h=math.fsum(preference_usd_per_h(problem, t, r) * number),
        unserved_frac=tuple(unserved),
        exposed_frac=tuple(exposed),
        deficit=tuple(max(row.min_instances - int(n), 0) for row, n in zip(problem.demand, instances, strict=True)),
        covered_frac=covered,
    )


def _running_of(problem: AllocationProblem, t: Ints, r: Ints) -> Ints:
    """How many of each (template, region) run now."""
    template, region, count = running_instances(problem)
    runs = {(i, k): n for i, k, n in zip(template.tolist(), region.tolist(), count.tolist(), strict=True)}
    return np.array([runs.get(key, 0) for key in zip(t.tolist(), r.tolist(), strict=True)], dtype=np.int64)


def within_budget(problem: AllocationProblem, counts: Ints) -> bool:
    """Whether `counts` cost no more than the budget, if there is one, to within float noise."""
    budget = problem.options.budget_usd_per_h
    if budget is None:
        return True
    t, r = np.nonzero(counts)
    price = np.where(problem.templates.nodes[t] > 0, problem.price_usd_per_h[r] * problem.templates.nodes[t], 0.0)
    return math.fsum(price.sum(axis=1) * counts[t, r]) <= budget * (1 + BUDGET_TOLERANCE_FRAC)


def pool_units(problem: AllocationProblem) -> Floats:
    """(pools, regions, configs): what a node takes of each pool."""
    units = np.zeros((len(problem.pools), len(problem.regions), len(problem.configs)))
    for k, pool in enumerate(problem.pools):
        for config, amount in pool.units:
            units[k, problem.regions.index(pool.region), problem.configs.index(config)] = amount
    return units


def pools_used(problem: AllocationProblem, counts: Ints) -> Floats:
    """(pools,): what `counts` (templates, regions) take of each pool."""
    nodes = counts.T @ problem.templates.nodes
    return np.asarray((pool_units(problem) * nodes).sum(axis=(1, 2)))


def within_pools(problem: AllocationProblem, counts: Ints) -> bool:
    """Whether `counts` pass no pool, to within float noise."""
    limits = np.array([pool.limit for pool in problem.pools])
    return bool((pools_used(problem, counts) <= limits * (1 + BUDGET_TOLERANCE_FRAC)).all())


def _missing(
    problem: AllocationProblem, coverage: Coverage, covered: Floats, of_floor: Floats, held: tuple[Ints, Ints]
) -> tuple[list[float], list[float]]:
    """Per row: the fraction that is not served, and the one that is served but would not survive the worst loss."""
    unserved, exposed = [0.0] * len(covered), [0.0] * len(covered)
    for unit in coverage.units():
        rows = list(unit)
        # no more than the on-demand floor of either row, met to the same fraction, allows
        short = max(_short(coverage, unit, covered[rows]), 1.0 - float(of_floor[rows].min()))
        short = short if short > DEMAND_TOLERANCE_FRAC else 0.0
        lost = short
        if coverage.spare[rows].any():
            left = (covered[rows] - own for own in _losses(problem, coverage, unit, held))
            lost = max((_short(coverage, unit, rest) for rest in left), default=short)
        for row in unit:
            unserved[row] = short
            exposed[row] = lost - short if lost - short > DEMAND_TOLERANCE_FRAC else 0.0
    return unserved, exposed


def _short(coverage: Coverage, unit: tuple[int, ...], covered: Floats) -> float:
    """The fraction of a unit that `covered` (its rows, places) leaves unserved, at least 0."""
    # what one region serves is what the scarcer phase there allows; a row on its own adds up over regions
    served = covered.min(axis=0).reshape(-1, coverage.n_variants).sum(axis=1)
    asked = coverage.region_fracs[unit[0]]
    in_regions = math.fsum(max(frac - float(served[region]), 0.0) for region, frac in asked)
    return max(1.0 - float(served.sum()), in_regions)


def _losses(
    problem: AllocationProblem, coverage: Coverage, unit: tuple[int, ...], held: tuple[Ints, Ints]
) -> Iterator[Floats]:
    """What the unit's rows lose (rows, places) with each sort of instance that serves a row which asks for a spare."""
    for template, place in zip(held[0].tolist(), coverage.place(*held).tolist(), strict=True):
        group = coverage.groups[coverage.group_of[template]] if coverage.group_of[template] >= 0 else None
        if group is None or not any(coverage.spare[row] for row in group.rows if row in unit):
            continue
        lost = np.zeros((len(unit), len(problem.regions) * coverage.n_variants))
        for row, amount in zip(group.rows, group.amounts, strict=True):
            if row in unit and amount > 0:
                lost[unit.index(row), place] = problem.templates.throughput[template] / amount
        yield lost


def result_of(
    problem: AllocationProblem,
    counts: Ints,
    assessment: Assessment,
    *,
    bound_usd_per_h: float,
    shortfall_proven: bool,
    method: str,
    statistics: Mapping[str, float],
) -> AllocationResult:
    """The result of `counts`. A bound beyond the objective by float noise is set to it; status as DESIGN 3.6."""
    objective = assessment.objective_usd_per_h
    bound = min(max(bound_usd_per_h, 0.0), objective)
    if objective - bound <= 1e-9 * objective:
        bound = objective
    within = objective - bound <= problem.options.gap_frac * max(objective, 1e-9)
    t, r = np.nonzero(counts)
    return AllocationResult(
        status=AllocationStatus.OPTIMAL if within and shortfall_proven else AllocationStatus.GAP,
        cost_usd_per_h=assessment.cost_usd_per_h,
        churn_usd_per_h=assessment.churn_usd_per_h,
        preference_usd_per_h=assessment.preference_usd_per_h,
        bound_usd_per_h=bound,
        instances=tuple(
            InstanceCount(template=problem.templates.ids[i], region=problem.regions[k], count=int(counts[i, k]))
            for i, k in zip(t, r, strict=True)
        ),
        shortfall=tuple(
            _shortfall(row, frac, SPARE_WEIGHT * exposed)
            for row, frac, exposed in zip(problem.demand, assessment.missing_frac, assessment.exposed_frac, strict=True)
        ),
        method=method,
        floor_deficit={i: n for i, n in enumerate(assessment.deficit) if n},
        statistics=dict(statistics),
    )


def _shortfall(row: DemandRow, frac: float, spare_frac: float) -> Shortfall:
    return Shortfall(
        model=row.model,
        phase=row.phase,
        tokens_per_s=None if row.tokens_per_s is None else row.tokens_per_s * frac,
        requests_per_s=None if row.requests_per_s is None else row.requests_per_s * frac,
        frac=frac,
        spare_frac=spare_frac,
    )
