"""What one more node of a configuration would save, by solving again with it; no estimate from prices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.explain import AllocationExplanation, explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.rows import Family
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.solver.program import Solver


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMoreNode:
    """What changes with one more node of `config` in `region`.

    `saved_usd_per_h` is the difference of the two plans' cost + churn, meaningful where both serve alike;
    `saved_usd_per_h_proven`: the true saving is at least this, by the bounds of both (0 where nothing is proven).
    `shortfall_less_frac`: by how much the weighted shortfall falls; the cost may rise then.
    """

    region: str
    config: str
    saved_usd_per_h: float
    saved_usd_per_h_proven: float
    shortfall_less_frac: float


def one_more_node(
    problem: AllocationProblem,
    result: AllocationResult,
    *,
    most: int = 10,
    explanation: AllocationExplanation | None = None,
    solver: Solver | None = None,
) -> tuple[OneMoreNode, ...]:
    """Solve again with one more node of each scarce configuration, the `most` valuable by shadow price; best first.

    Tried are limits that the plan reaches or that have a price, then what is sold but not to be had at all: more of what is
    not used up seldom saves anything. Savings count preferences as the plan does. Raises what `explain_allocation` and `solve_allocation` raise.
    """
    found = explain_allocation(problem, result, solver=solver) if explanation is None else explanation
    scarce = [limit.name for limit in found.binding if limit.family == Family.CAPACITY.value]
    gone = np.argwhere((problem.available == 0) & ~np.isnan(problem.price_usd_per_h)).tolist()
    scarce += [(problem.regions[r], problem.configs[c]) for r, c in gone]
    answers = []
    for region, config in list(dict.fromkeys(scarce))[:most]:
        available = problem.available.copy()
        available[problem.regions.index(region), problem.configs.index(config)] += 1
        richer = solve_allocation(replace(problem, available=available), solver=solver)
        saved = result.objective_usd_per_h - richer.objective_usd_per_h
        proven = result.bound_usd_per_h - richer.objective_usd_per_h
        answers.append(
            OneMoreNode(
                region=region,
                config=config,
                saved_usd_per_h=saved,
                saved_usd_per_h_proven=max(proven, 0.0),
                shortfall_less_frac=_shortfall(result) - _shortfall(richer),
            )
        )
    return tuple(sorted(answers, key=lambda answer: (-answer.shortfall_less_frac, -answer.saved_usd_per_h)))


def _shortfall(result: AllocationResult) -> float:
    return result.statistics["shortfall_weighted"]
