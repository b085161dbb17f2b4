"""The rows and the auxiliary variables of an allocation program while it is put together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from coral_core.allocation.coverage import Floats, Ints

_ROW_SCALE_MAX = 1e3


class Family(StrEnum):
    """The named families of constraints; `left`, `link` and `stage` rows are means of the solve, no limits."""

    CAPACITY = "capacity"
    DEMAND = "demand"
    REGION = "region"
    PAIR = "pair"
    FLOOR = "floor"
    CAP = "cap"
    BUDGET = "budget"
    QUOTA = "quota"
    ON_DEMAND = "on_demand"
    REGION_DEMAND = "region_demand"
    REDUNDANCY = "redundancy"
    LEFT = "left"
    LINK = "link"
    STAGE = "stage"


COVERING = frozenset(
    {
        Family.DEMAND,
        Family.REGION,
        Family.PAIR,
        Family.ON_DEMAND,
        Family.REGION_DEMAND,
        Family.REDUNDANCY,
        Family.LEFT,
    }
)
"""Families whose rows ask for coverage: a solver that misses one by its tolerance is asked again with them raised."""

RowKey = tuple[Family, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """sum of `value` times the variables `column`, less `less`."""

    column: Ints
    value: Floats
    less: float = 0.0

    @classmethod
    def of(cls, column: Ints, factor: float = 1.0) -> Term:
        """The sum of these variables times a factor."""
        return cls(column=column, value=np.full(len(column), factor))

    def at(self, x: Floats) -> float:
        """Its value in a solution."""
        return float(self.value @ x[self.column]) - self.less

    def plus(self, *others: Term) -> Term:
        """The sum of terms."""
        parts = (self, *others)
        return Term(
            column=np.concatenate([part.column for part in parts]),
            value=np.concatenate([part.value for part in parts]),
            less=math.fsum(part.less for part in parts),
        )

    def negative(self) -> Term:
        """Minus the term."""
        return Term(column=self.column, value=-self.value, less=-self.less)


@dataclass(slots=True, kw_only=True)
class Rows:
    """Rows of the program under construction, as coordinates; `n`: how many variables there are so far."""

    n: int
    row: list[Ints] = field(default_factory=list)
    column: list[Ints] = field(default_factory=list)
    value: list[Floats] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    key: list[RowKey] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    added_upper: list[Floats] = field(default_factory=list)
    added_integer: list[bool] = field(default_factory=list)

    def add(
        self, key: RowKey, term: Term, *, lower: float = -math.inf, upper: float = math.inf, scale: float = 1.0
    ) -> None:
        """The row lower <= term <= upper, all of it times `scale`."""
        self.row.append(np.full(len(term.column), len(self.lower), dtype=np.int64))
        self.column.append(term.column)
        self.value.append(term.value * scale)
        self.lower.append((lower + term.less) * scale)
        self.upper.append((upper + term.less) * scale)
        self.key.append(key)
        self.scale.append(scale)

    def variables(self, upper: Floats, *, integer: bool = False) -> Ints:
        """New variables of these upper bounds; their numbers."""
        index = self.n + np.arange(len(upper))
        self.added_upper.append(upper)
        self.added_integer += [integer] * len(upper)
        self.n += len(upper)
        return index


def row_scale(coefficients: Floats) -> float:
    """Brings a row's largest coefficient to 1, beside which solvers' tolerances are small."""
    largest = float(coefficients.max(initial=0.0))
    return min(1.0 / largest, _ROW_SCALE_MAX) if largest > 0 else 1.0
