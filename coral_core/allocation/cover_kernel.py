"""Compiled loops of the covering dynamic program on demand units (see `cover`).

A table is (N+1,): entry y is the least cost that covers at least y units, never decreasing in y, infinite where nothing
covers y. Items cover `units` (n,), each at least 1, at `usd_per_h` (n,).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.placement.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Choices = NDArray[np.int32]


@compiled("void(i8[::1], f8[::1], f8[::1], i4[::1])")
def extend(units: Ints, usd_per_h: Floats, table: Floats, choice: Choices) -> None:
    """Let any number of the items extend `table` in place; `choice[y]` is the last item taken, -1 where none is."""
    n = len(units)
    for y in range(len(table)):
        best, chosen = table[y], -1
        for i in range(n):
            rest = y - units[i]
            value = usd_per_h[i] + (table[rest] if rest > 0 else table[0])
            if value < best:
                best, chosen = value, i
        table[y], choice[y] = best, chosen


@compiled("void(i8, f8, f8[::1], f8[::1])")
def extend_once(units: int, usd_per_h: float, table: Floats, out: Floats) -> None:
    """`out` = `table`, extended by at most one of an item."""
    for y in range(len(table)):
        rest = y - units
        value = usd_per_h + (table[rest] if rest > 0 else table[0])
        out[y] = min(table[y], value)


@compiled("void(i8[::1], f8[::1], i8[::1], f8[::1], f8, f8, f8[::1])")
def join(y1: Ints, c1: Floats, y2: Ints, c2: Floats, rate: float, limit: float, out: Floats) -> None:  # noqa: PLR0917 - compiled code takes arrays, not objects
    """`out[y]` = least cost of one step (y1, c1) and one step (y2, c2) that cover y together, where that may matter.

    Steps ascend in both. Sums that cost more than `limit` when the rest is covered at `rate` per unit are left out.
    """
    last = len(out) - 1
    for y in range(len(out)):
        out[y] = np.inf
    for i in range(len(y1)):
        if c1[i] + rate * max(last - y1[i] - y2[len(y2) - 1], 0) > limit:
            continue
        for k in range(len(y2)):
            cost = c1[i] + c2[k]
            if cost > limit:
                break
            y = min(y1[i] + y2[k], last)
            if cost + rate * (last - y) <= limit and cost < out[y]:
                out[y] = cost
    for y in range(last - 1, -1, -1):
        out[y] = min(out[y], out[y + 1])
