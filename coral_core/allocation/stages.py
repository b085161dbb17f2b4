"""The lexicographic solve of one formulation: floors first, then shortfall, then cost + churn; always an answer.

The common case, everything can be met, takes one program; otherwise one for each stage. The best plan found so far
starts each, so a time-out keeps it. Every bound stays valid: a stage that stopped early leaves the next more room, never
less.

Plans are judged by their whole numbers (`assess`). A solver that uses its tolerance to miss a demand is caught there and
asked again with the demand rows raised; the bound of its first answer remains the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import Assessment, assess
from coral_core.allocation.coverage import Coverage, Floats, Ints, weight_unit
from coral_core.allocation.formulation import Formulation
from coral_core.allocation.rows import COVERING
from coral_core.allocation.wide import DIRECT_COLUMNS, Effort, WideProgram, relax, solve_wide
from coral_core.domain.allocation import AllocationProblem
from coral_core.solver.program import Solver

SHORTFALL_TOLERANCE = 1e-7
"""Weighted missing fractions (in `weight_unit`) that differ by less are the same."""
_MARGINS_FRAC = (0.0, 1e-8, 1e-7, 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Instances per (template, region), and how they stand in the three ordered objectives."""

    counts: Ints
    deficit: int
    shortfall: float
    cost_usd_per_h: float

    @property
    def full(self) -> bool:
        """Every floor and every demand of weight above 0 is met."""
        return self.deficit == 0 and self.shortfall == 0

    def beats(self, other: Plan) -> bool:
        """Lexicographically better or equal, shortfalls compared to within the tolerance."""
        if self.deficit != other.deficit:
            return self.deficit < other.deficit
        if abs(self.shortfall - other.shortfall) > SHORTFALL_TOLERANCE:
            return self.shortfall < other.shortfall
        return self.cost_usd_per_h <= other.cost_usd_per_h


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A plan with proven bounds; `cost_bound_usd_per_h` holds for every plan of the least deficit and shortfall."""

    plan: Plan
    cost_bound_usd_per_h: float
    deficit_bound: float = 0.0
    shortfall_bound: float = 0.0

    def needs_proven(self, gap_frac: float) -> bool:
        """Whether the deficit is proven least and the shortfall is within the gap of the least possible."""
        room = gap_frac * self.plan.shortfall + SHORTFALL_TOLERANCE
        return self.plan.deficit - self.deficit_bound < 1 - 1e-6 and self.plan.shortfall - self.shortfall_bound <= room


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSolve:
    """One lexicographic solve over the demand `rows` that the formulation holds."""

    problem: AllocationProblem
    coverage: Coverage
    formulation: Formulation
    rows: tuple[int, ...]
    solver: Solver

    def run(self, effort: Effort, start: Plan | None = None) -> Staged:
        """Solve within the effort, from `start` if there is a plan already."""
        nothing = start or self.judge(
            np.zeros((len(self.problem.templates), len(self.problem.regions)), dtype=np.int64)
        )
        seed, servable = np.zeros(0, dtype=np.int64), True
        if len(self.formulation.columns) > DIRECT_COLUMNS:
            seed, servable = self._relaxed_service(effort.within(0.2))
        if not servable:
            return self._short(effort, nothing, seed)
        program = self.formulation.full()
        plan, cost_bound_usd_per_h = self._improve(program, effort.within(0.5), nothing, seed)
        if not plan.full:
            return self._short(effort, plan, seed)
        if plan.cost_usd_per_h - cost_bound_usd_per_h > effort.gap_frac * plan.cost_usd_per_h:
            # the half kept back for the case that not everything can be met
            plan, again = self._improve(program, effort, plan, seed)
            cost_bound_usd_per_h = max(cost_bound_usd_per_h, again)
        return Staged(plan=plan, cost_bound_usd_per_h=cost_bound_usd_per_h)

    def serve_all(self, effort: Effort, start: Plan) -> tuple[Plan, float]:
        """The better of `start` and the cheapest plan found that meets everything, and the bound for such plans."""
        return self._improve(self.formulation.full(), effort, start, np.zeros(0, dtype=np.int64))

    def serve_most(self, effort: Effort, start: Plan) -> Staged:
        """As `run` where it is known that not everything can be met."""
        return self._short(effort, start, np.zeros(0, dtype=np.int64))

    def _short(self, effort: Effort, plan: Plan, seed: Ints) -> Staged:
        """Not everything can be met, or it was not found in time."""
        deficit_bound = 0.0
        if any(self.problem.demand[i].min_instances for i in self.rows):
            plan, deficit_bound = self._improve(self.formulation.least_deficit(), effort.within(0.2), plan, seed)
        program = self.formulation.least_shortfall(plan.deficit)
        plan, shortfall_bound = self._improve(program, effort.within(0.6), plan, seed)
        # well above the feasibility tolerance: HiGHS was seen to claim a wrong optimum where a row's room is close to it
        program = self.formulation.least_cost(plan.deficit, plan.shortfall + SHORTFALL_TOLERANCE / 2)
        plan, cost_bound_usd_per_h = self._improve(program, effort, plan, seed)
        return Staged(
            plan=plan,
            cost_bound_usd_per_h=cost_bound_usd_per_h,
            deficit_bound=deficit_bound,
            shortfall_bound=shortfall_bound,
        )

    def judge(self, counts: Ints) -> Plan:
        """How `counts` stand in this solve's rows."""
        return plan_of(self.problem, self.coverage, counts, self.rows)

    def _improve(self, program: WideProgram, effort: Effort, best: Plan, seed: Ints) -> tuple[Plan, float]:
        """The better of `best` and what the solver finds for `program`, and the proven bound of its objective."""
        point = self._point(best)
        start: Floats | None = None
        if program.accepts(point):
            start = point
            seed = np.union1d(seed, np.flatnonzero(point[: program.n_wide]))
        bound = 0.0
        for margin in _MARGINS_FRAC:
            found = solve_wide(self._raised(program, margin), self.solver, effort, seed=seed, start=start)
            if margin == 0 and not found.infeasible:
                bound = max(found.bound, 0.0)
            if found.x is None:
                break
            plan = self.judge(self.formulation.counts(found.x, best.counts.shape))
            best = plan if plan.beats(best) else best
            if program.accepts(self._point(plan)):
                break
            start = None  # it satisfied the rows only within the solver's tolerance
        return best, bound

    def _point(self, plan: Plan) -> Floats:
        return self.formulation.point(plan.counts, assess(self.problem, self.coverage, plan.counts))

    def _raised(self, program: WideProgram, margin_frac: float) -> WideProgram:
        """`program` with every demand `margin_frac` higher than it is."""
        raised = np.array([margin_frac if key[0] in COVERING else 0.0 for key in self.formulation.row_key])
        return replace(program, row_lower=program.row_lower + raised * self.formulation.row_scale)

    def _relaxed_service(self, effort: Effort) -> tuple[Ints, bool]:
        """Columns with which the linear relaxation serves as much as it can, and whether that is everything."""
        program = self.formulation.least_shortfall(0)
        objective = program.objective.copy()
        objective[self.formulation.deficit] = 1.0
        elastic = replace(self.formulation.program, objective=objective)
        relaxation = relax(elastic, self.solver, effort, np.zeros(0, dtype=np.int64))
        if relaxation is None:
            return np.zeros(0, dtype=np.int64), True
        return relaxation.active, relaxation.bound <= SHORTFALL_TOLERANCE


def plan_of(problem: AllocationProblem, coverage: Coverage, counts: Ints, rows: tuple[int, ...]) -> Plan:
    """How `counts` stand in the demand `rows`."""
    assessment = assess(problem, coverage, counts)
    return Plan(
        counts=counts,
        deficit=sum(assessment.deficit[i] for i in rows),
        shortfall=weighted_shortfall(problem, assessment, rows),
        cost_usd_per_h=assessment.objective_usd_per_h,
    )


def weighted_shortfall(problem: AllocationProblem, assessment: Assessment, rows: tuple[int, ...]) -> float:
    """Sum over `rows` of weight x missing fraction, in `weight_unit`."""
    unit = weight_unit(problem)
    return math.fsum(problem.demand[i].weight / unit * assessment.missing_frac[i] for i in rows)
