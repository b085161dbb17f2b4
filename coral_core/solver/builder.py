"""Builds an `IntegerProgram` block by block: columns and rows belong to named families.

The names are what `explain` reports, so every row has one; everything else is arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coral_core.solver.program import Floats, IntegerProgram

Indices = NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)


class ProgramBuilder:
    """Collects blocks of columns and rows; `build` returns the program in sparse row form.

    Bounds, costs and values broadcast over their block. A family may be added to more than once.
    """

    def __init__(self, *, name: str = "program", maximize: bool = False, offset: float = 0.0) -> None:
        self.name = name
        self.maximize = maximize
        self.offset = offset
        self._columns = _Blocks()
        self._rows = _Blocks()
        self._objective: list[Floats] = []
        self._lower: list[Floats] = []
        self._upper: list[Floats] = []
        self._integer: list[NDArray[np.bool_]] = []
        self._row_lower: list[Floats] = []
        self._row_upper: list[Floats] = []
        self._entries: list[tuple[Indices, Indices, Floats]] = []

    @property
    def n_columns(self) -> int:
        """Columns so far."""
        return self._columns.total

    @property
    def n_rows(self) -> int:
        """Rows so far."""
        return self._rows.total

    def add_columns(
        self,
        family: str,
        n: int,
        *,
        objective: ArrayLike = 0.0,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        integer: ArrayLike = False,
    ) -> Indices:
        """Append `n` variables; returns their column indices (n,)."""
        self._objective.append(_spread(objective, n))
        self._lower.append(_spread(lower, n))
        self._upper.append(_spread(upper, n))
        self._integer.append(np.broadcast_to(np.asarray(integer, dtype=np.bool_), (n,)))
        return self._columns.add(family, n)

    def add_rows(
        self,
        family: str,
        n: int,
        *,
        rows: ArrayLike = (),
        columns: ArrayLike = (),
        values: ArrayLike = 1.0,
        lower: ArrayLike = -np.inf,
        upper: ArrayLike = np.inf,
    ) -> Indices:
        """Append `n` constraints; `rows` counts from 0 inside this block, aligned with `columns` and `values` (nnz,).

        Returns the row indices (n,), to which `add_entries` may add further terms.
        """
        indices = self._rows.add(family, n)
        self._row_lower.append(_spread(lower, n))
        self._row_upper.append(_spread(upper, n))
        local = np.asarray(rows, dtype=np.int32).ravel()
        if local.size and (local.min() < 0 or local.max() >= n):
            raise ValueError(f"rows of family {family!r} must lie in 0..{n - 1}")
        self.add_entries(indices[local] if local.size else local, columns, values)
        return indices

    def add_entries(self, rows: ArrayLike, columns: ArrayLike, values: ArrayLike = 1.0) -> None:
        """Add terms by absolute row and column index; terms of the same place are summed."""
        row, column = np.broadcast_arrays(np.asarray(rows, dtype=np.int32), np.asarray(columns, dtype=np.int32))
        value = np.broadcast_to(np.asarray(values, dtype=np.float64), row.shape)
        self._entries.append((row.ravel(), column.ravel(), value.ravel()))

    def columns_of(self, family: str) -> Indices:
        """Column indices of a family, in the order added; empty where there are none."""
        return self._columns.of(family)

    def rows_of(self, family: str) -> Indices:
        """Row indices of a family, in the order added; empty where there are none."""
        return self._rows.of(family)

    def row_family(self, row: int) -> str:
        """The family that a row belongs to."""
        return self._rows.family(row)

    def build(self) -> IntegerProgram:
        """The program of all blocks; zero terms are dropped."""
        indptr, indices, values = _compress(self._entries, self.n_rows, max(self.n_columns, 1))
        return IntegerProgram(
            objective=_joined(self._objective, np.float64),
            lower=_joined(self._lower, np.float64),
            upper=_joined(self._upper, np.float64),
            integer=_joined(self._integer, np.bool_),
            indptr=indptr,
            indices=indices,
            values=values,
            row_lower=_joined(self._row_lower, np.float64),
            row_upper=_joined(self._row_upper, np.float64),
            maximize=self.maximize,
            offset=self.offset,
            name=self.name,
        )


class _Blocks:
    """Which family each run of consecutive indices belongs to."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._starts: list[int] = [0]

    @property
    def total(self) -> int:
        return self._starts[-1]

    def add(self, family: str, n: int) -> Indices:
        start = self.total
        self._names.append(family)
        self._starts.append(start + n)
        return np.arange(start, start + n, dtype=np.int32)

    def of(self, family: str) -> Indices:
        runs = zip(self._names, pairwise(self._starts), strict=True)
        own = [np.arange(start, end, dtype=np.int32) for name, (start, end) in runs if name == family]
        return _joined(own, np.int32)

    def family(self, index: int) -> str:
        if not 0 <= index < self.total:
            raise IndexError(f"index {index} is outside 0..{self.total - 1}")
        return self._names[int(np.searchsorted(self._starts, index, side="right")) - 1]


def _spread(value: ArrayLike, n: int) -> Floats:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (n,))


def _joined(parts: Sequence[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)


def _compress(entries: list[tuple[Indices, Indices, Floats]], m: int, n: int) -> tuple[Indices, Indices, Floats]:
    """COO blocks -> CSR arrays with sorted columns, duplicates summed, zeros dropped."""
    row = _joined([part[0] for part in entries], np.int32)
    column = _joined([part[1] for part in entries], np.int32)
    value = _joined([part[2] for part in entries], np.float64)
    place, inverse = np.unique(row.astype(np.int64) * n + column, return_inverse=True)
    total = np.bincount(inverse, weights=value, minlength=len(place))
    place, total = place[total != 0.0], total[total != 0.0]
    indptr = np.zeros(m + 1, dtype=np.int32)
    np.cumsum(np.bincount(place // n, minlength=m), out=indptr[1:])
    return indptr, (place % n).astype(np.int32), total
