"""What nodes are worth where capacity binds: column generation over whole plans, and the bound it proves.

Data: A_rc nodes that may be held; the plans g of each block of demand rows: cost c_g, nodes used U_g.
Master: min sum c_g l_g + sum P_c v_rc  with  sum_g l_g = 1 per block,  sum_g U_g l_g - v_rc <= A_rc;  l, v >= 0.
Its prices w_rc >= 0 of the capacity rows are a toll on every node; the cheapest plan of each block under the toll is a
dynamic program (`cover`). For any w, LB = sum over blocks of the least cost with toll - sum A_rc w_rc is a bound on the cost
of every plan that serves all blocks in full (weak duality), whatever the quality of w. The next toll lies between the
master's and the best one so far: the master's alone swings.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.cover import Cover, cover
from coral_core.allocation.coverage import Floats, Ints
from coral_core.allocation.decompose import Block, asking_blocks
from coral_core.allocation.fronts import Fronts
from coral_core.allocation.wide import Effort
from coral_core.solver.program import IntegerProgram, Solver, SolveStatus

_ITERATIONS = 80
_PENALTY_FACTOR = 20.0
_SMOOTHING = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolls:
    """A toll on nodes (regions, configs), the bound it proves, and the blocks priced under it.

    `least_usd_per_h[b]` is a bound on block b's cost with toll, `plans[b]` its cheapest plan: instances by column; `overfull`: the master cannot do within the capacity.
    """

    toll_usd_per_h: Floats
    bound_usd_per_h: float
    fronts: Fronts
    blocks: list[Block]
    least_usd_per_h: list[float]
    plans: list[dict[int, int]]
    overfull: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanColumn:
    block: int
    cost_usd_per_h: float
    nodes: Floats


def find_tolls(fronts: Fronts, solver: Solver, effort: Effort) -> Tolls | None:
    """The best toll found; None where some block cannot be served at all. All blocks must be coverable."""
    problem = fronts.problem
    counts = problem.templates.nodes.astype(np.float64)
    penalty = _PENALTY_FACTOR * np.nanmax(problem.price_usd_per_h, axis=0, initial=0.0)
    penalty = np.tile(np.maximum(penalty, penalty.mean()), (len(problem.regions), 1)) + 1e-9
    pool: list[_PlanColumn] = []
    best: Tolls | None = None
    toll = np.zeros(problem.available.shape)
    for _ in range(_ITERATIONS):
        priced = fronts.with_toll(counts @ toll.T)
        blocks = [priced_block(priced, rows) for rows in asking_blocks(problem, fronts.coverage)]
        covers = [
            cover(block.cover_problem(), gap_frac=effort.gap_frac, deadline_s=effort.deadline_s) for block in blocks
        ]
        if any(found.plan is None for found in covers):
            return None
        least = [found.bound_usd_per_h for found in covers]
        bound = float(sum(least) - (problem.available * toll).sum())
        if best is None or bound > best.bound_usd_per_h:
            best = Tolls(
                toll_usd_per_h=toll,
                bound_usd_per_h=bound,
                fronts=priced,
                blocks=blocks,
                least_usd_per_h=least,
                plans=[found.plan or {} for found in covers],
            )
        pool.extend(
            _plan_column(b, block, found, toll) for b, (block, found) in enumerate(zip(blocks, covers, strict=True))
        )
        master = _master(problem.available, pool, penalty, solver, effort)
        if master is None or time.perf_counter() > effort.deadline_s:
            break
        value, wanted, violated = master
        if value - best.bound_usd_per_h <= max(effort.gap_frac / 2, 1e-6) * abs(value):
            return replace(best, overfull=violated)
        toll = _SMOOTHING * best.toll_usd_per_h + (1 - _SMOOTHING) * wanted
    return best


def priced_block(priced: Fronts, rows: tuple[int, ...]) -> Block:
    """The block of these demand rows at the prices of `priced`."""
    by_region = any(row in pair for pair in priced.coverage.pairs for row in rows)
    return Block(
        problem=priced.problem,
        coverage=priced.coverage,
        columns=priced.columns(rows, by_region=by_region),
        rows=rows,
        by_region=by_region,
    )


def _plan_column(number: int, block: Block, found: Cover, toll: Floats) -> _PlanColumn:
    assert found.plan is not None
    nodes = np.zeros(toll.shape)
    for column, count in found.plan.items():
        nodes[block.columns.region[column]] += count * block.problem.templates.nodes[block.columns.template[column]]
    return _PlanColumn(block=number, cost_usd_per_h=found.cost_usd_per_h - float((nodes * toll).sum()), nodes=nodes)


def _master(
    held: Ints, pool: list[_PlanColumn], penalty: Floats, solver: Solver, effort: Effort
) -> tuple[float, Floats, bool] | None:
    """Its value, its toll and whether it exceeds some capacity; None where the solver gives no prices."""
    available = held.astype(np.float64)
    n, m, n_blocks = len(pool), available.size, 1 + max(plan.block for plan in pool)
    table = np.zeros((n_blocks + m, n + m))
    for k, plan in enumerate(pool):
        table[plan.block, k] = 1.0
        table[n_blocks:, k] = plan.nodes.ravel()
    table[n_blocks:, n:] = -np.eye(m)
    row, column = np.nonzero(table)
    counted = np.bincount(row, minlength=len(table))
    program = IntegerProgram(
        objective=np.concatenate(([plan.cost_usd_per_h for plan in pool], penalty.ravel())),
        lower=np.zeros(n + m),
        upper=np.full(n + m, np.inf),
        integer=np.zeros(n + m, dtype=bool),
        indptr=np.concatenate(([0], np.cumsum(counted))).astype(np.int32),
        indices=column.astype(np.int32),
        values=table[row, column],
        row_lower=np.concatenate((np.ones(n_blocks), np.full(m, -np.inf))),
        row_upper=np.concatenate((np.full(n_blocks, np.inf), available.ravel())),
        name="tolls",
    )
    answer = solver.solve(program, effort.options())
    if answer.status is not SolveStatus.OPTIMAL or answer.row_duals is None or answer.x is None:
        return None
    assert answer.objective is not None
    wanted = np.maximum(-answer.row_duals[n_blocks:], 0.0).reshape(available.shape)
    return answer.objective, wanted, bool(answer.x[n:].max(initial=0.0) > 1e-6)
