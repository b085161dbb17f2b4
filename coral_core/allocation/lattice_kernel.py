"""Compiled loops over the node multisets of a region (see `lattice`).

A table is (n,) over states; state 0 holds no node, and no table decreases as nodes are added. A state's code holds its
counts in fields with a free bit above each (`guard`): a fits into s where (code_s | guard) - code_a leaves every guard bit.
Differences of states are states, since their numbers are linear in the counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.placement.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled("i8(i8[::1], i8, i8[::1], f8[::1], i8[::1], f8[::1])")
def close(codes: Ints, guard: int, item_state: Ints, item_value: Floats, kept: Ints, table: Floats) -> int:  # noqa: PLR0917 - compiled code takes arrays, not objects
    """`table[s]` = most value of any items that fit into s together; items ascend by state.

    Returns how many items are worth more than others in their place; `kept` begins with their numbers.
    """
    count, following = 0, 0
    for s in range(len(codes)):
        room = codes[s] | guard
        best = 0.0
        for k in range(count):
            state = item_state[kept[k]]
            if (room - codes[state]) & guard == guard:
                value = item_value[kept[k]] + table[s - state]
                best = max(best, value)
        while following < len(item_state) and item_state[following] == s:
            if item_value[following] > best:
                best = item_value[following]
                kept[count] = following
                count += 1
            following += 1
        table[s] = best
    return count


@compiled("void(i8[::1], i8, i8[:, ::1], i8[::1], i8[::1], f8[::1], f8[::1], f8[::1])")
def join_least(  # noqa: PLR0917 - compiled code takes arrays, not objects
    codes: Ints, guard: int, counts: Ints, stride: Ints, left: Ints, left_value: Floats, right: Floats, out: Floats
) -> None:
    """`out[s]` = most of min(left, right) over splits of s; the left states come by falling value, 0 among them."""
    for s in range(len(codes)):
        room = codes[s] | guard
        best = 0.0
        for c in range(len(stride)):
            if counts[s, c] > 0:
                best = max(best, out[s - stride[c]])
        for k in range(len(left)):
            if left_value[k] <= best:
                break
            a = left[k]
            if a <= s and (room - codes[a]) & guard == guard:
                best = max(best, min(left_value[k], right[s - a]))
        out[s] = best


@compiled("void(i8[::1], i8, i8[:, ::1], i8[::1], i8[::1], f8[::1], f8[::1], f8[::1])")
def join_sum(  # noqa: PLR0917 - compiled code takes arrays, not objects
    codes: Ints, guard: int, counts: Ints, stride: Ints, left: Ints, left_value: Floats, right: Floats, out: Floats
) -> None:
    """As `join_least`, of left + right."""
    for s in range(len(codes)):
        room = codes[s] | guard
        best = 0.0
        for c in range(len(stride)):
            if counts[s, c] > 0:
                best = max(best, out[s - stride[c]])
        for k in range(len(left)):
            if left_value[k] + right[s] <= best:
                break
            a = left[k]
            if a <= s and (room - codes[a]) & guard == guard:
                best = max(best, left_value[k] + right[s - a])
        out[s] = best
