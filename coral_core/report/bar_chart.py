"""Bars of stacked parts as SVG, one under the other, each under its name: readable at the width of a phone.

Parts carry the letter that their legend gives them, so that none is told by its colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Final

from coral_core.errors import InputError
from coral_core.report.figures import figure
from coral_core.report.palette import STYLES
from coral_core.report.scales import linear_ticks, scale, shortened, tick_text

WIDTH: Final = 380
_LEFT, _RIGHT, _TOP, _ROW, _BAR, _FOOT = 8, 14, 6, 40, 16, 40
_LETTER_PX: Final = 12
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Parts of a bar by name, each at least 0; no parts where the value is unknown. `low` and `high` bound the whole."""

    name: str
    parts: dict[str, float]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """`keys` are all parts in the order of the legend; `guide` a value to compare with, and what it stands for."""

    title: str
    unit: str
    keys: tuple[str, ...]
    bars: tuple[Bar, ...]
    guide: tuple[float, str] | None = None


def letter(index: int) -> str:
    """The letter of the part at this place of the legend."""
    return LETTERS[index % len(LETTERS)]


def bar_words(chart: BarChart) -> str:
    """The chart in words: each bar's value, and of what it is made up."""
    texts = []
    for bar in chart.bars:
        if not bar.parts:
            texts.append(f"{bar.name}: unknown.")
            continue
        total = f"{bar.name}: {figure(float(sum(bar.parts.values())))} {chart.unit}"
        whole = ", ".join(f"{key} {figure(float(bar.parts[key]))}" for key in chart.keys if bar.parts.get(key))
        texts.append(f"{total} ({whole})." if len(chart.keys) > 1 and whole else f"{total}.")
    texts += [f"{chart.guide[1]}: {figure(chart.guide[0])} {chart.unit}."] if chart.guide else []
    return " ".join(texts)


def bar_svg(chart: BarChart) -> str:
    """The chart as an element of a page that has the style sheet; its title is the page's to write.

    Raises InputError where there is no bar, or for a value that is negative or no number.
    """
    where = f"chart {chart.title!r}"
    numbers = [value for bar in chart.bars for value in bar.parts.values()]
    if not chart.bars:
        raise InputError("there is nothing to draw", where=where)
    if not all(math.isfinite(value) and value >= 0 for value in numbers):
        raise InputError(f"cannot draw these values of {chart.unit}", where=where)
    ends = [sum(bar.parts.values()) for bar in chart.bars] + [bar.high for bar in chart.bars if bar.high is not None]
    ends += [chart.guide[0]] if chart.guide else []
    ticks = linear_ticks(max(ends))
    x_of = scale(0.0, ticks[-1], _LEFT, WIDTH - _RIGHT)
    head = _TOP + (14 if chart.guide else 0)
    bottom = head + _ROW * len(chart.bars) + 4
    parts: list[str] = []
    for tick in ticks:
        at = x_of(tick)
        anchor = "start" if tick == 0 else "end" if tick == ticks[-1] else "middle"
        parts += [
            f'<path class="grid" d="M{at:.1f} {head}V{bottom}"/>',
            f'<text class="soft" text-anchor="{anchor}" x="{at:.1f}" y="{bottom + 15}">{tick_text(tick)}</text>',
        ]
    parts.append(f'<text text-anchor="end" x="{WIDTH - _RIGHT}" y="{bottom + 32}">{escape(chart.unit)}</text>')
    if chart.guide:
        at = x_of(chart.guide[0])
        anchor = "end" if at > WIDTH / 2 else "start"
        parts += [
            f'<path class="guide" d="M{at:.1f} {head - 4}V{bottom}"/>',
            f'<text text-anchor="{anchor}" x="{at:.1f}" y="{head - 8}">{escape(chart.guide[1])}</text>',
        ]
    for row, bar in enumerate(chart.bars):
        parts += _bar(chart, bar, head + row * _ROW, x_of)
    words = escape(f"{chart.title}. {bar_words(chart)}", quote=True)
    height = bottom + _FOOT
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{words}">{"".join(parts)}</svg>'


def _bar(chart: BarChart, bar: Bar, top: float, x_of: Callable[[float], float]) -> list[str]:
    total = sum(bar.parts.values())
    value = figure(float(total)) if bar.parts else "unknown"
    parts = [
        f'<text class="value" x="{_LEFT}" y="{top + 14}">{escape(shortened(bar.name, 40))}</text>',
        f'<text class="value" text-anchor="end" x="{WIDTH - _RIGHT}" y="{top + 14}">{value}</text>',
    ]
    at, y = 0.0, top + 19
    for index, key in enumerate(chart.keys):
        part = bar.parts.get(key, 0.0)
        if not part:
            continue
        left, right = x_of(at), x_of(at + part)
        at += part
        width = max(right - left - 1.0, 0.6)
        label = (
            f'<text class="on" text-anchor="middle" x="{left + width / 2:.1f}" y="{y + 12.5}">{letter(index)}</text>'
            if len(chart.keys) > 1 and width >= _LETTER_PX
            else ""
        )
        tooltip = escape(f"{bar.name}, {key}: {figure(float(part))} {chart.unit}")
        parts.append(
            f'<g class="s{index % STYLES}"><rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" '
            f'fill="currentColor"><title>{tooltip}</title></rect>{label}</g>'
        )
    if bar.low is not None and bar.high is not None:
        low, high, middle = x_of(max(bar.low, 0.0)), x_of(bar.high), y + _BAR + 3
        parts.append(
            f'<path class="whisker" fill="none" d="M{low:.1f} {middle - 3}v6M{high:.1f} {middle - 3}v6'
            f'M{low:.1f} {middle}H{high:.1f}"/>'
        )
    return parts
