"""An independent check of every placement before it becomes a template: nothing here is shared with the methods."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem
from coral_core.domain.templates import Placement
from coral_core.errors import SolverError

TOLERANCE_FRAC: Final = 1e-9
"""Relative difference allowed between a stated throughput and the slowest stage's."""

_BLOCK_ROWS: Final = 2**16  # bounds the memory of a bulk check


class PlacementMismatchError(SolverError):
    """A placement is not what its method claims: a bug in the method or its tables, never the user's input."""

    kind = "placement_mismatch"


def verify_placement(problem: PlacementProblem, placement: Placement, throughput_tokens_per_s: float) -> None:
    """Guarantee that a placement uses each node once, holds all layers, and has the stated throughput.

    Raises PlacementMismatchError naming what differs.
    """
    if Counter(node for stage in placement.stages for node in stage.nodes) != Counter(problem.nodes):
        raise _mismatch("its stages do not hold each node exactly once")
    if any(stage.layers < 1 or not stage.nodes for stage in placement.stages):
        raise _mismatch("a stage has no layer or no node")
    if placement.layers != problem.layers:
        raise _mismatch(f"its stages hold {placement.layers} layers, the model has {problem.layers}")
    capacity = problem.capacity_tokens_per_s[len(placement.stages)]
    slowest = min(sum(float(capacity[node][stage.layers - 1]) for node in stage.nodes) for stage in placement.stages)
    if not slowest > 0:
        raise _mismatch("a stage has no throughput")
    if not abs(slowest - throughput_tokens_per_s) <= TOLERANCE_FRAC * slowest:
        raise _mismatch(f"its slowest stage gives {slowest} tokens/s, stated are {throughput_tokens_per_s}")


def verify_placed(table: CapacityTable, placed: PlacedCombinations) -> None:
    """The same guarantee for every row of a bulk answer; raises PlacementMismatchError naming the first wrong row."""
    for first in range(0, len(placed), _BLOCK_ROWS):
        _verify_rows(table, placed, slice(first, first + _BLOCK_ROWS))


def _verify_rows(table: CapacityTable, placed: PlacedCombinations, rows: slice) -> None:
    n_stages, throughput = placed.n_stages[rows].astype(np.int64), placed.throughput[rows]
    layers, nodes = placed.stage_layers[rows].astype(np.int64), placed.stage_counts[rows].astype(np.int64)
    n, s_max = layers.shape
    used = np.arange(s_max) < n_stages[:, np.newaxis]

    def require(holds: NDArray[np.bool_] | np.bool_, what: str) -> None:
        if not holds.all():
            raise _mismatch(what, where=f"row {rows.start + int(np.argmin(holds))}")

    require((n_stages >= 1) & (n_stages <= s_max), "its number of stages is out of range")
    require((nodes >= 0).all(axis=(1, 2)), "a stage has a negative number of nodes")
    require((nodes.sum(axis=1) == placed.counts[rows]).all(axis=1), "its stages do not hold each node exactly once")
    require(layers.sum(axis=1) == table.layers, f"its stages do not hold {table.layers} layers")
    require(((layers >= 1) == used).all(axis=1), "a stage has no layer")
    require(((nodes.sum(axis=2) >= 1) == used).all(axis=1), "a stage has no node")
    slowest = np.full(n, np.inf)
    for s in range(s_max):
        with_stage = np.flatnonzero(used[:, s])
        at_stage = table.throughput[n_stages[with_stage] - 1, :, layers[with_stage, s] - 1]
        slowest[with_stage] = np.minimum(slowest[with_stage], (nodes[with_stage, s] * at_stage).sum(axis=1))
    require(slowest > 0, "a stage has no throughput")
    require(
        np.abs(slowest - throughput) <= TOLERANCE_FRAC * slowest, "its stated throughput is not its slowest stage's"
    )


def _mismatch(what: str, *, where: str = "placement") -> PlacementMismatchError:
    return PlacementMismatchError(f"a placement was rejected: {what}", where=where, fix="report this as a bug")
