"""Which layout each node of a placement runs inside, for equal and for free shares of the SLO."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations
from coral_core.errors import InputError


def stage_layouts(table: CapacityTable, placed: PlacedCombinations) -> tuple[NDArray[np.int16], tuple[str, ...]]:
    """Per stage and configuration the index of its layout, (n, S_max, C), and the layouts' names.

    -1 where a stage has no node of a configuration, and where a node is idle: it cannot hold the stage's layers within
    the stage's budget, so its capacity there is 0. Raises InputError for free shares without capacities over budgets.
    """
    codes = np.full(placed.stage_counts.shape, -1, dtype=np.int16)
    row, stage = np.nonzero(placed.stage_layers)
    stages, layers = placed.n_stages[row].astype(np.int64), placed.stage_layers[row, stage].astype(np.int64)
    codes[row, stage] = table.layout[stages - 1, :, layers - 1]
    names = table.layouts
    if placed.stage_budget_frac is not None:
        if table.budgets is None:
            raise InputError("the placements have stage budgets, the table has no capacities for them", where="table")
        share = placed.stage_budget_frac[row, stage]
        beta = np.rint(share * table.budgets.grid).astype(np.int64)
        # Equal shares of a number of stages that the grid lacks, and single stages, are the published table's.
        free = (stages > 1) & (beta >= 1) & np.isclose(share * table.budgets.grid, beta, rtol=1e-9, atol=0)
        of_budget = table.budgets.layout[beta[free] - 1, :, layers[free] - 1]
        codes[row[free], stage[free]] = np.where(of_budget >= 0, of_budget + len(names), -1)
        names += table.budgets.layouts
    codes[placed.stage_counts == 0] = -1
    return codes, names
