"""Protocols that the core is driven through; implementations sit in the packages named."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem, PlacementResult


class PlacementMethod(Protocol):
    """A way to find throughput-optimal placements (`coral_core.placement`).

    All methods of the published split (`lattice`, `ilp`) have the same optimum; `lattice-free` also chooses the stages'
    latency budgets, so its optimum is never below theirs, and needs capacities over budgets.
    """

    name: str

    def solve(self, problem: PlacementProblem) -> PlacementResult:
        """The best placement of one combination."""
        ...

    def place(self, table: CapacityTable, counts: NDArray[np.int16]) -> PlacedCombinations:
        """The best placements of many combinations: `counts` is (n, C) in the order of `table.configs`.

        Rows that are infeasible are left out and counted in the statistics.
        """
        ...
