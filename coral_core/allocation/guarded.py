"""Guarantees where capacity binds and the templates are many: a good plan on the columns worth most, and an honest bound.

Every size of template has a binary of its own in the rows of a spare, too many for the program over all columns. So:
1. Solve the problem without spares, per-region demand and on-demand floors: a start, and bounds, since dropping rows relaxes.
2. Solve the linear relaxation that drops only spares, over all columns: more bounds, and a toll on nodes.
3. Keep what lies on each region's front of price with toll and throughput, cheap columns of every size, beside the start and
   what runs, and solve with the guarantees on those. The gap stated is the one to the bounds of 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.columns import Columns, columns_of
from coral_core.allocation.coverage import Floats, Ints, coverage_of, weight_unit
from coral_core.allocation.decompose import asking_blocks
from coral_core.allocation.formulation import Formulation, formulate
from coral_core.allocation.fronts import Fronts
from coral_core.allocation.prices import counts_of
from coral_core.allocation.rows import Family
from coral_core.allocation.stages import SHORTFALL_TOLERANCE, Staged, StagedSolve
from coral_core.allocation.wide import Effort, Relaxation, relax
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.solver.program import Solver

_SHARE = 0.15
_CHEAP_COLUMNS = 300


def has_guarantees(problem: AllocationProblem) -> bool:
    """Whether some row asks for more than throughput: a spare, service in certain regions, or without spot nodes."""
    return any(row.spare_instances or row.region_fracs or row.on_demand_frac for row in problem.demand)


def without_guarantees(problem: AllocationProblem, time_limit_s: float) -> AllocationProblem:
    """The relaxation: the same demands, wherever and however they are served."""
    demand = tuple(replace(row, spare_instances=0, region_fracs=(), on_demand_frac=0.0) for row in problem.demand)
    return replace(problem, demand=demand, options=replace(problem.options, time_limit_s=time_limit_s))


def solve_guarded(
    fronts: Fronts,
    columns: Columns,
    relaxed: tuple[AllocationProblem, AllocationResult],
    solver: Solver,
    effort: Effort,
) -> tuple[Staged, int]:
    """The best plan found with its bounds, and how many of the `columns` its program had; `relaxed` is solved already."""
    problem = fronts.problem
    counts = counts_of(*relaxed)
    linear = _Linear.of(problem, columns, solver)
    short = linear.least_shortfall(effort.within(_SHARE))
    priced = linear.least_cost(short.bound, short.active, effort.within(_SHARE)) if short else None
    toll = (
        np.zeros(problem.available.shape)
        if priced is None
        else _toll(linear.formulation, priced, problem.available.shape)
    )
    chosen = counts > 0
    tolled = fronts.with_toll(problem.templates.nodes @ toll.T)
    for rows in asking_blocks(problem, fronts.coverage):
        front = tolled.columns(rows, by_region=True)
        chosen[front.template[~front.old], front.region[~front.old]] = True
    if priced is not None:
        cheap = np.argsort(priced.reduced[: len(columns)], kind="stable")[:_CHEAP_COLUMNS]
        chosen[columns.template[cheap], columns.region[cheap]] = True
    few = columns_of(problem, fronts.coverage, chosen)
    solve = StagedSolve(
        problem=problem,
        coverage=fronts.coverage,
        formulation=formulate(problem, fronts.coverage, few),
        rows=tuple(range(len(problem.demand))),
        solver=solver,
    )
    plan = solve.run(effort.within(1 - _SHARE), start=solve.judge(counts)).plan
    result, unit = relaxed[1], weight_unit(problem)
    known = [result.statistics["shortfall_bound"] / unit, short.bound if short else 0.0]
    if plan.full:
        cost = max(result.bound_usd_per_h, priced.bound if priced else 0.0)
    else:
        last = linear.least_cost(plan.shortfall, short.active, effort) if short else None
        cost = last.bound if last else 0.0
    proven = result.statistics["shortfall_proven"] > 0
    bounds = Staged(
        plan=plan,
        cost_bound_usd_per_h=max(cost, 0.0),
        deficit_bound=float(sum(result.floor_deficit.values())) if proven else 0.0,
        shortfall_bound=min(max(known), plan.shortfall),
    )
    return bounds, len(few)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """The linear relaxation without spares; what it proves holds with them."""

    formulation: Formulation
    solver: Solver

    @classmethod
    def of(cls, problem: AllocationProblem, columns: Columns, solver: Solver) -> _Linear:
        demand = tuple(replace(row, spare_instances=0) for row in problem.demand)
        easier = replace(problem, demand=demand)
        return cls(formulation=formulate(easier, coverage_of(easier), columns), solver=solver)

    def least_shortfall(self, effort: Effort) -> Relaxation | None:
        """Prices at the least weighted shortfall, whatever the floors."""
        return relax(self.formulation.least_shortfall(math.inf), self.solver, effort, np.zeros(0, dtype=np.int64))

    def least_cost(self, shortfall: float, seed: Ints, effort: Effort) -> Relaxation | None:
        """Prices at the least cost with no more than a weighted shortfall."""
        room = max(shortfall, 0.0) + SHORTFALL_TOLERANCE
        return relax(self.formulation.least_cost(math.inf, room), self.solver, effort, seed)


def _toll(formulation: Formulation, priced: Relaxation, shape: tuple[int, ...]) -> Floats:
    toll = np.zeros(shape)
    for (family, r, c), dual in zip(formulation.row_key, priced.duals.tolist(), strict=True):
        if family is Family.CAPACITY:
            toll[r, c] = max(-dual, 0.0)
    return toll
