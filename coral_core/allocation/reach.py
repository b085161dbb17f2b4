"""Demand far beyond all supply, made measurable (a lossless reduction).

Where all nodes together could cover only a sliver of a row, what one instance adds is below any solver's tolerance. Such
a row's demand is lowered to what could be covered at all, and its weight by the same factor: no plan covers more than
that, so every plan's weighted shortfall changes by the same constant. Each node of configuration c adds at most
max(T / nodes of the template) over the templates that use c.

Condition: the row has its shortfall to itself (not paired by `pd_same_region`) and asks for no on-demand floor, no spare and
no service in a certain region, which are fractions of the demand too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from coral_core.allocation.coverage import Coverage
from coral_core.domain.allocation import AllocationProblem, DemandRow

OUT_OF_REACH_FRAC: Final = 1e-3
"""Rows of which more than this could be covered are left as they are."""
_LEAST_FRAC: Final = 1e-12  # lowered further, a demand would leave the range that `check` accepts


def within_reach(problem: AllocationProblem, coverage: Coverage) -> AllocationProblem:
    """The same problem with the demand of rows that are out of reach lowered; the problem itself where there is none."""
    alone = {unit[0] for unit in coverage.units() if len(unit) == 1}
    nodes_by_config = problem.available.sum(axis=0).astype(np.float64)
    uses = problem.templates.nodes > 0
    per_node = problem.templates.throughput / problem.templates.nodes.sum(axis=1)
    demand = list(problem.demand)
    for i in sorted(alone):
        if demand[i].on_demand_frac > 0 or coverage.guaranteed[i]:
            continue
        best = np.zeros(len(problem.configs))
        for group in coverage.groups:
            if i in group.rows:
                share = per_node[group.members] / group.amounts[group.rows.index(i)]
                best = np.maximum(best, np.where(uses[group.members], share[:, None], 0.0).max(axis=0))
        reach = float(nodes_by_config @ best)
        if 0 < reach < OUT_OF_REACH_FRAC:
            demand[i] = _scaled(demand[i], max(reach, _LEAST_FRAC))
    return problem if demand == list(problem.demand) else replace(problem, demand=tuple(demand))


def _scaled(row: DemandRow, factor: float) -> DemandRow:
    return replace(
        row,
        tokens_per_s=None if row.tokens_per_s is None else row.tokens_per_s * factor,
        requests_per_s=None if row.requests_per_s is None else row.requests_per_s * factor,
        weight=row.weight * factor,
    )
