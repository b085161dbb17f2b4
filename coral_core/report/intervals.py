"""Means over seeds and their confidence intervals (Student's t, two-sided 95%)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE_FRAC: Final = 0.95

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom, from the standard table.
_T975: Final = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_Z975: Final = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Mean of `n` values; the bounds are None where one value (or none that is finite) says nothing of the spread."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


def student_t975(freedom: int) -> float:
    """The 97.5% quantile of Student's t: a table to 30 degrees of freedom, its expansion around the normal beyond."""
    if freedom < 1:
        raise ValueError("degrees of freedom start at 1")
    if freedom <= len(_T975):
        return _T975[freedom - 1]
    z = _Z975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float | None]) -> Interval:
    """Mean and 95% confidence interval of the values; unknown where one of them is (unknown is never zero)."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    n = len(known)
    if n == 0 or n < len(values):
        return Interval(mean=None, low=None, high=None, n=n)
    mean = sum(known) / n
    if n == 1:
        return Interval(mean=mean, low=None, high=None, n=1)
    spread = math.sqrt(sum((value - mean) ** 2 for value in known) / (n - 1) / n)
    half = student_t975(n - 1) * spread
    return Interval(mean=mean, low=mean - half, high=mean + half, n=n)
