"""Compiled kernel of the dominance pass (numba): tens of thousands of templates in seconds."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


def dominated_in_order(nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(n,): an earlier row of `nodes` (n, C) is <= this one everywhere.

    Rows come in an order in which every dominator precedes what it dominates. Only undominated rows need comparing,
    since dominance is transitive.
    """
    n, configs = nodes.shape
    bits = np.uint64(1) << (np.arange(configs, dtype=np.uint64) % np.uint64(64))
    # a row can only be below another if the set of configurations it uses is: one test refuses most pairs
    masks = np.bitwise_or.reduce(np.where(nodes > 0, bits, np.uint64(0)), axis=1, initial=np.uint64(0))
    flags: NDArray[np.bool_] = _scan(nodes, masks, np.zeros(n, dtype=np.bool_))
    return flags


@numba.njit(cache=True)
def _scan(nodes, masks, flags):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba infers its types
    n, configs = nodes.shape
    kept = np.empty(n, dtype=np.int64)
    kept_masks = np.empty(n, dtype=np.uint64)
    count = 0
    for i in range(n):
        outside = ~masks[i]
        below = False
        for k in range(count):
            if kept_masks[k] & outside:
                continue
            j = kept[k]
            below = True
            for c in range(configs):
                if nodes[j, c] > nodes[i, c]:
                    below = False
                    break
            if below:
                break
        if below:
            flags[i] = True
        else:
            kept[count] = i
            kept_masks[count] = masks[i]
            count += 1
    return flags
