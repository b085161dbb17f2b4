"""Stage capacities T^ as arrays: the input of every placement method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Phase, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTable:
    """T^_j(c, b) of a node as one of several stages, over a grid of stage budgets b (DESIGN 3.4).

    `throughput` is (grid, C, L): entry [beta-1, c, j-1] is the most that one node of configuration c gives with j
    layers when its stage, hop included, may take beta/grid of the phase's SLO; 0 where it cannot. Non-increasing in
    j, non-decreasing in beta. `layout` has the same shape and indexes `layouts`, -1 where capacity is 0.
    """

    throughput: NDArray[np.float64]
    layout: NDArray[np.int16]
    layouts: tuple[str, ...]

    @property
    def grid(self) -> int:
        """Into how many parts the SLO is cut."""
        return int(self.throughput.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityTable:
    """T^_j(c, l/S) for one (model, variant, phase, SLO): the published split's budgets.

    `throughput` is (S_max, C, L): entry [S-1, c, j-1] is the most tokens/s (requests/s for `aggregated`) of one node of
    `configs[c]` that holds j layers as a stage of an S-stage pipeline; 0 where it cannot. Non-increasing in j.
    `layout` has the same shape and holds an index into `layouts` (text such as `tp2 pp1 dp4`), -1 where capacity is 0.
    `sources` and `error_frac` are per configuration (error None = not known).
    `usable_memory_bytes` per configuration and `model_bytes` drive the enumeration's memory limits.
    `budgets` holds the capacities over free stage budgets, where they were asked for.
    """

    model: str
    variant: str
    phase: Phase
    slo: Slo
    configs: tuple[str, ...]
    layers: int
    throughput: NDArray[np.float64]
    layout: NDArray[np.int16]
    layouts: tuple[str, ...]
    sources: tuple[CapacitySource, ...]
    error_frac: tuple[float | None, ...]
    memory_bytes: NDArray[np.float64]
    usable_memory_bytes: NDArray[np.float64]
    model_bytes: float
    inputs_hash: str
    budgets: BudgetTable | None = None

    @property
    def max_stages(self) -> int:
        """The largest S the table covers."""
        return int(self.throughput.shape[0])
