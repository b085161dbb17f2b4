"""Which templates to run how often in which region: the joint integer program (DESIGN 3.6).

Data, variables, constraints and objective are stated in `formulation`; this module orders the work: try the problem
without capacity limits model by model; where that does not hold, start from the plan over homogeneous templates and solve
the joint program, by whole plans of units (`scarce`), by columns of the least bounds (`joint`) or as it is; verify.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from coral_core.allocation.assess import assess, result_of, within_budget, within_pools
from coral_core.allocation.check import check_problem
from coral_core.allocation.choosing import Choosing, solver_for
from coral_core.allocation.columns import columns_of, with_templates
from coral_core.allocation.coverage import Coverage, Ints, coverage_of, weight_unit
from coral_core.allocation.decompose import solve_blocks
from coral_core.allocation.formulation import formulate
from coral_core.allocation.fronts import Fronts
from coral_core.allocation.guarded import has_guarantees, solve_guarded, without_guarantees
from coral_core.allocation.joint import Joint, solve_joint
from coral_core.allocation.prices import counts_of
from coral_core.allocation.reach import within_reach
from coral_core.allocation.reduce import reduce_columns
from coral_core.allocation.scarce import Scarce, solve_scarce
from coral_core.allocation.stages import Plan, Staged, StagedSolve, plan_of, weighted_shortfall
from coral_core.allocation.start import homogeneous_templates
from coral_core.allocation.verify import verify_allocation
from coral_core.allocation.wide import DIRECT_COLUMNS, Effort
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.solver.program import Solver

_RELAXED_SHARE = 0.4
_START_SHARE = 0.2
_APART_SHARE = 0.5


def solve_allocation(problem: AllocationProblem, *, solver: Solver | None = None) -> AllocationResult:
    """The least floor deficit, then the least weighted shortfall, then the least cost + churn; always an answer.

    At the time limit the best plan found so far, with the bound proven for it and status `gap`. `statistics`: columns
    after each reduction, seconds, `decomposed` (1: no capacity bound, so models were solved apart),
    `shortfall_proven` (1/0), `shortfall_weighted` (sum of weight x missing fraction) and its `shortfall_bound`.
    `solver` overrides `options.solver`. Raises InputError for a problem without a clear meaning, SolverError where the
    solver wished for cannot be used or its answer does not stand up to `verify_allocation`.
    """
    started = time.perf_counter()
    check_problem(problem)
    asked, asked_coverage = problem, coverage_of(problem)
    problem = within_reach(asked, asked_coverage)
    chosen = solver_for(problem.options.solver) if solver is None else solver
    coverage = asked_coverage if problem is asked else coverage_of(problem)
    effort = Effort(gap_frac=problem.options.gap_frac, deadline_s=started + problem.options.time_limit_s)
    fronts = Fronts.of(problem, coverage)
    blocks = solve_blocks(problem, coverage, fronts, chosen, effort)
    staged = blocks.staged
    counted = {"columns_all": float(len(problem.templates) * len(problem.regions)), "columns": float(blocks.columns)}
    settled = blocks.settled and _within_shared(problem, staged.plan.counts)
    start = None if settled else _over_homogeneous(problem, coverage, chosen, effort)
    joint = None if start is None else _apart_from_shared(problem, fronts, chosen, effort, start)
    if joint is not None:
        staged = joint.staged
        counted["columns"] = float(joint.columns)
    elif start is not None and time.perf_counter() > effort.deadline_s:
        staged = Staged(plan=start, cost_bound_usd_per_h=0.0)
    elif start is not None:
        reduction = reduce_columns(problem, coverage)
        columns = columns_of(problem, coverage, reduction.keep)
        counted = {**reduction.counts, "columns": float(len(columns))}
        rows = tuple(range(len(problem.demand)))
        if len(columns) > DIRECT_COLUMNS and problem.options.reduce and has_guarantees(problem):
            relaxed = without_guarantees(problem, time_limit_s=_RELAXED_SHARE * effort.left_s())
            answer = solve_allocation(relaxed, solver=solver)
            staged, counted["columns"] = solve_guarded(fronts, columns, (relaxed, answer), chosen, effort)
        else:
            formulation = formulate(problem, coverage, columns)
            solve = StagedSolve(problem=problem, coverage=coverage, formulation=formulation, rows=rows, solver=chosen)
            staged = solve.run(effort, start=start)
    if start is not None and not staged.plan.beats(start):
        staged = replace(staged, plan=start)
    if not (staged.plan.counts.any() or staged.needs_proven(problem.options.gap_frac)):
        greedy = _greedy(problem, coverage)
        staged = replace(staged, plan=greedy) if greedy.beats(staged.plan) else staged
    cost_bound = staged.cost_bound_usd_per_h
    if staged.plan.full:
        cost_bound = max(cost_bound, blocks.full_service_bound_usd_per_h)
    proven = staged.needs_proven(problem.options.gap_frac)
    assessment = assess(asked, asked_coverage, staged.plan.counts)
    rows = tuple(range(len(asked.demand)))
    shortfall = weighted_shortfall(asked, assessment, rows) * weight_unit(asked)
    unproven = max(staged.plan.shortfall - staged.shortfall_bound, 0.0) * weight_unit(problem)
    statistics = {
        **counted,
        "decomposed": float(settled),
        "shortfall_weighted": shortfall,
        "shortfall_bound": max(shortfall - unproven, 0.0),
        "shortfall_proven": float(proven),
        "solve_s": time.perf_counter() - started,
    }
    name = "+".join(sorted(chosen.used)) if isinstance(chosen, Choosing) else chosen.name
    result = result_of(
        asked,
        staged.plan.counts,
        assessment,
        bound_usd_per_h=cost_bound,
        shortfall_proven=proven,
        method=f"ilp:{name}" if name else "ilp",
        statistics=statistics,
    )
    verify_allocation(asked, result)
    return result


def _over_homogeneous(problem: AllocationProblem, coverage: Coverage, solver: Solver, effort: Effort) -> Plan:
    """The plan over homogeneous templates alone, a small program; nothing at all where these are no part of them."""
    counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
    chosen = homogeneous_templates(problem)
    if 0 < len(chosen) < len(problem.templates):
        part = with_templates(problem, chosen)
        options = replace(problem.options, time_limit_s=_START_SHARE * effort.left_s())
        part = replace(part, options=options)
        counts[chosen] = counts_of(part, solve_allocation(part, solver=solver))
    return plan_of(problem, coverage, counts, tuple(range(len(problem.demand))))


def _greedy(problem: AllocationProblem, coverage: Coverage) -> Plan:
    """A plan in next to no time, so that a time limit that is too short does not stop all that runs."""
    from coral_core.allocation.baselines.homo import homo  # noqa: PLC0415 - the baselines import this module

    return plan_of(problem, coverage, counts_of(problem, homo(problem)), tuple(range(len(problem.demand))))


def _apart_from_shared(
    problem: AllocationProblem, fronts: Fronts, solver: Solver, effort: Effort, start: Plan
) -> Scarce | Joint | None:
    """By whole plans of units or by columns of the least bounds, which know of no budget nor pools; None out of these."""
    if not problem.options.reduce:
        return None
    if problem.pools or problem.options.budget_usd_per_h is not None:
        effort = effort.within(_APART_SHARE)
    found = solve_scarce(problem, fronts, solver, effort, start) or solve_joint(problem, fronts, solver, effort, start)
    return found if found is not None and _within_shared(problem, found.staged.plan.counts) else None


def _within_shared(problem: AllocationProblem, counts: Ints) -> bool:
    """Whether a plan made without budget and pools keeps them."""
    return within_budget(problem, counts) and within_pools(problem, counts)
