"""Baseline `cauchy`: prefill/decode pairs ("GPU combos") ranked by tokens per USD, then chosen by an integer program.

After Cauchy (SoCC 2025, doi 10.1145/3772052.3772264) as the publication we compare with adapts it: a combo is one prefill
replica feeding several decode replicas, each replica of one configuration; combos are ranked by tokens per USD, the best
are kept, and a set of them is deployed; the allocation's objective holds the cost efficiency of each model by itself.

Only Cauchy's abstract and that description were at hand, not its full text or code. Therefore **ours** are:
- one combo per pair of configurations, the most efficient in tokens per USD with tokens capped at the model's demand;
  the 16 best per model and region (`CANDIDATES`) are kept;
- a combo lies in one region, its decode replicas are all alike, and it is deployed whole;
- the program below: how cost efficiency enters it, and that unmet demand comes first, as in every policy here.

Data: combos k of model m_k in region r_k with price p_k, counted price p'_k (preferences) and share g_k of their model's
  demand served, of it h_ki of row i without spot nodes; U_kc nodes; A_rc nodes we may hold; B budget; o_i on-demand share of
  a row; f_mr share that a region must serve; D_m tokens/s asked of model m in both phases; w_m weight; K churn; nu'_tr runs.
Variables: x_k integer >= 0; s_m in [0, 1] missing share; e_i >= 0 instances missing from a floor; b_tr >= 0 new instances;
  m_mr in [0, f_mr] share missing in a region.
Constraints: sum U_kc x_k <= A_rc for each r, c; sum g_k x_k + s_m >= 1 for each m; floors (with e) and caps on instances
  of each demand row; sum p_k x_k <= B; sum h_ki x_k + o_i s_m >= o_i; sum_{k in r} g_k x_k + m_mr >= f_mr;
  s_m >= sum_r m_mr; b_tr >= sum_k n_kt x_k - nu'_tr where churn costs.
Objective, lexicographic: sum e, then sum w_m s_m, then sum over models of (cost_m + churn_m) / D_m at counted prices: the
  USD per token of each model, all alike. A model that asks for many tokens so weighs less per USD than one that asks for few.

A combo is of one variant of the model; variants compete. Its replicas may be of different markets. **Not covered**: spare
instances, since a combo is deployed whole and has no replica to lose (`UnsupportedFamilyError`); aggregated templates.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from coral_core.allocation.assess import Assessment, assess, result_of, running_counts, within_budget
from coral_core.allocation.baselines.combos import Combos, candidate_combos, row_members
from coral_core.allocation.baselines.homo_joint import homogeneous
from coral_core.allocation.check import check_problem
from coral_core.allocation.choosing import solver_for
from coral_core.allocation.coverage import DEMAND_TOLERANCE_FRAC, Coverage, Floats, Ints, coverage_of
from coral_core.allocation.preferences import real_prices
from coral_core.allocation.verify import verify_allocation
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.errors import NoSolutionError
from coral_core.solver.builder import Indices, ProgramBuilder
from coral_core.solver.program import IntegerProgram, SolveOptions, Solver

CANDIDATES: Final = 16
"""GPU combos kept per model and region."""
_STAGE_TOLERANCE: Final = 1e-8
_MARGINS_FRAC: Final = (-DEMAND_TOLERANCE_FRAC / 2, 1e-7)


class UnsupportedFamilyError(NoSolutionError):
    """The policy cannot keep a family of constraints that the problem asks for, and does not ignore it."""

    kind = "unsupported_family"


def cauchy(
    problem: AllocationProblem, *, candidates: int = CANDIDATES, solver: Solver | None = None
) -> AllocationResult:
    """A verified plan without a bound on its cost: `bound_usd_per_h` is 0, status `gap`; its aim is another than cost.

    Demand of phase `aggregated` is not served (a shortfall): the method is disaggregated. Statistics: combos
    `considered` and kept (`columns`), seconds. Raises InputError for a problem without a clear meaning,
    UnsupportedFamilyError where a row asks for a spare instance, or configurations share a quota.
    """
    started = time.perf_counter()
    check_problem(problem)
    spare = next((row.model for row in problem.demand if row.spare_instances), None)
    if spare is not None:
        raise UnsupportedFamilyError(
            f"cauchy has no way to keep a spare instance, which {spare} asks for",
            where="policy cauchy",
            fix="compare with homo and homo_joint, or leave spare_instances out",
        )
    if problem.pools:
        raise UnsupportedFamilyError(
            f"cauchy has no way to share the quota {problem.pools[0].name} between configurations",
            where="policy cauchy",
            fix="compare with homo and homo_joint, or leave the pools out",
        )
    problem = homogeneous(problem)
    coverage = coverage_of(problem)
    combos = candidate_combos(problem, coverage, keep=candidates)
    chosen = solver or solver_for(problem.options.solver)
    deadline_s = started + problem.options.time_limit_s
    choice = _Choice(problem=problem, coverage=coverage, combos=combos, solver=chosen, deadline_s=deadline_s)
    counts = choice.solve()
    result = result_of(
        problem,
        counts,
        assess(problem, coverage, counts),
        bound_usd_per_h=0.0,
        shortfall_proven=False,
        method="cauchy",
        statistics={
            "considered": float(combos.considered),
            "columns": float(len(combos)),
            "solve_s": time.perf_counter() - started,
        },
    )
    verify_allocation(problem, result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """How many of each combo to deploy."""

    problem: AllocationProblem
    coverage: Coverage
    combos: Combos
    solver: Solver
    deadline_s: float

    def solve(self) -> Ints:
        """Instances per (template, region). A solver that misses a demand by its tolerance is asked for a bit more."""
        counts = self._nothing()
        for margin_frac in _MARGINS_FRAC:
            x, missing = self._lexicographic(margin_frac)
            counts = self._counts(x)
            served = self._missing(assess(self.problem, self.coverage, counts)) <= missing + DEMAND_TOLERANCE_FRAC
            if served.all() and within_budget(self.problem, counts):
                break
        return counts

    def _lexicographic(self, margin_frac: float) -> tuple[Ints, Floats]:
        """(combos deployed, missing share per model as the solver states it)."""
        program, columns = self._program(margin_frac, self._usd_per_token())
        point = np.zeros(program.n_columns)
        point[columns.missing] = 1.0
        point[columns.lacking] = program.upper[columns.lacking]
        point[columns.deficit] = [row.min_instances for row in self.problem.demand]
        weight = np.array([sum(self.problem.demand[i].weight for i in rows) for rows in self.combos.rows])
        stages = [
            (columns.deficit, np.ones(len(columns.deficit))),
            (columns.missing, weight / (weight.max(initial=0.0) or 1)),
        ]
        left = len(stages) + 2
        for at, coefficient in stages:
            point = self._improve(replace(program, objective=_spread(program, at, coefficient)), point, share=1 / left)
            # what this stage reached is the limit of the next: a stage that ended early leaves them more room
            program = _limited(program, at, coefficient, float(coefficient @ point[at]) + _STAGE_TOLERANCE)
            left -= 1
        point = self._improve(program, point, share=1 / left)
        # What the solver cannot tell apart in that objective may cost very differently where demands do.
        plain, _ = self._program(margin_frac, np.ones(len(weight)))
        limit = float(program.objective @ point) * (1 + self.problem.options.gap_frac)
        within = _limited(program, np.arange(program.n_columns, dtype=np.int32), program.objective, limit)
        point = self._improve(replace(within, objective=plain.objective), point, share=1.0)
        return np.rint(point[columns.deployed]).astype(np.int64), point[columns.missing]

    def _improve(self, program: IntegerProgram, point: Floats, *, share: float) -> Floats:
        if not program.objective.any():
            return point
        left_s = max(self.deadline_s - time.perf_counter(), 0.05)
        options = SolveOptions(time_limit_s=left_s * share, gap_frac=self.problem.options.gap_frac, warm_start=point)
        found = self.solver.solve(program, options).x
        return point if found is None else found

    def _program(self, margin_frac: float, per_token: Floats) -> tuple[IntegerProgram, _Columns]:
        """The program at an objective in which each model's cost counts times `per_token`."""
        problem, combos = self.problem, self.combos
        rows, models = problem.demand, len(combos.models)
        builder = ProgramBuilder(name="cauchy")
        need = np.array([max((rows[i].min_instances for i in combos.rows[m]), default=0) for m in combos.model])
        most = np.maximum(np.ceil(1.0 / combos.served_frac) if len(combos) else np.zeros(0), need)
        price = combos.counted_usd_per_h * per_token[combos.model]
        deployed = builder.add_columns("deployed", len(combos), objective=price, upper=most, integer=True)
        missing = builder.add_columns("missing", models, upper=1.0)
        deficit = builder.add_columns("deficit", len(rows), upper=[row.min_instances for row in rows])
        self._add_capacity(builder, deployed)
        demand = builder.add_rows(
            "demand", models, rows=combos.model, columns=deployed, values=combos.served_frac, lower=1.0 + margin_frac
        )
        builder.add_entries(demand, missing)
        self._add_bounds(builder, deployed, deficit)
        self._add_budget(builder, deployed, margin_frac)
        self._add_on_demand(builder, deployed, missing, margin_frac)
        self._add_regions(builder, deployed, missing, margin_frac)
        self._add_churn(builder, deployed, per_token)
        columns = _Columns(deployed=deployed, missing=missing, deficit=deficit, lacking=builder.columns_of("lacking"))
        return builder.build(), columns

    def _usd_per_token(self) -> Floats:
        """Factor of each model's cost: 1 / its tokens/s, scaled so that the largest is 1."""
        tokens = [math.fsum(self.problem.demand[i].tokens_per_s or 0.0 for i in rows) for rows in self.combos.rows]
        return min(tokens, default=1.0) / np.array(tokens)

    def _add_capacity(self, builder: ProgramBuilder, deployed: Indices) -> None:
        nodes = self.combos.replicas @ self.problem.templates.nodes
        for r, held in enumerate(self.problem.available):
            here = np.flatnonzero(self.combos.region == r)
            k, c = np.nonzero(nodes[here])
            builder.add_rows(
                "capacity", len(held), rows=c, columns=deployed[here[k]], values=nodes[here[k], c], upper=held
            )

    def _add_bounds(self, builder: ProgramBuilder, deployed: Indices, deficit: Indices) -> None:
        """Floors and caps on the instances that enter each demand row."""
        for i, row in enumerate(self.problem.demand):
            enters = np.zeros(len(self.problem.templates), dtype=np.int64)
            for group in self.coverage.groups:
                if i in group.rows:
                    enters[group.members] = 1
            instances = self.combos.replicas @ enters
            some = np.flatnonzero(instances)
            terms = {"rows": np.zeros(len(some), dtype=np.int32), "columns": deployed[some], "values": instances[some]}
            if row.min_instances:
                floor = builder.add_rows("floor", 1, **terms, lower=float(row.min_instances))
                builder.add_entries(floor, deficit[[i]])
            if row.max_instances is not None:
                builder.add_rows("cap", 1, **terms, upper=float(row.max_instances))

    def _add_budget(self, builder: ProgramBuilder, deployed: Indices, margin_frac: float) -> None:
        budget = self.problem.options.budget_usd_per_h
        if budget is None:
            return
        prices = self.problem.templates.nodes @ real_prices(self.problem).T
        each = np.array([self.combos.replicas[k] @ prices[:, r] for k, r in enumerate(self.combos.region)])
        scale = 1 / budget if budget > 0 else 1.0
        rows = np.zeros(len(deployed), dtype=np.int32)
        builder.add_rows(
            "budget", 1, rows=rows, columns=deployed, values=each * scale, upper=budget * scale * (1 - margin_frac)
        )

    def _add_on_demand(self, builder: ProgramBuilder, deployed: Indices, missing: Indices, margin_frac: float) -> None:
        for m, rows in enumerate(self.combos.rows):
            for i in rows:
                floor = self.problem.demand[i].on_demand_frac
                if floor > 0:
                    members, frac = row_members(self.coverage, self.problem, i)
                    steady = np.where(self.coverage.spot_of[members], 0.0, frac)
                    covers = self.combos.replicas[:, members] @ steady
                    some = np.flatnonzero(covers)
                    terms = {"rows": np.zeros(len(some), dtype=np.int32), "columns": deployed[some]}
                    least = floor * (1 + margin_frac)
                    row = builder.add_rows("on_demand", 1, **terms, values=np.minimum(covers[some], 1.0), lower=least)
                    builder.add_entries(row, missing[[m]], floor)

    def _add_regions(self, builder: ProgramBuilder, deployed: Indices, missing: Indices, margin_frac: float) -> None:
        for m, rows in enumerate(self.combos.rows):
            asked = self.coverage.region_fracs[rows[0]]
            if not asked:
                continue
            lacking = builder.add_columns("lacking", len(asked), upper=[frac for _, frac in asked])
            for at, (region, frac) in enumerate(asked):
                here = np.flatnonzero((self.combos.model == m) & (self.combos.region == region))
                row = builder.add_rows(
                    "region_demand",
                    1,
                    rows=np.zeros(len(here), dtype=np.int32),
                    columns=deployed[here],
                    values=self.combos.served_frac[here],
                    lower=frac * (1 + margin_frac),
                )
                builder.add_entries(row, lacking[[at]])
            total = builder.add_rows("region_missing", 1, rows=[0], columns=missing[[m]], values=[1.0], lower=0.0)
            builder.add_entries(np.repeat(total, len(lacking)), lacking, -1.0)

    def _add_churn(self, builder: ProgramBuilder, deployed: Indices, per_token: Floats) -> None:
        problem, combos = self.problem, self.combos
        if problem.churn_k == 0 or not len(combos):
            return
        running = running_counts(problem)
        model = {name: m for m, name in enumerate(combos.models)}
        for r in range(len(problem.regions)):
            here = np.flatnonzero(combos.region == r)
            used = np.flatnonzero(combos.replicas[here].any(axis=0))
            price = problem.templates.nodes[used] @ np.nan_to_num(problem.price_usd_per_h[r]) * problem.churn_k
            factor = per_token[[model[problem.templates.models[t]] for t in used]]
            new = builder.add_columns("new", len(used), objective=price * factor)
            k, t = np.nonzero(combos.replicas[here][:, used])
            rows = builder.add_rows(
                "new",
                len(used),
                rows=t,
                columns=deployed[here[k]],
                values=-combos.replicas[here][:, used][k, t].astype(np.float64),
                lower=-running[used, r].astype(np.float64),
            )
            builder.add_entries(rows, new)

    def _nothing(self) -> Ints:
        return np.zeros((len(self.problem.templates), len(self.problem.regions)), dtype=np.int64)

    def _counts(self, x: Ints) -> Ints:
        counts = self._nothing()
        for k in np.flatnonzero(x):
            counts[:, self.combos.region[k]] += self.combos.replicas[k] * x[k]
        return counts

    def _missing(self, assessment: Assessment) -> Floats:
        return np.array([max(assessment.missing_frac[i] for i in rows) for rows in self.combos.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Where the families of variables lie."""

    deployed: Indices
    missing: Indices
    deficit: Indices
    lacking: Indices


def _spread(program: IntegerProgram, at: Indices, coefficient: Floats) -> Floats:
    objective = np.zeros(program.n_columns)
    objective[at] = coefficient
    return objective


def _limited(program: IntegerProgram, at: Indices, coefficient: Floats, limit: float) -> IntegerProgram:
    """`program` with one more row: coefficient x <= limit."""
    return replace(
        program,
        indptr=np.append(program.indptr, program.indptr[-1] + len(at)).astype(np.int32),
        indices=np.concatenate((program.indices, at)).astype(np.int32),
        values=np.concatenate((program.values, coefficient)),
        row_lower=np.append(program.row_lower, -np.inf),
        row_upper=np.append(program.row_upper, limit),
    )
