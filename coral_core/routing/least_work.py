"""Least expected work: a request goes where it and what is there before it would be done first.

Every member holds an amount of unfinished work (prompt tokens, or requests where nothing better is known) and does away
with it in proportion to its weight. Unlike a round robin it sees that one long prompt holds others up, and that a slow
member takes long over one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def pick_least_work(work: Floats, weight: Floats, is_open: Floats, added: float) -> int:
    """The open member with the least (work + added) / weight, -1 where none is open; ties: lowest index.

    All three are (n,). A member with `is_open` 0 or weight 0 gets nothing.
    """
    best = -1
    for member in range(weight.shape[0]):
        if is_open[member] == 0 or weight[member] <= 0:
            continue
        # Compared crosswise, so that equal loads are equal and not off by a rounding.
        if best < 0 or (work[member] + added) * weight[best] < (work[best] + added) * weight[member]:
            best = member
    return best
