"""Prices of a plan's limits, from one linear program.

It is the relaxation of the cost stage over all columns that fit (none reduced away), with true, uncapped throughputs, at
the plan's own shortfall and floor deficit. A dual is the change of the least relaxed objective per unit of a limit; whole
instances make the true change lumpy, so these are guides, not bills.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import Assessment, assess
from coral_core.allocation.check import check_problem
from coral_core.allocation.choosing import solver_for
from coral_core.allocation.columns import columns_of, useful_instances
from coral_core.allocation.coverage import DEMAND_TOLERANCE_FRAC, Coverage, Floats, Ints, coverage_of
from coral_core.allocation.formulation import Formulation, formulate
from coral_core.allocation.reduce import excluded, fits
from coral_core.allocation.rows import Family
from coral_core.allocation.wide import Effort, Relaxation, WideProgram, relax
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.errors import InputError, SolverError
from coral_core.solver.program import Solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A plan's counts (templates, regions) beside the relaxation that prices its limits."""

    coverage: Coverage
    counts: Ints
    assessment: Assessment
    formulation: Formulation
    relaxation: Relaxation

    def instances(self, row: int) -> int:
        """Instances of the plan that enter a demand row."""
        return sum(int(self.counts[group.members].sum()) for group in self.coverage.groups if row in group.rows)


def price_plan(problem: AllocationProblem, result: AllocationResult, *, solver: Solver | None = None) -> Prices:
    """Price the limits at a plan. Raises InputError where the plan is not one of this problem, SolverError without prices."""
    check_problem(problem)
    coverage = coverage_of(problem)
    counts = counts_of(problem, result)
    allowed = replace(problem, exclusions=())
    columns = columns_of(allowed, coverage, fits(allowed))  # what is excluded is priced too, though it stays at 0
    # capacity rows alone limit new instances, so that their price is not split with a column's own bound
    useful = np.maximum(useful_instances(problem, coverage)[columns.template], counts[columns.template, columns.region])
    upper = np.where(columns.old, columns.upper, useful.astype(np.float64))
    if problem.exclusions:
        upper[excluded(problem)[columns.template, columns.region]] = 0.0
    columns = replace(columns, upper=upper)
    formulation = formulate(problem, coverage, columns, capped=False)
    assessment = assess(problem, coverage, counts)
    program = _at_plan(formulation, assessment, formulation.point(counts, assessment))
    seed = np.flatnonzero(counts[columns.template, columns.region] > 0)
    effort = Effort(gap_frac=0.0, deadline_s=time.perf_counter() + problem.options.time_limit_s)
    relaxation = relax(program, solver or solver_for(problem.options.solver), effort, seed)
    if relaxation is None:
        raise SolverError(
            "the linear relaxation gave no prices within the time limit",
            where="explain",
            fix="raise options.time_limit_s",
        )
    return Prices(
        coverage=coverage,
        counts=counts,
        assessment=assessment,
        formulation=formulation,
        relaxation=relaxation,
    )


def counts_of(problem: AllocationProblem, result: AllocationResult) -> Ints:
    """(templates, regions): instances of the plan. Raises InputError for a name the problem does not know."""
    template = {name: t for t, name in enumerate(problem.templates.ids)}
    region = {name: r for r, name in enumerate(problem.regions)}
    counts = np.zeros((len(template), len(region)), dtype=np.int64)
    for index, item in enumerate(result.instances):
        if item.template not in template or item.region not in region:
            raise InputError(
                f"the plan runs {item.template!r} in {item.region!r}, which the problem does not know",
                where=f"instances[{index}]",
            )
        counts[template[item.template], region[item.region]] += item.count
    return counts


def _at_plan(formulation: Formulation, plan: Assessment, point: Floats) -> WideProgram:
    """The cost program with shortfall and floor deficit no greater than the plan's, row by row.

    Where a spare is asked for, sizes up to the plan's largest instance count as used: half an instance is no smaller to lose.
    """
    upper = formulation.program.upper.copy()
    upper[formulation.shortfall] = np.array(formulation.shortfalls(plan)) + DEMAND_TOLERANCE_FRAC
    upper[formulation.deficit] = [plan.deficit[i] for i in formulation.floors]
    sizes = formulation.guarantees.level_variables
    upper[sizes] = point[sizes]
    used = {(Family.LINK, int(y), 1) for y in sizes[point[sizes] == 0]}
    row_upper = np.where([key in used for key in formulation.row_key], np.inf, formulation.program.row_upper)
    return replace(formulation.program, objective=formulation.cost_usd_per_h, upper=upper, row_upper=row_upper)
