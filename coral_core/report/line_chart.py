"""Line charts as one self-contained SVG: no script, no font, no library; light and dark as the reader's system is.

A reader without sight gets title and description; every point carries its figures as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from coral_core.errors import InputError

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 64, 40, 48
_HEAD: Final = 56
_TICKS: Final = 5

_STYLE: Final = """
:root { color-scheme: light dark; }
svg { --ink: #1c2733; --soft: #5b6875; --grid: #dfe4e9; --paper: #ffffff;
  --s0: #9fc3e8; --s1: #6aa1da; --s2: #3b7fc4; --s3: #1f5c9c; --s4: #0d3866; --mark: #b3540a; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8edf2; --soft: #a3afbb; --grid: #34404c; --paper: #14191f;
    --s0: #2f5f92; --s1: #4680bd; --s2: #6aa1da; --s3: #9fc3e8; --s4: #d3e6f8; --mark: #f2a25c; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 17px; font-weight: 600; } .panel { font-size: 13px; font-weight: 600; }
.soft { fill: var(--soft); } .paper { fill: var(--paper); }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke-width: 2; } .mark { fill: none; stroke: var(--mark); stroke-width: 2; }
"""
_SHADES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y) in order of x under one name; shades go from light to dark with the order of the series."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. `marked` is a point to ring, with what it stands for; `is_log` makes the y axis logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log: bool = False
    marked: tuple[float, float] | None = None
    mark_label: str = ""


def line_chart(title: str, panels: Sequence[Panel], *, columns: int, description: str) -> str:
    """The panels in rows of `columns`, as an SVG document.

    Raises InputError for values that are not finite or negative, for 0 on a logarithmic axis, and where there is nothing
    to draw.
    """
    if not panels or not all(panel.series and all(s.points for s in panel.series) for panel in panels):
        raise InputError("there is nothing to draw", where=f"chart {title!r}")
    for panel in panels:
        values = [value for series in panel.series for point in series.points for value in point]
        lowest = min(y for series in panel.series for _, y in series.points)
        if not all(map(math.isfinite, values)) or lowest < 0 or (panel.is_log and lowest == 0):
            raise InputError(f"cannot draw these values of {panel.y_label}", where=f"chart {title!r}")
    rows = -(-len(panels) // columns)
    width, height = columns * _WIDTH, _HEAD + rows * _HEIGHT
    body = [
        f'<g transform="translate({i % columns * _WIDTH} {_HEAD + i // columns * _HEIGHT})">{_panel(panel)}</g>'
        for i, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="chart-title chart-description">\n'
        f'<title id="chart-title">{escape(title)}</title>\n<desc id="chart-description">{escape(description)}</desc>\n'
        f'<style>{_STYLE}</style>\n<rect class="paper" width="{width}" height="{height}"/>\n'
        f'<text class="title" x="20" y="32">{escape(title)}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(panel: Panel) -> str:
    points = [point for series in panel.series for point in series.points]
    x_ticks = sorted({x for x, _ in points})
    y_ticks = _log_ticks(points) if panel.is_log else _linear_ticks(points)
    x_of = _scale(x_ticks[0], x_ticks[-1], _LEFT, _WIDTH - _RIGHT)
    y_of = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP, is_log=panel.is_log)
    parts = [f'<text class="panel" x="{_LEFT}" y="18">{escape(panel.title)}</text>']
    for y in y_ticks:
        at = y_of(y)
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>',
            f'<text class="soft" text-anchor="end" x="{_LEFT - 8}" y="{at + 4:.1f}">{_number(y)}</text>',
        ]
    bottom = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts += [
        f'<text class="soft" text-anchor="middle" x="{x_of(x):.1f}" y="{bottom + 18}">{_number(x)}</text>'
        for x in x_ticks
    ]
    middle_x, middle_y = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + bottom) / 2
    turned = f"translate(16 {middle_y}) rotate(-90)"
    parts += [
        f'<text text-anchor="middle" x="{middle_x}" y="{bottom + 38}">{escape(panel.x_label)}</text>',
        f'<text text-anchor="middle" transform="{turned}">{escape(panel.y_label)}</text>',
    ]
    free = math.inf
    for i in reversed(range(len(panel.series))):
        series = panel.series[i]
        shade = f"var(--s{_shade(i, len(panel.series))})"
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in series.points)
        parts.append(f'<polyline class="line" style="stroke: {shade}" points="{path}"/>')
        parts += [
            f'<circle style="fill: {shade}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5">'
            f"<title>{escape(f'{series.name}, {panel.x_label} {_number(x)}: {_number(y)} {panel.y_label}')}</title>"
            "</circle>"
            for x, y in series.points
        ]
        last_x, last_y = series.points[-1]
        if abs(y_of(last_y) - free) >= 12:  # where lines end together, the darkest one's name stands for them
            free = y_of(last_y)
            parts.append(f'<text x="{x_of(last_x) + 8:.1f}" y="{free + 4:.1f}">{escape(series.name)}</text>')
    if panel.marked is not None:
        x, y = x_of(panel.marked[0]), y_of(panel.marked[1])
        parts += [
            f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="8"/>',
            f'<text text-anchor="middle" x="{x:.1f}" y="{y - 14:.1f}">{escape(panel.mark_label)}</text>',
        ]
    return "".join(parts)


def _shade(index: int, count: int) -> int:
    return _SHADES - 1 if count == 1 else round(index * (_SHADES - 1) / (count - 1))


def _scale(low: float, high: float, start: float, end: float, *, is_log: bool = False) -> Callable[[float], float]:
    """Position of a value between two ends."""
    of = math.log10 if is_log else float
    span = of(high) - of(low)

    def position(value: float) -> float:
        return start + (of(value) - of(low)) / span * (end - start) if span else (start + end) / 2

    return position


def _linear_ticks(points: Sequence[tuple[float, float]]) -> list[float]:
    """Round numbers from 0 to the largest value or a little more."""
    highest = max(0.0, *(y for _, y in points)) or 1.0
    raw = highest / (_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _log_ticks(points: Sequence[tuple[float, float]]) -> list[float]:
    """Powers of ten around all values."""
    low = math.floor(math.log10(min(y for _, y in points)) + 1e-9)
    high = max(math.ceil(math.log10(max(y for _, y in points)) - 1e-9), low + 1)
    return [10.0**power for power in range(low, high + 1)]


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
