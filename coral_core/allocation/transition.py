"""From the fleet that runs to the next plan, where it takes an interruption to get there (DESIGN 3.6).

Data: what runs (counts o), the problem, K = start-up time / interval.
A plan n is free to replace what runs, but a node serves nothing while its new instance starts. Over the interval, the
weighted missing fraction is on average K S(u) + (1 - K) S(n), where S(x) is what the counts x leave unmet and u is what
serves meanwhile: min(o, n), and of the rest of o what the supply holds beside n (make before break).
Candidates: the plan asked for; what runs with a plan for what it leaves unmet on top; what runs, as it is.
Objective: what floors lack, then least missing over the interval, then least cost + churn. Where u leaves nothing more unmet than n (ample supply,
scaling up or down) that is the plan asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import (
    Assessment,
    assess,
    pools_used,
    result_of,
    running_counts,
    within_budget,
    within_pools,
)
from coral_core.allocation.coverage import DEMAND_TOLERANCE_FRAC, Coverage, Ints, coverage_of
from coral_core.allocation.prices import counts_of
from coral_core.allocation.reduce import excluded
from coral_core.allocation.stages import weighted_shortfall
from coral_core.allocation.verify import verify_allocation
from coral_core.domain.allocation import AllocationProblem, AllocationResult

Solve = Callable[[AllocationProblem], AllocationResult]


def holding_what_runs(problem: AllocationProblem) -> AllocationProblem:
    """The problem with at least the nodes that run on demand available: a market that sells fewer takes none of them back."""
    held = running_counts(problem).T @ problem.templates.nodes
    held[:, [config in problem.spot_configs for config in problem.configs]] = 0
    held[np.isnan(problem.price_usd_per_h)] = 0
    return replace(problem, available=np.maximum(problem.available, held))


def solve_from_running(problem: AllocationProblem, solve: Solve) -> AllocationResult:
    """The plan of `solve`, or one that keeps what runs where the change would cost more service than it brings.

    The answer is verified like any other, and has the method and the bound of the plan of `solve`. Raises what `solve` raises.
    """
    free = solve(problem)
    before = running_counts(problem)
    if not before.any() or not {item.template for item in free.instances} <= set(problem.templates.ids):
        return free
    change = _Change(problem=problem, coverage=coverage_of(problem), before=before)
    wanted = counts_of(problem, free)
    best, plan = change.score(wanted), free
    if best.missing <= best.settled_missing + DEMAND_TOLERANCE_FRAC:
        return free
    for counts in change.keeping(solve):
        if counts is not None and change.possible(counts):
            score = change.score(counts)
            if score.beats(best):
                best, plan = score, change.result(counts, free)
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    """Instances below the floors, mean weighted missing fraction over the interval, that once all have started, cost + churn."""

    deficit: int
    missing: float
    settled_missing: float
    usd_per_h: float

    def beats(self, other: _Score) -> bool:
        if self.deficit != other.deficit:
            return self.deficit < other.deficit
        if abs(self.missing - other.missing) > DEMAND_TOLERANCE_FRAC:
            return self.missing < other.missing
        return self.usd_per_h < other.usd_per_h


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    problem: AllocationProblem
    coverage: Coverage
    before: Ints

    def score(self, after: Ints) -> _Score:
        settled = self._assessed(after)
        meanwhile, share = self._unmet(self._assessed(self._meanwhile(after))), min(self.problem.churn_k, 1.0)
        return _Score(
            deficit=sum(settled.deficit),
            missing=share * meanwhile + (1 - share) * self._unmet(settled),
            settled_missing=self._unmet(settled),
            usd_per_h=settled.objective_usd_per_h,
        )

    def keeping(self, solve: Solve) -> tuple[Ints | None, Ints]:
        """What runs with more on top, and what runs alone."""
        return self._with_more(solve), self.before

    def possible(self, counts: Ints) -> bool:
        problem = self.problem
        nodes = counts.T @ problem.templates.nodes
        return (
            bool((nodes <= problem.available).all())
            and not (problem.exclusions and counts[excluded(problem)].any())
            and within_budget(problem, counts)
            and within_pools(problem, counts)
            and self._within_caps(counts)
        )

    def _within_caps(self, counts: Ints) -> bool:
        number = [0] * len(self.problem.demand)
        for g, group in enumerate(self.coverage.groups):
            for row in group.rows:
                number[row] += int(counts[self.coverage.group_of == g].sum())
        caps = (row.max_instances for row in self.problem.demand)
        return all(cap is None or n <= cap for n, cap in zip(number, caps, strict=True))

    def result(self, counts: Ints, free: AllocationResult) -> AllocationResult:
        assessment = self._assessed(counts)
        result = result_of(
            self.problem,
            counts,
            assessment,
            bound_usd_per_h=free.bound_usd_per_h,
            shortfall_proven=False,
            method=free.method,
            statistics=free.statistics,
        )
        verify_allocation(self.problem, result)
        return result

    def _assessed(self, counts: Ints) -> Assessment:
        return assess(self.problem, self.coverage, counts)

    def _unmet(self, assessment: Assessment) -> float:
        return weighted_shortfall(self.problem, assessment, tuple(range(len(self.problem.demand))))

    def _meanwhile(self, after: Ints) -> Ints:
        """What serves until the new instances have started."""
        nodes = self.problem.templates.nodes
        spare = self.problem.available - after.T @ nodes
        serving = np.minimum(self.before, after)
        for t, r in zip(*np.nonzero(self.before > after), strict=True):
            need = nodes[t] > 0
            dropped = self.before[t, r] - after[t, r]
            fits = int(max((spare[r, need] // nodes[t, need]).min(initial=dropped), 0))
            serving[t, r] += fits
            spare[r] -= fits * nodes[t]
        return serving

    def _with_more(self, solve: Solve) -> Ints | None:
        """What runs and a plan for the demand it leaves; None where caps or guarantees make that no problem of its own."""
        problem, now = self.problem, self._assessed(self.before)
        guarded = any(
            row.max_instances is not None or row.spare_instances or row.region_fracs for row in problem.demand
        )
        left = problem.available - self.before.T @ problem.templates.nodes
        if guarded or (left < 0).any() or max(now.unserved_frac, default=0.0) <= DEMAND_TOLERANCE_FRAC:
            return None
        budget, used = problem.options.budget_usd_per_h, pools_used(problem, self.before).tolist()
        if budget is not None:
            budget = max(budget - now.cost_usd_per_h, 0.0)
        rest = replace(
            problem,
            available=left,
            running=(),
            demand=tuple(
                replace(
                    row,
                    tokens_per_s=None if row.tokens_per_s is None else row.tokens_per_s * frac,
                    requests_per_s=None if row.requests_per_s is None else row.requests_per_s * frac,
                    min_instances=deficit,
                )
                for row, frac, deficit in zip(problem.demand, now.unserved_frac, now.deficit, strict=True)
            ),
            pools=tuple(
                replace(pool, limit=max(pool.limit - taken, 0.0))
                for pool, taken in zip(problem.pools, used, strict=True)
            ),
            options=replace(problem.options, budget_usd_per_h=budget),
        )
        return self.before + counts_of(problem, solve(rest))
