"""Compiled loops of the dominance pass (see `dominance`).

Multisets are the rows of `counts` (n, C); `keys` (n,) are the sums of their nodes' `weights` modulo 2^64; `slots` is an
open-addressing table of row numbers, a power of two in size, -1 where free. Keys of different multisets may coincide.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.placement.compiled import compiled

Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]
Rows = NDArray[np.int32]
Ints = NDArray[np.int64]
Shorts = NDArray[np.int16]
Mask = NDArray[np.bool_]

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio (Knuth, multiplicative hashing)


@compiled("i8(u8, i8, i8, i2[:, ::1], u8[::1], i4[::1])")
def find(key: np.uint64, row: int, less: int, counts: Shorts, keys: Keys, slots: Rows) -> int:  # noqa: PLR0917 - compiled code takes arrays, not objects
    """The row of multiset `row` without one node of type `less` (of itself where -1), whose key is `key`.

    Where it is absent, -1 - the free slot at which it would stand.
    """
    last = len(slots) - 1
    slot = int(key * _MIX >> np.uint64(32)) & last
    while slots[slot] >= 0:
        other: int = slots[slot]
        if keys[other] == key:
            same = True
            for c in range(counts.shape[1]):
                same &= counts[other, c] == counts[row, c] - (c == less)
            if same:
                return other
        slot = (slot + 1) & last
    return -1 - slot


@compiled("i8(i2[:, ::1], u8[::1], i4[::1])")
def insert_rows(counts: Shorts, keys: Keys, slots: Rows) -> int:
    """Fill the table; the first row that repeats an earlier one, -1 where there is none."""
    for row in range(len(keys)):
        slot = -1 - find(keys[row], row, -1, counts, keys, slots)
        if slot < 0:
            return row
        slots[slot] = row
    return -1


@compiled("void(i2[:, ::1], u8[::1], i4[::1], u8[::1], i8, f8[::1], f8[::1], b1[::1])")
def mark_undominated(  # noqa: PLR0917 - compiled code takes arrays, not objects
    counts: Shorts, keys: Keys, slots: Rows, weights: Keys, first: int, throughput: Floats, best: Floats, keep: Mask
) -> None:
    """For rows first.. of throughput T: keep = T > H, where H is the most that `best` has for one node less; best = max(T, H)."""
    for i in range(len(throughput)):
        row = first + i
        below = 0.0
        for c in range(counts.shape[1]):
            if counts[row, c] > 0:
                smaller = find(keys[row] - weights[c], row, c, counts, keys, slots)
                if smaller >= 0:
                    below = max(below, best[smaller])
        keep[i] = throughput[i] > below
        best[row] = max(throughput[i], below)


@compiled("void(i2[:, ::1], u8[::1], i4[::1], u8[::1], b1[::1])")
def mark_sub_multisets(counts: Shorts, keys: Keys, slots: Rows, weights: Keys, marked: Mask) -> None:
    """Mark all that a marked row contains."""
    for row in range(len(marked) - 1, -1, -1):
        if marked[row]:
            for c in range(counts.shape[1]):
                if counts[row, c] > 0:
                    smaller = find(keys[row] - weights[c], row, c, counts, keys, slots)
                    if smaller >= 0:
                        marked[smaller] = True


@compiled("i8(i2[:, ::1], i2[:, ::1], i8[::1])")
def subsequence_rows(counts: Shorts, placed: Shorts, rows: Ints) -> int:
    """Row numbers in `counts` of the rows of `placed`, in the same order; how many were found before one was not."""
    found = 0
    for row in range(len(counts)):
        if found < len(placed) and (counts[row] == placed[found]).all():
            rows[found] = row
            found += 1
    return found
