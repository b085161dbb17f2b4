"""Stage capacities T^_j(c, b) over a grid of stage budgets: what the free latency split needs (DESIGN 3.4).

Data: as for `capacity`; budgets b = beta/grid of the phase's planned SLO, beta = 1..grid.
A stage that takes at most b leaves the SLO less b to the others, which bounds how long a request keeps its KV: the
published split's residence, with S = grid/beta. For `aggregated` both bounds scale with beta.
A pipeline of one stage has no hop and the whole SLO; it is in the published table (S = 1), not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import BudgetTable
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import InputError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import NO_PROFILES, check_inputs, estimate_question, node_capacity
from coral_core.perf.factors import Factors
from coral_core.perf.profile import Profile
from coral_core.perf.search import ANY_LAYOUT, Budgets, LayoutLimits, ReplicaSteps

GRID: Final = 60
"""Divisible by 1..6: the published split l/S is among the choices for every S up to 6."""

MAX_GRID: Final = 1000
_AT_ONCE: Final = 12
"""Budgets per evaluation: all batches and layers are held in memory for each of them."""

_DEFAULTS = CapacityAssumptions()


def budget_table(
    *,
    shape: ModelShape,
    variant: str,
    phase: Phase,
    slo: Slo,
    lengths: Lengths,
    configs: Sequence[NodeConfig],
    assumptions: CapacityAssumptions = _DEFAULTS,
    factors: Factors | None = None,
    grid: int = GRID,
    limits: LayoutLimits = ANY_LAYOUT,
    profiles: Mapping[str, Profile] = NO_PROFILES,
) -> BudgetTable:
    """T^ of every configuration as a stage among others, for each budget of the grid and j = 1..L.

    `throughput` is (grid, C, L), in the phase's unit; never decreasing in the budget (what runs within a budget runs
    within a larger one; the layout is then that of the smaller), never increasing in j. Where grid/beta is a whole
    number S > 1, the entry is that of `capacity_table` at S stages.

    Raises InputError for values that make no sense and DataGapError where a capacity is not known.
    """
    check_inputs(shape, lengths, slo, configs, 1)
    if not 1 <= grid <= MAX_GRID:
        raise InputError(f"{grid} budgets instead of 1 to {MAX_GRID}", where="grid")
    question = estimate_question(
        shape,
        variant,
        phase,
        lengths,
        configs,
        assumptions=assumptions,
        factors=factors,
        limits=limits,
        profiles=profiles,
    )
    planned = assumptions.planned_slo(phase, slo)
    names: dict[str, int] = {}
    throughput = np.zeros((grid, len(configs), shape.layers))
    layout = np.full(throughput.shape, -1, dtype=np.int16)
    tabulated: dict[tuple[str, int], ReplicaSteps] = {}
    for index, config in enumerate(configs):
        for first in range(0, grid, _AT_ONCE):
            part = np.arange(first, min(first + _AT_ONCE, grid))
            budgets = grid_budgets(phase, planned, part + 1, grid)
            node = node_capacity(question, config, budgets, tabulated)
            throughput[part, index] = node.rate * assumptions.max_utilization_frac[phase]
            codes = np.array([names.setdefault(str(item), len(names)) for item in node.layouts], dtype=np.int16)
            layout[part, index] = np.where(node.rate > 0, codes[node.layout], -1)
    source = _best_within(throughput)
    return BudgetTable(
        throughput=np.take_along_axis(throughput, source, axis=0),
        layout=np.take_along_axis(layout, source, axis=0),
        layouts=tuple(names),
    )


def grid_budgets(phase: Phase, slo: Slo, beta: NDArray[np.int64], grid: int) -> Budgets:
    """The budgets beta/grid of the SLO, with hops; as if the pipeline had S = grid/beta equal stages."""
    stages = grid / beta
    total = slo.ttft_s if phase is Phase.PREFILL else slo.tpot_s
    first = slo.ttft_s / stages if phase is Phase.AGGREGATED else np.full(len(beta), np.inf)
    return Budgets(
        stage_s=total / stages,
        rest_s=total * (stages - 1) / stages,
        first_token_s=first,
        hops=np.ones(len(beta), dtype=np.bool_),
    )


def _best_within(throughput: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each budget the index of the best budget up to it, the largest one where several are equal."""
    running = np.maximum.accumulate(throughput, axis=0)
    positions = np.where(throughput >= running, np.arange(len(throughput))[:, None, None], 0)
    source: NDArray[np.int64] = np.maximum.accumulate(positions, axis=0)
    return source
