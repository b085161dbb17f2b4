"""Why a plan is what it is: binding limits with their shadow prices, and what each model's next token/s costs."""

from __future__ import annotations

from dataclasses import dataclass

from coral_core.allocation.prices import Prices, price_plan
from coral_core.allocation.rows import Family
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.domain.workload import Phase
from coral_core.solver.program import Solver
from coral_core.units import SECONDS_PER_H

_PRICE_NOISE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit and how far the plan uses it. `binding`: the plan reaches it, or it has a price in the relaxation.

    `name` is what it limits (region and configuration, model and phase). `used` and `limit` are nodes for capacity,
    instances for floors and caps, USD/h for the budget, fractions of the demand for on-demand coverage. `shadow_usd_per_h` >= 0: what one more node (capacity), one instance
    more (cap) or less (floor), or one USD/h more of budget would save at the plan's own shortfall.
    """

    family: str
    name: tuple[str, str]
    used: float
    limit: float
    shadow_usd_per_h: float
    binding: bool


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
    """Limits by family (capacity, floor, cap), marginal costs by demand row, and the relaxation's objective."""

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
    used = prices.counts.T @ problem.templates.nodes
    limits = []
    for key, scale, dual in zip(
        prices.formulation.row_key, prices.formulation.row_scale, prices.relaxation.duals, strict=True
    ):
        family, a, b = key
        value = abs(float(dual) * float(scale))
        if family is Family.CAPACITY:
            name, limit = (problem.regions[a], problem.configs[b]), float(problem.available[a, b])
            limits.append(_limit(family, name, float(used[a, b]), limit, value))
        elif family is Family.ON_DEMAND:
            row = problem.demand[a]
            steady = _covered_without_spot(prices, problem, a)
            limits.append(_limit(family, (row.model, row.phase.value), steady, row.on_demand_frac, value))
        elif family is Family.BUDGET:
            budget = problem.options.budget_usd_per_h
            assert budget is not None
            limits.append(_limit(family, ("fleet", "usd_per_h"), result.cost_usd_per_h, budget, value))
        elif family in (Family.FLOOR, Family.CAP):
            row = problem.demand[a]
            bound = row.min_instances if family is Family.FLOOR else row.max_instances
            assert bound is not None
            name = (row.model, row.phase.value)
            limits.append(_limit(family, name, float(prices.instances(a)), float(bound), value))
    return AllocationExplanation(
        limits=tuple(limits),
        marginal=_marginal(problem, result, prices),
        relaxed_objective_usd_per_h=prices.relaxation.objective,
    )


def volume_price(usd_per_h_per_unit: float, *, in_requests: bool) -> tuple[float, str]:
    """USD/h per token/s (or per request/s) as a price by volume, with its unit: what a million tokens cost."""
    usd = usd_per_h_per_unit / SECONDS_PER_H
    return (usd * 1e3, "USD per 1,000 requests") if in_requests else (usd * 1e6, "USD per million tokens")


def _covered_without_spot(prices: Prices, problem: AllocationProblem, row: int) -> float:
    covered = 0.0
    steady = ~prices.coverage.spot_of
    for group in prices.coverage.groups:
        if row in group.rows and steady[group.members[0]]:
            amount = group.amounts[group.rows.index(row)]
            covered += (
                float(prices.counts[group.members].sum(axis=1) @ problem.templates.throughput[group.members]) / amount
            )
    return covered


def _limit(family: Family, name: tuple[str, str], used: float, limit: float, value: float) -> Limit:
    least = family in (Family.FLOOR, Family.ON_DEMAND)
    reached = used <= limit if least else used >= limit
    return Limit(
        family=family.value,
        name=name,
        used=used,
        limit=limit,
        shadow_usd_per_h=value,
        binding=reached or value > _PRICE_NOISE,
    )


def _marginal(problem: AllocationProblem, result: AllocationResult, prices: Prices) -> tuple[MarginalCost, ...]:
    usd_per_whole = _usd_per_whole_demand(prices)
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


def _usd_per_whole_demand(prices: Prices) -> list[float]:
    """Per demand row: the rate of the relaxed objective per fraction of the row; regions weigh as the plan serves them."""
    usd = [0.0] * len(prices.assessment.missing_frac)
    partner = {i: pair for pair in prices.coverage.pairs for i in pair}
    by_region: dict[int, dict[int, float]] = {}
    formulation = prices.formulation
    for (family, i, r), scale, dual in zip(
        formulation.row_key, formulation.row_scale, prices.relaxation.duals, strict=True
    ):
        if family is Family.DEMAND:
            usd[i] = float(dual * scale)
        elif family is Family.REGION:
            by_region.setdefault(i, {})[r] = float(dual * scale)
    for i, duals in by_region.items():
        served = prices.assessment.covered_frac[list(partner[i])].min(axis=0)
        total = float(served.sum())
        usd[i] = sum(duals[r] * float(served[r]) for r in duals) / total if total > 0 else max(duals.values())
    return usd
