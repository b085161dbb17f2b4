"""Lossless dominance pruning of a library (DESIGN 3.5), one pass over the lattice of multisets.

Data: distinct multisets M of nodes, all of one model, variant, phase, SLO and method, with their throughputs T(M), 0 where
  a multiset has no placement.
Rule: M is dropped where another multiset has no more nodes of any configuration and a throughput at least as high. With
  H(M) = max(T(M), H(M less one node), for each of its nodes), that is where some H(M less one node) >= T(M).
  The multisets are distinct, so no two drop each other: of a chain of equal throughputs the smallest stays.

Why nothing is lost: in any plan an instance of M may be replaced by one of what dominates it, at the same count: no
capacity, demand, cap, redundancy or price row gets worse. What dominates M uses a subset of its configurations, so its
capacities come from sources that are at least as good, and it is sold wherever M is.
The exception is an instance of M that runs already: replacing it has a start-up price, so plans keep running templates.

The multisets given must hold every multiset between any two of them: an enumeration does, because what lies between has
less memory than the larger and more than the smaller. One that is absent then has no sub-multiset here either.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.errors import InputError

Counts = NDArray[np.int16]
Mask = NDArray[np.bool_]

_SEED: Final = 0


class DominancePass:
    """Decides over an enumeration piece by piece, in order of size, so that placements need not all be held at once."""

    def __init__(self, counts: Counts) -> None:
        """`counts` (n, C): distinct multisets in order of size, as the module says. Raises InputError otherwise."""
        from coral_core.placement import dominance_kernel as kernel  # noqa: PLC0415 - numba takes a second to import

        if counts.ndim != 2:
            raise InputError(f"shape {counts.shape} instead of (n, C)", where="counts")
        if (np.diff(counts.sum(axis=1)) < 0).any():
            raise InputError("smaller combinations are due before larger ones", where="counts")
        self._counts = np.ascontiguousarray(counts, dtype=np.int16)
        # Keys only speed the search up: the kernel compares the multisets themselves.
        self._weights = np.random.default_rng(_SEED).integers(1, 2**64, size=(counts.shape[1],), dtype=np.uint64)
        self._keys = np.zeros(len(counts), dtype=np.uint64)
        for c, weight in enumerate(self._weights):
            self._keys += counts[:, c].astype(np.uint64) * weight
        self._slots = np.full(1 << max(1, (2 * len(counts)).bit_length()), -1, dtype=np.int32)
        repeated = kernel.insert_rows(self._counts, self._keys, self._slots)
        if repeated >= 0:
            raise InputError(f"row {repeated} repeats an earlier one", where="counts")
        self._best = np.zeros(len(counts))
        self._done = 0

    def undominated(self, throughput: NDArray[np.float64]) -> Mask:
        """Which of the next rows stay: `throughput` (k,) is theirs, 0 where there is no template. (k,) booleans.

        Raises InputError for throughputs that are negative or not finite, or more than there are rows.
        """
        from coral_core.placement import dominance_kernel as kernel  # noqa: PLC0415 - see __init__

        values = np.ascontiguousarray(throughput, dtype=np.float64)
        if values.ndim != 1 or self._done + len(values) > len(self._counts):
            left = len(self._counts) - self._done
            raise InputError(f"shape {values.shape} for {left} combinations left", where="throughput")
        if not (np.isfinite(values) & (values >= 0)).all():
            raise InputError("throughputs must be finite and at least 0", where="throughput")
        keep = np.empty(len(values), dtype=np.bool_)
        kernel.mark_undominated(
            self._counts, self._keys, self._slots, self._weights, self._done, values, self._best, keep
        )
        self._done += len(values)
        return keep

    def with_sub_multisets(self, chosen: Mask) -> Mask:
        """The rows of `chosen` (n,) and all of the enumeration that they contain: what decides over them, (n,)."""
        from coral_core.placement import dominance_kernel as kernel  # noqa: PLC0415 - see __init__

        marked = np.array(chosen, dtype=np.bool_)
        kernel.mark_sub_multisets(self._counts, self._keys, self._slots, self._weights, marked)
        return marked


def undominated(counts: Counts, throughput: NDArray[np.float64]) -> Mask:
    """Which of the multisets (n, C) with these throughputs (n,) no other dominates; any order, otherwise as the pass."""
    order = np.argsort(counts.sum(axis=1), kind="stable")
    keep = np.empty(len(counts), dtype=np.bool_)
    keep[order] = DominancePass(counts[order]).undominated(throughput[order])
    return keep


def rows_with_placement(counts: Counts, placed: Counts) -> NDArray[np.int64]:
    """Row numbers in `counts` (n, C), all distinct, of the rows `placed`, a subsequence of it. Raises ValueError if not."""
    from coral_core.placement import dominance_kernel as kernel  # noqa: PLC0415 - see DominancePass

    rows = np.empty(len(placed), dtype=np.int64)
    found = kernel.subsequence_rows(
        np.ascontiguousarray(counts, dtype=np.int16), np.ascontiguousarray(placed, dtype=np.int16), rows
    )
    if found < len(placed):
        raise ValueError(f"placement {found} is of no combination that was asked for, or out of order")
    return rows
