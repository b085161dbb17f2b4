"""From values to places on an axis, and the round values that stand beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from coral_core.report.figures import figure


def scale(low: float, high: float, start: float, end: float, *, is_log: bool = False) -> Callable[[float], float]:
    """Place of a value between two ends; all values are in the middle where the ends are one."""
    of = math.log10 if is_log else float
    span = of(high) - of(low)

    def place(value: float) -> float:
        return start + (of(value) - of(low)) / span * (end - start) if span else (start + end) / 2

    return place


def linear_ticks(highest: float, *, most: int = 5) -> list[float]:
    """Round numbers from 0 to the highest value or a little more."""
    highest = max(highest, 0.0) or 1.0
    raw = highest / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def log_ticks(values: Iterable[float]) -> list[float]:
    """Powers of ten around all values."""
    found = list(values)
    low = math.floor(math.log10(min(found)) + 1e-9)
    high = max(math.ceil(math.log10(max(found)) - 1e-9), low + 1)
    return [10.0**power for power in range(low, high + 1)]


def tick_text(value: float) -> str:
    """A tick's number, as short as it is exact."""
    return f"{value:,.0f}" if value == int(value) else figure(value)


def shortened(text: str, most: int) -> str:
    """The text, its middle left out where it is longer than `most` characters: names differ at both ends."""
    if len(text) <= most:
        return text
    head = (most - 1 + 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
