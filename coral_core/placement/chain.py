"""Exact placement of many combinations as chains: one node per stage, as stock vLLM runs pipelines.

Data: T^_j(c, l/S), non-increasing in the layers j; multisets M of at most S_max nodes; L layers; m, the parts of the pipeline
inside each node, none of which may be without a layer.
Variables: the layers j_k >= m of each node k.
Constraints: the layers sum to L.
Objective: maximise min over k of T^_{j_k}(c_k, l/|M|).

With one node per stage S = |M| is given, and the layers that hold a throughput t are the values >= t in the nodes' lists:
T* = min(L-th largest value of all lists together, min over k of T^_m), as for a fixed partition in DESIGN 3.3.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations
from coral_core.placement.problem import check_capacity, check_counts

_BLOCK_VALUES: Final = 2**23
"""Capacities looked at at a time; bounds memory only."""


class ChainPlacement:
    """Exact, without a solver; `parts` of the pipeline inside each node."""

    name = "chain"

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts

    def place(self, table: CapacityTable, counts: NDArray[np.int16]) -> PlacedCombinations:
        """The best chains of many combinations, `counts` (n, C); infeasible rows are left out, order is kept.

        Raises InputError for a malformed table or combination.
        """
        started = time.perf_counter()
        check_counts(counts, table)
        check_capacity(table.throughput, table.configs)
        sizes = counts.sum(axis=1, dtype=np.int64)
        longest = int(sizes.max(initial=1))
        throughput = np.zeros(len(counts))
        layers = np.zeros((len(counts), longest), dtype=np.int16)
        nodes = np.zeros((len(counts), longest), dtype=np.int64)
        for size in range(1, min(longest, table.layers // self._parts) + 1):
            of_size = np.flatnonzero(sizes == size)
            step = max(_BLOCK_VALUES // (size * table.layers), 1)
            for first in range(0, len(of_size), step):
                rows = of_size[first : first + step]
                nodes[rows, :size] = _nodes(counts[rows], size)
                values = table.throughput[size - 1][nodes[rows, :size]]
                throughput[rows], layers[rows, :size] = _shared(values, self._parts)
        found = throughput > 0
        layers, nodes = layers[found], nodes[found]
        stage_counts = np.zeros((len(layers), longest, counts.shape[1]), dtype=np.int16)
        row, stage = np.nonzero(layers)
        stage_counts[row, stage, nodes[row, stage]] = 1
        return PlacedCombinations(
            counts=counts[found],
            throughput=throughput[found],
            n_stages=sizes[found].astype(np.int16),
            stage_layers=layers,
            stage_counts=stage_counts,
            proven=np.ones(len(layers), dtype=np.bool_),
            method=self.name,
            statistics={
                "combinations": float(len(counts)),
                "infeasible": float((~found).sum()),
                "unproven": 0.0,
                "solve_s": time.perf_counter() - started,
            },
        )


def _nodes(counts: NDArray[np.int16], size: int) -> NDArray[np.int64]:
    """(n, size): the configuration of each node, in the order of the columns."""
    row, config = np.nonzero(counts)
    return np.repeat(config, counts[row, config]).reshape(len(counts), size)


def _shared(values: NDArray[np.float64], parts: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Best throughput (n,) and layers of each node (n, S), of capacities (n, S, L); layers are 0 where it is 0."""
    n, stages, layers = values.shape
    least = stages * layers - layers
    rate = np.minimum(np.partition(values.reshape(n, -1), least, axis=1)[:, least], values[:, :, parts - 1].min(axis=1))
    most = (values >= rate[:, None, None]).sum(axis=2)
    surplus = most.sum(axis=1) - layers
    for stage in range(stages):
        given_up = np.minimum(most[:, stage] - parts, surplus)
        most[:, stage] -= given_up
        surplus -= given_up
    return rate, np.where(rate[:, None] > 0, most, 0)
