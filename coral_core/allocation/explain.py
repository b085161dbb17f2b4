"""Why a plan is what it is: binding limits with their shadow prices, and what each model's next token/s costs."""

from __future__ import annotations

from dataclasses import dataclass

from coral_core.allocation.limits import Limit, limits_of, priced_rows
from coral_core.allocation.prices import Prices, price_plan
from coral_core.allocation.rows import Family
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.domain.workload import Phase
from coral_core.solver.program import Solver
from coral_core.units import SECONDS_PER_H


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalCost:
    """What the next unit of a demand row costs: USD/h per token/s, or per request/s where the row is in requests/s.

    `missing_frac` > 0: the row is not met, so its next unit cannot be had at any price; the figure is the last one's.
    """

    model: str
    phase: Phase
    unit: str
    usd_per_h_per_unit: float
    missing_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationExplanation:
    """Limits by family (see `Limit`), marginal costs by demand row, and the relaxation's objective."""

    limits: tuple[Limit, ...]
    marginal: tuple[MarginalCost, ...]
    relaxed_objective_usd_per_h: float
    source: str = "linear relaxation with true throughputs, at the plan's shortfall"

    @property
    def binding(self) -> tuple[Limit, ...]:
        """The limits that hold the plan back, the most valuable first."""
        return tuple(sorted((x for x in self.limits if x.binding), key=lambda x: -x.shadow_usd_per_h))


def explain_allocation(
    problem: AllocationProblem, result: AllocationResult, *, solver: Solver | None = None
) -> AllocationExplanation:
    """Explain `result`. Raises InputError for a bad problem, SolverError where the relaxation gives no prices."""
    prices = price_plan(problem, result, solver=solver)
    return AllocationExplanation(
        limits=limits_of(problem, result, prices),
        marginal=_marginal(problem, result, prices),
        relaxed_objective_usd_per_h=prices.relaxation.objective,
    )


def volume_price(usd_per_h_per_unit: float, *, in_requests: bool) -> tuple[float, str]:
    """USD/h per token/s (or per request/s) as a price by volume, with its unit: what a million tokens cost."""
    usd = usd_per_h_per_unit / SECONDS_PER_H
    return (usd * 1e3, "USD per 1,000 requests") if in_requests else (usd * 1e6, "USD per million tokens")


def _marginal(problem: AllocationProblem, result: AllocationResult, prices: Prices) -> tuple[MarginalCost, ...]:
    usd_per_whole = _usd_per_whole_demand(problem, prices)
    marginal = []
    for i, row in enumerate(problem.demand):
        in_tokens = row.tokens_per_s is not None
        amount = row.tokens_per_s if in_tokens else row.requests_per_s
        marginal.append(
            MarginalCost(
                model=row.model,
                phase=row.phase,
                unit="token/s" if in_tokens else "request/s",
                usd_per_h_per_unit=usd_per_whole[i] / amount if amount else 0.0,
                missing_frac=result.shortfall[i].frac,
            )
        )
    return tuple(marginal)


def _usd_per_whole_demand(problem: AllocationProblem, prices: Prices) -> list[float]:
    """Per demand row: the rate of the relaxed objective per fraction of the row; regions weigh as the relaxation serves them.

    Where a row must be covered without spot nodes, in certain regions or with a spare, the next unit must be so too.
    """
    usd = [0.0] * len(prices.assessment.deficit)
    pair_of = {i: k for k, pair in enumerate(u for u in prices.formulation.units if len(u) > 1) for i in pair}
    served = prices.formulation.served(prices.relaxation.x)
    for (family, i, b), value in priced_rows(prices):
        if family is Family.DEMAND or (family is Family.REDUNDANCY and i not in pair_of):
            usd[i] += value
        elif family is Family.ON_DEMAND:
            usd[i] += value * problem.demand[i].on_demand_frac
        elif family is Family.REGION_DEMAND and i not in pair_of:
            usd[i] += value * dict(prices.coverage.region_fracs[i])[b]
        elif family is Family.LEFT:
            usd[i] += value * float(prices.relaxation.x[b])
        elif family is Family.REGION:
            usd[i] += value * float(served[pair_of[i], b])
    return usd
