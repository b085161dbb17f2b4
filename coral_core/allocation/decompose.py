"""Solve models apart as if no capacity were shared, and see whether the plans fit together.

Without capacity rows the problem falls into blocks of demand rows that share templates: one (model, phase), or one model
where aggregated templates or `pd_same_region` join its phases. Dropping rows is a relaxation. So if the joined plan fits
into what is available it is optimal, block bounds adding up; and if every block is served in full, the sum of their cost
bounds holds for every plan that serves all in full. Inside a block only price and throughput matter, hence the columns
are cut to the price front (`reduce.price_front`) first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.columns import Columns, useful_instances
from coral_core.allocation.coverage import Bools, Coverage
from coral_core.allocation.formulation import formulate
from coral_core.allocation.reduce import price_front
from coral_core.allocation.stages import Plan, Staged, StagedSolve
from coral_core.allocation.wide import Effort
from coral_core.domain.allocation import AllocationProblem
from coral_core.solver.program import Solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The joined plan; `settled`: it fits, so it answers the joint problem. `full_service_bound` in USD/h."""

    staged: Staged
    settled: bool
    full_service_bound: float


def blocks_of(problem: AllocationProblem, coverage: Coverage) -> list[tuple[int, ...]]:
    """Demand rows that must be solved together, each row in one block."""
    block = list(range(len(problem.demand)))
    for joined in [*(group.rows for group in coverage.groups), *coverage.pairs]:
        target, merged = block[joined[0]], {block[row] for row in joined}
        block = [target if name in merged else name for name in block]
    return [tuple(i for i, name in enumerate(block) if name == first) for first in dict.fromkeys(block)]


def solve_blocks(
    problem: AllocationProblem, coverage: Coverage, columns: Columns, solver: Solver, effort: Effort
) -> Blocks:
    """Solve every block without capacity limits, within less than half of the time left, and join the plans."""
    columns = _unlimited(problem, coverage, columns)
    blocks = blocks_of(problem, coverage)
    share = effort.within(0.4)
    solved = []
    for number, rows in enumerate(blocks):
        own = columns.take(_in_block(problem, coverage, columns, rows))
        formulation = formulate(problem, coverage, own, rows=rows, capacity=False)
        solve = StagedSolve(problem=problem, coverage=coverage, formulation=formulation, rows=rows, solver=solver)
        solved.append(solve.run(share.within(1 / (len(blocks) - number))))
    counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
    for block in solved:
        counts += block.plan.counts
    plan = Plan(
        counts=counts,
        deficit=sum(block.plan.deficit for block in solved),
        shortfall=math.fsum(block.plan.shortfall for block in solved),
        cost_usd_per_h=math.fsum(block.plan.cost_usd_per_h for block in solved),
    )
    staged = Staged(
        plan=plan,
        cost_bound=math.fsum(block.cost_bound for block in solved),
        deficit_bound=math.fsum(block.deficit_bound for block in solved),
        shortfall_bound=math.fsum(block.shortfall_bound for block in solved),
    )
    used = counts.T @ problem.templates.nodes
    return Blocks(
        staged=staged,
        settled=bool((used <= problem.available).all()),
        full_service_bound=staged.cost_bound if plan.full else 0.0,
    )


def _unlimited(problem: AllocationProblem, coverage: Coverage, columns: Columns) -> Columns:
    """Columns that fit at all, new instances without the limits that availability sets."""
    columns = columns.take(columns.upper > 0)
    useful = useful_instances(problem, coverage)[columns.template].astype(float)
    return replace(columns, upper=np.where(columns.old, columns.upper, useful))


def _in_block(problem: AllocationProblem, coverage: Coverage, columns: Columns, rows: tuple[int, ...]) -> Bools:
    """The block's columns on the price front; where regions matter, on each region's own. What runs always stays."""
    chosen = np.zeros(len(columns), dtype=bool)
    by_region = any(row in pair for pair in coverage.pairs for row in rows)
    group_of = np.full(len(problem.templates), -1, dtype=np.int64)
    for g, group in enumerate(coverage.groups):
        group_of[group.members] = g if group.rows[0] in rows else -1
    kind = group_of[columns.template]
    for g, group in enumerate(coverage.groups):
        throughput = np.minimum(problem.templates.throughput, max(group.amounts))[columns.template]
        for r in range(len(problem.regions)) if by_region else (None,):
            inside = kind == g if r is None else (kind == g) & (columns.region == r)
            new = np.flatnonzero(inside & ~columns.old)
            chosen[new[price_front(columns.cost[new], throughput[new])]] = True
            chosen[inside & columns.old] = True
    return chosen
