"""Baseline `helix`: one model on a fixed pool of nodes, placed for the largest flow (DESIGN 3.7).

After Helix (ASPLOS 2025): the start-layer program of `helix_program`, with its edge pruning, warm start and early stop at a
share of a bound on the flow. **Ours**: the search that starts it (Helix takes Petals' or Swarm's placement; we improve on
both first), how links are pruned, and the flow's units, requests/s at the mean lengths. No latency and no price enter.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import numpy as np

from coral_core.allocation.assess import assess, result_of
from coral_core.allocation.baselines.helix_flow import max_flow, verify_pool_plan
from coral_core.allocation.baselines.helix_program import kept_links, pool_program
from coral_core.allocation.baselines.helix_start import equal_stages, flow_bound, searched, weakest_span
from coral_core.allocation.choosing import solver_for
from coral_core.allocation.coverage import coverage_of
from coral_core.allocation.verify import verify_allocation
from coral_core.domain.allocation import AllocationProblem, AllocationResult, TemplateColumns
from coral_core.domain.pool import PoolPlacement, PoolPlan, PoolProblem
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.solver.program import SolveOptions, Solver

DEGREE: Final = 12
EARLY_STOP_FRAC: Final = 0.98
SEARCH_ROUNDS: Final = 100
TEMPLATE_ID: Final = "helix-pool"


def helix(
    problem: PoolProblem,
    *,
    degree: int = DEGREE,
    early_stop_frac: float = EARLY_STOP_FRAC,
    time_limit_s: float = 60.0,
    warm_start: bool = True,
    search_rounds: int = SEARCH_ROUNDS,
    solver: Solver | None = None,
    seed: int = 0,
) -> PoolPlan:
    """The placement of the largest flow found, verified, with a bound that no placement exceeds.

    The program is solved over at most `degree` links out of each node and not at all where the start is within
    `early_stop_frac` of the bound already. The flow of the placement found is then over all links. Statistics: flows of
    each start, of the solver (NaN where it found none), size of the program, its own bound (for the kept links only),
    seconds. Raises InputError for a pool without a clear meaning.
    """
    started = time.perf_counter()
    _check(problem)
    bound = flow_bound(problem)
    starts = _starts(problem) if warm_start else {"petals": weakest_span(problem)}
    flows = {name: max_flow(problem, placement)[0] for name, placement in starts.items()}
    if warm_start and max(flows.values()) < early_stop_frac * bound:
        first = starts[max(flows, key=lambda key: flows[key])]
        rng = np.random.default_rng(seed)
        starts["search"] = searched(problem, first, rng, rounds=search_rounds, enough=early_stop_frac * bound)
        flows["search"] = max_flow(problem, starts["search"])[0]
    name = max(flows, key=lambda key: flows[key])
    best, total = starts[name], flows[name]
    statistics = {f"flow_{key}_requests_per_s": flow for key, flow in flows.items()}
    statistics["solved"] = float(bound > 0 and total < early_stop_frac * bound)
    if statistics["solved"]:
        left_s = max(time_limit_s - (time.perf_counter() - started), 0.1)
        found, facts = _solve(
            problem,
            best if warm_start else None,
            bound=bound,
            degree=degree,
            options=SolveOptions(
                time_limit_s=left_s, gap_frac=1 - early_stop_frac, feasibility_tolerance=1e-7, seed=seed
            ),
            solver=solver or solver_for("auto"),
        )
        statistics |= facts
        flow = max_flow(problem, found)[0] if found is not None else float("nan")
        statistics["flow_solver_requests_per_s"] = flow
        if found is not None and (flow > total or not warm_start):
            best, total, name = found, flow, "milp"
    total, flow_of = max_flow(problem, best)
    statistics["solve_s"] = time.perf_counter() - started
    plan = PoolPlan(
        placement=best,
        flow_requests_per_s=flow_of,
        total_requests_per_s=total,
        bound_requests_per_s=max(bound, total),
        method=f"helix:{name}",
        statistics=statistics,
    )
    verify_pool_plan(problem, plan)
    return plan


def _starts(problem: PoolProblem) -> dict[str, PoolPlacement]:
    """Placements by the name of the system whose heuristic makes them."""
    starts = {"petals": weakest_span(problem)}
    equal = equal_stages(problem)
    return starts if equal is None else {**starts, "swarm": equal}


def _solve(
    problem: PoolProblem,
    start: PoolPlacement | None,
    *,
    bound: float,
    degree: int,
    options: SolveOptions,
    solver: Solver,
) -> tuple[PoolPlacement | None, dict[str, float]]:
    """The solver's placement over the kept links, and facts about its program."""
    used = {} if start is None else max_flow(problem, start)[1]
    links = kept_links(problem, used, degree)
    program = pool_program(problem, links, bound)
    if start is not None:
        narrow = np.zeros_like(problem.link_requests_per_s)
        for i, j, limit in links:
            if i >= 0 and j >= 0:
                narrow[i, j] = limit
        flow = max_flow(replace(problem, link_requests_per_s=narrow), start)[1]
        point = program.point(start, {link: amount / bound for link, amount in flow.items()})
        options = replace(options, warm_start=point)
    result = solver.solve(program.program, options)
    facts = {
        "links": float(len(links)),
        "columns": float(program.program.n_columns),
        "rows": float(program.program.n_rows),
        "solver_s": result.solve_s,
    }
    if result.bound is not None:
        facts["bound_solver_requests_per_s"] = min(result.bound, 1.0) * bound
    return (None if result.x is None else program.placement(result.x)), facts


def pool_allocation(
    problem: AllocationProblem, pool: PoolProblem, plan: PoolPlan, *, region: str
) -> tuple[AllocationProblem, AllocationResult]:
    """The plan in the terms of an allocation: the whole pool as one aggregated template that runs once in `region`.

    A fixed pool is paid for whole, idle nodes included. The problem returned has that template only; the result is
    verified against it. Raises InputError where the problem lacks the region or a configuration, or has too few nodes.
    """
    nodes = np.zeros((1, len(problem.configs)), dtype=np.int64)
    for node in pool.nodes:
        if node.config not in problem.configs:
            raise InputError(f"the pool has a {node.config!r}, the problem has none", where="pool")
        nodes[0, problem.configs.index(node.config)] += 1
    if region not in problem.regions or (nodes[0] > problem.available[problem.regions.index(region)]).any():
        raise InputError(f"region {region!r} does not hold the pool", where="pool", fix="name the region that does")
    whole = replace(
        problem,
        templates=TemplateColumns(
            ids=(TEMPLATE_ID,),
            models=(pool.model,),
            phases=(Phase.AGGREGATED,),
            nodes=nodes,
            throughput=np.array([plan.total_requests_per_s]),
        ),
        running=(),
    )
    counts = np.zeros((1, len(problem.regions)), dtype=np.int64)
    counts[0, problem.regions.index(region)] = 1
    result = result_of(
        whole,
        counts,
        assess(whole, coverage_of(whole), counts),
        bound_usd_per_h=0.0,
        shortfall_proven=False,
        method="helix",
        statistics=plan.statistics,
    )
    verify_allocation(whole, result)
    return whole, result


def _check(problem: PoolProblem) -> None:
    n = len(problem.nodes)
    if n == 0 or problem.layers < 1:
        raise InputError(f"{n} nodes and {problem.layers} layers", where="pool", fix="at least one of each is due")
    for i, node in enumerate(problem.nodes):
        rates = np.array(node.requests_per_s)
        if not len(rates) or len(rates) > problem.layers or not (np.isfinite(rates) & (rates >= 0)).all():
            raise InputError(
                f"requests_per_s must be 1 to {problem.layers} finite numbers >= 0", where=f"pool.nodes[{i}]"
            )
    shapes = {"link": (n, n), "source": (n,), "sink": (n,)}
    for name, shape in shapes.items():
        array = getattr(problem, f"{name}_requests_per_s")
        if array.shape != shape or np.isnan(array).any() or (array < 0).any():
            raise InputError(f"must be of shape {shape}, numbers >= 0", where=f"pool.{name}_requests_per_s")
