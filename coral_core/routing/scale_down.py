"""Which instance to drain when one has to go."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def least_loaded(
    outstanding_requests: NDArray[np.int64], weight: NDArray[np.float64], is_candidate: NDArray[np.int64]
) -> int:
    """The candidate with the fewest outstanding requests per unit of weight, -1 where there is none; ties: lowest index.

    All three are (n,); candidates have a positive weight.
    """
    best = -1
    for member in range(weight.shape[0]):
        if is_candidate[member] == 0:
            continue
        # Compared crosswise, so that equal loads are equal and not off by a rounding.
        if best < 0 or outstanding_requests[member] * weight[best] < outstanding_requests[best] * weight[member]:
            best = member
    return best
