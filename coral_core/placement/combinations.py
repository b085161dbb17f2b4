"""Which node combinations are worth a placement (DESIGN 3.5)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coral_core.errors import InputError

MAX_COMBINATIONS: Final = 20_000_000
"""More than this does not fit memory; the enumeration refuses instead of swapping."""


def enumerate_combinations(
    *,
    memory_bytes: ArrayLike,
    usable_memory_bytes: ArrayLike,
    model_bytes: float,
    n_max: int,
    rho: float,
) -> NDArray[np.int16]:
    """All multisets of at most `n_max` nodes with total memory < `rho` x `model_bytes` whose usable memory holds the model.

    `memory_bytes` and `usable_memory_bytes` are (C,), one node each. Returns nodes per configuration (n, C), in canonical
    order: by size, then lexicographic in the sorted sequence of the nodes' indices.
    Raises InputError for memory that is not positive, limits that allow nothing, or more than MAX_COMBINATIONS.
    """
    memory = _positive(memory_bytes, "memory_bytes")
    usable = _positive(usable_memory_bytes, "usable_memory_bytes")
    if memory.shape != usable.shape:
        raise InputError(f"{usable.size} configurations, not {memory.size}", where="usable_memory_bytes")
    model = float(_positive([model_bytes], "model_bytes")[0])
    limit = float(_positive([rho], "rho")[0]) * model
    if n_max < 1:
        raise InputError(f"n_max must be at least 1, not {n_max}", where="n_max")
    nodes = np.zeros((1, 0), dtype=np.int16)
    total = np.zeros(1)
    parts: list[NDArray[np.int16]] = []
    for _ in range(n_max):
        nodes, total = _extend(nodes, total, memory, limit)
        if sum(len(part) for part in parts) + len(nodes) > MAX_COMBINATIONS:
            raise InputError(
                f"more than {MAX_COMBINATIONS} combinations", where="n_max", fix="lower n_max or rho, or drop nodes"
            )
        fits = usable[nodes].sum(axis=1) >= model
        parts.append(_counts(nodes[fits], len(memory)))
    return np.concatenate(parts)


def split_combinations(counts: NDArray[np.int16], parts: int) -> list[NDArray[np.int16]]:
    """Cut combinations (n, C) into at most `parts` of about equal length that share few sub-multisets with each other.

    The lattice method solves each sub-multiset once per part, so neighbours in lexicographic order belong together:
    eight parts of 200,000 combinations of 20 configurations cost 1.6 times one part, dealt out in turn 2.7 times.
    Every row is in exactly one part; no part is empty.
    """
    return [counts[rows] for rows in split_rows(counts, parts)]


def split_rows(counts: NDArray[np.int16], parts: int) -> list[NDArray[np.int64]]:
    """The row numbers of each part that `split_combinations` makes, ascending."""
    if parts < 1:
        raise InputError(f"at least one part is due, not {parts}", where="parts")
    order = np.lexsort(counts.T[::-1])[::-1]
    return [np.sort(rows) for rows in np.array_split(order, parts) if len(rows)]


def _extend(
    nodes: NDArray[np.int16], total: NDArray[np.float64], memory: NDArray[np.float64], limit: float
) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Every sorted sequence one node longer and still below the limit; lexicographic order is kept.

    Memory is positive, so a sequence at the limit has no valid extension and may be dropped for good.
    """
    n_configs = len(memory)
    last = nodes[:, -1].astype(np.int64) if nodes.shape[1] else np.zeros(len(nodes), dtype=np.int64)
    ways = n_configs - last
    parent = np.repeat(np.arange(len(nodes)), ways)
    added = np.arange(len(parent)) - np.repeat(np.cumsum(ways) - ways, ways) + last[parent]
    longer = total[parent] + memory[added]
    kept = longer < limit
    parent, added = parent[kept], added[kept].astype(np.int16)
    return np.column_stack([nodes[parent], added]), longer[kept]


def _counts(nodes: NDArray[np.int16], n_configs: int) -> NDArray[np.int16]:
    counts = np.zeros((len(nodes), n_configs), dtype=np.int16)
    row = np.arange(len(nodes))
    for column in nodes.T:
        counts[row, column] += 1
    return counts


def _positive(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise InputError("one number per configuration is due, and at least one configuration", where=name)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise InputError(f"must be finite and above 0, not {array[~(array > 0) | ~np.isfinite(array)][0]}", where=name)
    return array
