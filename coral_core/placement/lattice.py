r"""Exact placement of many combinations without a solver (DESIGN 3.3).

Data: T^_j(c, l/S), non-increasing in the layers j; multisets M of nodes; L layers.
Variables: number of stages S, a partition of M into S stages, at least one layer per stage, L layers in all.
Constraints: a stage of nodes A that holds j layers has throughput T_A(j) = sum over A of T^_j(., l/S).
Objective: maximise the slowest stage's throughput.

With the descending lists G[S,k,M](l) = best throughput at which M, as k stages of S, holds l layers:
  G[S,1,M](l) = T_M(l)
  G[S,k,M](l) = max over A of min(l-th largest of merge(G[S,1,A], G[S,k-1,M\A]), G[S,1,A](1), G[S,k-1,M\A](1))
  T*(M) = max over S <= min(|M|, L) of G[S,S,M](L)
where A runs over the sub-multisets that contain M's first node: stages of one pipeline share a budget, so their order
does not matter. All combinations given at once share the lists; only one S is held in memory at a time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem, PlacementResult, PlacementStatus
from coral_core.errors import InputError
from coral_core.placement.problem import Capacity, check_capacity, check_counts, placement_at, problem_arrays

MAX_TABLE_BYTES: Final = 6 * 2**30
"""Tables of one S above this are refused: nobody's worker should be killed for want of memory."""

MAX_STEPS: Final = 3e11
"""Steps of one combination above this (several minutes) are refused: 15 different nodes of 94 layers still pass."""

Counts = NDArray[np.int16]
Keys = NDArray[np.uint64]


class LatticePlacement:
    """The default method: exact, without a solver."""

    name = "lattice"

    def __init__(self, *, max_table_bytes: int = MAX_TABLE_BYTES) -> None:
        self._max_table_bytes = max_table_bytes

    def solve(self, problem: PlacementProblem) -> PlacementResult:
        """The best placement of one combination; raises InputError for a malformed or too large problem."""
        types, counts, capacity = problem_arrays(problem)
        placed = self._place(capacity, counts[np.newaxis, :])
        found = len(placed) == 1
        return PlacementResult(
            status=PlacementStatus.OPTIMAL if found else PlacementStatus.INFEASIBLE,
            throughput_tokens_per_s=float(placed.throughput[0]) if found else 0.0,
            placement=placement_at(placed, types, 0) if found else None,
            method=self.name,
            solve_s=placed.statistics["solve_s"],
        )

    def place(self, table: CapacityTable, counts: Counts) -> PlacedCombinations:
        """The best placements of many combinations, `counts` (n, C); infeasible rows are left out, order is kept.

        Statistics besides the port's: `sub_multisets` and `table_bytes` (of the largest S).
        Raises InputError for a malformed table or combination, or where the tables would not fit memory.
        """
        check_counts(counts, table)
        check_capacity(table.throughput, table.configs)
        capacity = np.ascontiguousarray(table.throughput, dtype=np.float64)
        return self._place(capacity, np.ascontiguousarray(counts, dtype=np.int16))

    def _place(self, capacity: Capacity, counts: Counts) -> PlacedCombinations:
        from coral_core.placement import lattice_kernel as kernel  # noqa: PLC0415 - numba takes a second to import

        started = time.perf_counter()
        layers = capacity.shape[2]
        n_max = int(counts.sum(axis=1).max(initial=1))
        s_max = min(n_max, layers)
        _check_size(counts, layers, self._max_table_bytes)
        lattice = _lattice(counts)
        types, runs = _runs(counts)
        throughput = np.zeros(len(counts))
        stages = np.zeros(len(counts), dtype=np.int16)
        stage_runs = np.zeros((len(counts), s_max, types.shape[1]), dtype=np.int16)
        table_bytes = 0
        for n_stages in range(1, s_max + 1):
            tables = lattice.tables(capacity[n_stages - 1], n_stages, self._max_table_bytes)
            table_bytes = max(table_bytes, tables[0].nbytes)
            kernel.improve(
                tables, n_stages, capacity[n_stages - 1], types, runs, lattice.index, _max_splits(runs), throughput,
                stages, stage_runs,
            )  # fmt: skip
            del tables  # before the next are made
        found = throughput > 0
        types, stages, stage_runs = types[found], stages[found], stage_runs[found]
        throughput = throughput[found]
        stage_layers = np.zeros((len(stages), s_max), dtype=np.int16)
        kernel.share_layers(capacity[:s_max], types, stages, stage_runs, throughput, stage_layers)
        return PlacedCombinations(
            counts=counts[found],
            throughput=throughput,
            n_stages=stages,
            stage_layers=stage_layers,
            stage_counts=_by_type(types, stage_runs, counts.shape[1]),
            proven=np.ones(len(stages), dtype=np.bool_),
            method=self.name,
            statistics={
                "combinations": float(len(counts)),
                "infeasible": float((~found).sum()),
                "unproven": 0.0,
                "solve_s": time.perf_counter() - started,
                "sub_multisets": float(len(lattice.types)),
                "table_bytes": float(table_bytes),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lattice:
    """All proper sub-multisets of the combinations, by size; row numbers are found by key.

    `offsets[n]` is the first row of size n (n = 1..n_max, the last entry is the number of rows). `index` is what the
    kernel finds rows by: weights of the types, and the open-addressing table's keys, rows and shift.
    """

    n_max: int
    types: Counts
    runs: Counts
    offsets: NDArray[np.int64]
    index: tuple[Keys, Keys, NDArray[np.int32], int]

    def tables(
        self, capacity: NDArray[np.float64], n_stages: int, max_bytes: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """G[S,k,.] for k < S = n_stages, stacked, in the form that the kernel wants.

        As k stages of S, a multiset has at least k nodes and leaves S - k for the others.
        """
        from coral_core.placement import lattice_kernel as kernel  # noqa: PLC0415 - see LatticePlacement

        firsts = [0] + [int(self.offsets[k]) for k in range(1, n_stages)]
        ends = [0] + [int(self.offsets[self.n_max - n_stages + k + 1]) for k in range(1, n_stages)]
        starts = np.concatenate([[0], np.cumsum(np.subtract(ends, firsts))])
        n_rows, layers = int(starts[-1]), capacity.shape[1]
        if n_rows * layers * 8 > max_bytes:
            raise _too_large(f"{n_rows} lists of {layers} layers need more than {max_bytes / 2**30:.1f} GiB")
        lists, reach = np.empty((n_rows, layers)), np.empty(n_rows, dtype=np.int64)
        tables = (lists, reach, (starts[:-1] - firsts).astype(np.int64))
        if n_stages > 1:
            kernel.fill_single_stages(capacity, self.types[: ends[1]], self.runs[: ends[1]], lists[: ends[1]], reach)
        for k in range(2, n_stages):
            kernel.fill_stages(tables, k, firsts[k], ends[k], self.types, self.runs, self.index, _max_splits(self.runs))
        return tables


def _lattice(counts: Counts) -> _Lattice:
    from coral_core.placement import lattice_kernel as kernel  # noqa: PLC0415 - see LatticePlacement

    sizes = counts.sum(axis=1)
    n_max = int(sizes.max(initial=1))
    weights = _weights(counts)
    levels = _levels(counts, sizes, n_max, weights)
    members = np.concatenate([*levels, counts[:0]])
    keys = _keys(members, weights)
    types, runs = _runs(members)
    n_slots = 1 << max(1, (2 * len(keys)).bit_length())
    slot_keys, slot_rows = np.zeros(n_slots, dtype=np.uint64), np.full(n_slots, -1, dtype=np.int32)
    shift = 64 - (n_slots.bit_length() - 1)
    kernel.insert_keys(keys, slot_keys, slot_rows, shift)
    return _Lattice(
        n_max=n_max,
        types=types,
        runs=runs,
        offsets=np.cumsum([0, 0, *map(len, levels)]),
        index=(weights, slot_keys, slot_rows, shift),
    )


def _levels(counts: Counts, sizes: NDArray[np.int64], n_max: int, weights: Keys) -> list[Counts]:
    """Sub-multisets of 1..n_max-1 nodes, those that do not fit the model alone included: supersets need them."""
    levels: list[Counts] = []
    level = counts[sizes == n_max]
    for size in range(n_max - 1, 0, -1):
        keys = _keys(level, weights)
        own = counts[sizes == size]
        parents = [np.flatnonzero(level[:, c]) for c in range(counts.shape[1])]
        child_keys = [keys[rows] - weights[c] for c, rows in enumerate(parents)]
        first = np.unique(np.concatenate([_keys(own, weights), *child_keys]), return_index=True)[1]
        is_own = first < len(own)
        child = first[~is_own] - len(own)
        children = level[np.concatenate(parents)[child]]
        children[np.arange(len(children)), np.repeat(np.arange(len(parents)), [len(p) for p in parents])[child]] -= 1
        level = np.empty((len(first), counts.shape[1]), dtype=np.int16)
        level[is_own] = own[first[is_own]]
        level[~is_own] = children
        levels.insert(0, level)
    return levels


def _weights(counts: Counts) -> Keys:
    """What a node of each type adds to a key: places of a mixed radix, so that keys are exact.

    Where 64 bits do not suffice (23 types or more at 6 nodes), random numbers: ten million multisets then share a key
    with odds of 1 in 10^5, and a placement built on one would not pass `verify`.
    """
    radix = [int(most) + 1 for most in counts.max(axis=0, initial=0)]
    if math.prod(radix) < 2**64:
        return np.array([math.prod(radix[:c]) for c in range(len(radix))], dtype=np.uint64)
    return np.random.default_rng(0).integers(1, 2**64, len(radix), dtype=np.uint64)


def _keys(members: Counts, weights: Keys) -> Keys:
    keys = np.zeros(len(members), dtype=np.uint64)
    for c, weight in enumerate(weights):
        keys += members[:, c].astype(np.uint64) * weight
    return keys


def _runs(members: Counts) -> tuple[Counts, Counts]:
    """(types, counts) of the nodes each multiset holds, both (n, most distinct types), padded by counts of 0."""
    row, kind = np.nonzero(members)
    distinct = np.bincount(row, minlength=len(members))
    place = np.arange(len(row)) - np.repeat(np.cumsum(distinct) - distinct, distinct)
    shape = (len(members), max(1, int(distinct.max(initial=1))))
    types, counts = np.zeros(shape, dtype=np.int16), np.zeros(shape, dtype=np.int16)
    types[row, place] = kind
    counts[row, place] = members[row, kind]
    return types, counts


def _by_type(types: Counts, stage_runs: Counts, n_types: int) -> Counts:
    """Nodes per stage and run -> nodes per stage and configuration, (n, S_max, C)."""
    out = np.zeros((*stage_runs.shape[:2], n_types), dtype=np.int16)
    row, stage, run = np.nonzero(stage_runs)
    out[row, stage, types[row, run]] = stage_runs[row, stage, run]
    return out


def _max_splits(runs: Counts) -> int:
    """The most sub-multisets with a node of the first run."""
    ways = runs.astype(np.int64) + 1
    ways[:, 0] -= 1
    return int(ways.prod(axis=1).max(initial=1))


def _check_size(counts: Counts, layers: int, max_bytes: int) -> None:
    """Refuse what cannot fit memory or a few minutes before anything is listed, judged by the worst combination."""
    largest = int(counts.sum(axis=1).max(initial=0))
    if max(2.0**largest * 8, 3.0**largest * largest**2) * layers < min(max_bytes, MAX_STEPS):
        return  # even if all nodes of the largest combination differ
    nodes = counts.astype(np.float64)
    rows = float((nodes + 1).prod(axis=1).max(initial=1.0))
    if rows * layers * 8 > max_bytes:
        raise _too_large(f"{rows:.0f} sub-multisets of {layers} layers need more than {max_bytes / 2**30:.1f} GiB")
    n_stages = np.minimum(nodes.sum(axis=1), layers)
    # Pairs A within M within the combination, each once for k < S <= n_stages.
    steps = ((nodes + 1) * (nodes + 2) / 2).prod(axis=1) * n_stages**2 / 2 * layers
    if steps.max(initial=0.0) > MAX_STEPS:
        raise _too_large(f"{steps.max():.1g} steps for one combination are more than {MAX_STEPS:.1g}")


def _too_large(what: str) -> InputError:
    return InputError(what, where="nodes", fix="place fewer combinations at a time, or fewer different nodes")
