"""What the free latency split is worth beside the published equal shares: throughput, and cost of a plan (DESIGN 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.columns import with_templates
from coral_core.allocation.ilp import solve_allocation
from coral_core.config.resolve import ResolvedScenario, allocation_problem
from coral_core.config.scenario import Ample, LibraryMethod
from coral_core.domain.allocation import AllocationProblem, DemandRow, TemplateColumns
from coral_core.errors import SolverError

SAME_FRAC = 1e-6
"""What a free split may be below the published one by: rounding of the bisection's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGain:
    """One model and phase, all of it predicted; gains are relative to the equal split, over combinations that both serve.

    `free_only` combinations are served by the free split alone. (What only the equal split places has an idle node, which
    the free one leaves out.) The two costs are those of the cheapest plan for this
    row's demand alone at ample supply, without start-up; None where no template of the method serves it.
    """

    model: str
    phase: str
    combinations: int
    free_only: int
    median_gain_frac: float
    p90_gain_frac: float
    most_gain_frac: float
    equal_usd_per_h: float | None
    free_usd_per_h: float | None


def with_method(resolved: ResolvedScenario, method: LibraryMethod) -> ResolvedScenario:
    """The scenario on a library of its own with every combination in it, so that both methods can be held side by side."""
    scenario = resolved.scenario
    name = f"{scenario.library_name}-split-{method}"
    library = scenario.library.model_copy(update={"name": name, "method": method, "keep_all": True})
    return replace(resolved, scenario=scenario.model_copy(update={"library": library}))


def split_gains(resolved: ResolvedScenario, equal: TemplateColumns, free: TemplateColumns) -> tuple[SplitGain, ...]:
    """One entry for each demand row of the scenario.

    Raises SolverError where the free split gives a combination less than the equal one, which its set of choices rules out.
    """
    shape = (len(resolved.scenario.regions), len(resolved.offers))
    ample = np.full(shape, Ample().nodes, dtype=np.int64)
    problem, other = (_simple(allocation_problem(resolved, columns, available=ample)) for columns in (equal, free))
    return tuple(_gain(problem, other, row) for row in range(len(problem.demand)))


def _simple(problem: AllocationProblem) -> AllocationProblem:
    """No start-up, no shared region: each row of demand is a covering problem of its own."""
    return replace(problem, churn_k=0.0, running=(), options=replace(problem.options, pd_same_region=False))


def _gain(equal: AllocationProblem, free: AllocationProblem, row: int) -> SplitGain:
    demand = equal.demand[row]
    both = [_alone(problem, row) for problem in (equal, free)]
    by_nodes = [_by_nodes(problem.templates) for problem in both]
    shared = sorted(by_nodes[0].keys() & by_nodes[1].keys())
    gains = np.array([by_nodes[1][key] / by_nodes[0][key] - 1 for key in shared])
    if (gains < -SAME_FRAC).any():
        raise SolverError(
            f"{demand.model} {demand.phase.value}: the free split gives some combination less than the equal one",
            where="method lattice-free",
            fix="report this as a bug of Coral",
        )
    quantiles: Sequence[float] = np.quantile(gains, (0.5, 0.9, 1.0)) if len(gains) else (0.0, 0.0, 0.0)
    costs = [_cost_usd_per_h(problem) for problem in both]
    return SplitGain(
        model=demand.model,
        phase=demand.phase.value,
        combinations=len(shared),
        free_only=len(by_nodes[1]) - len(shared),
        median_gain_frac=float(quantiles[0]),
        p90_gain_frac=float(quantiles[1]),
        most_gain_frac=float(quantiles[2]),
        equal_usd_per_h=costs[0],
        free_usd_per_h=costs[1],
    )


def _alone(problem: AllocationProblem, row: int) -> AllocationProblem:
    demand = problem.demand[row]
    templates = problem.templates
    mine = [
        i
        for i, (model, phase) in enumerate(zip(templates.models, templates.phases, strict=True))
        if model == demand.model and phase is demand.phase
    ]
    row_only = DemandRow(
        model=demand.model,
        phase=demand.phase,
        tokens_per_s=demand.tokens_per_s,
        requests_per_s=demand.requests_per_s,
    )
    return replace(with_templates(problem, np.array(mine, dtype=np.int64)), demand=(row_only,))


def _by_nodes(templates: TemplateColumns) -> dict[tuple[bytes, str], float]:
    """Throughput by combination and variant."""
    variants = templates.variants or ("",) * len(templates)
    keys = (row.tobytes() for row in templates.nodes)
    return {
        (key, variant): float(value)
        for key, variant, value in zip(keys, variants, templates.throughput.tolist(), strict=True)
    }


def _cost_usd_per_h(problem: AllocationProblem) -> float | None:
    result = solve_allocation(problem)
    return result.cost_usd_per_h if result.full else None
