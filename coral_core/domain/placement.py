"""The placement problem for one combination, its answer, and the bulk answer for many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.templates import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Lay `layers` over `nodes` (node-type names, a multiset).

    `capacity_tokens_per_s[S][type]` is (layers,): capacity of one node of the type holding j = 1..layers layers when
    the pipeline has S stages, S = 1..len(nodes). Non-increasing, finite, >= 0. Tables of different S are unrelated.
    `budget_capacity_tokens_per_s[type]` is (grid, layers), for methods with free stage budgets only: the capacity as one
    of several stages within beta/grid of the SLO, non-decreasing in beta = 1..grid.
    """

    layers: int
    nodes: tuple[str, ...]
    capacity_tokens_per_s: Mapping[int, Mapping[str, NDArray[np.float64]]]
    budget_capacity_tokens_per_s: Mapping[str, NDArray[np.float64]] | None = None


class PlacementStatus(StrEnum):
    """`unproven`: a limit was reached before the optimum was proven (ILP only); its placement may be absent."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResult:
    """The best placement and its throughput (0 and None where infeasible)."""

    status: PlacementStatus
    throughput_tokens_per_s: float
    placement: Placement | None
    method: str
    solve_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCombinations:
    """Optimal placements of many combinations of one capacity table; n rows, infeasible ones left out.

    `counts` (n, C) nodes per configuration; `throughput` (n,); `n_stages` (n,); `stage_layers` (n, S_max), 0 beyond
    n_stages; `stage_counts` (n, S_max, C) nodes per stage and configuration. `proven` (n,) is False where a limit
    ended the solve first. `stage_budget_frac` (n, S_max) is each stage's share of the SLO, 0 beyond n_stages, where the
    method chose it; without it every stage has 1/n_stages. Statistics count what was tried: `combinations`, `infeasible`, `unproven`, `solve_s`.
    """

    counts: NDArray[np.int16]
    throughput: NDArray[np.float64]
    n_stages: NDArray[np.int16]
    stage_layers: NDArray[np.int16]
    stage_counts: NDArray[np.int16]
    proven: NDArray[np.bool_]
    method: str
    statistics: Mapping[str, float]
    stage_budget_frac: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.throughput)
