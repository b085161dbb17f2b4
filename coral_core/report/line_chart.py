"""Line charts as SVG: no script, no font, no library; light and dark as the reader's system is.

Lines differ by dashes and markers besides colour. A reader without sight gets the chart in words; points carry their
figures as tooltips. `panel_svg` is one pair of axes for a page that has the style sheet, `line_chart` a whole document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal

from coral_core.errors import InputError
from coral_core.report.figures import figure
from coral_core.report.palette import CHART_CSS, DASHES, STYLES, line_sample, marker, theme_css, turned
from coral_core.report.scales import linear_ticks, log_ticks, scale, shortened, tick_text

WIDTH, HEIGHT = 380, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 46
_UNTITLED: Final = 18
"""What the frame begins lower without a title in it."""
_GAP: Final = 24
_HEAD: Final = 64
_MOST_TICKS: Final = 8
_MOST_MARKERS: Final = 13
_FEW_MARKERS: Final = 4
_SIGN_PX: Final = 6.6
"""Width of a letter at the charts' size, a little generous."""

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y) in order of x under one name; y None is unknown and interrupts the line.

    `style` chooses colour, dashes and marker; without one it is the series' place among the others.
    """

    name: str
    points: tuple[Point, ...]
    style: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A line at one value of an axis, with what it stands for."""

    value: float
    label: str
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. `marked` is a point to ring, with what it stands for; `is_log` makes the y axis logarithmic.

    The x axis begins at 0 and ends at `x_end` where there is one, else it spans the points. `y_end` is the least that the
    y axis goes up to. With `is_brief` lines have few markers and points no tooltips: for pages of very many panels.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log: bool = False
    marked: tuple[float, float] | None = None
    mark_label: str = ""
    guides: tuple[Guide, ...] = ()
    x_end: float | None = None
    y_end: float = 0.0
    is_brief: bool = False


def line_chart(title: str, panels: Sequence[Panel], *, columns: int, description: str) -> str:
    """The panels in rows of `columns`, as an SVG document with its legend.

    Raises InputError for values that are infinite, not numbers or negative, for 0 on a logarithmic axis, and where there
    is nothing to draw.
    """
    if not panels:
        raise InputError("there is nothing to draw", where=f"chart {title!r}")
    styles = {series.name: _style(panel, i) for panel in panels for i, series in enumerate(panel.series)}
    rows = -(-len(panels) // columns)
    width, height = columns * (WIDTH + _GAP), _HEAD + rows * (HEIGHT + _GAP)
    legend, x = [], 20.0
    for name, style in styles.items():
        text = shortened(name, 40)
        legend.append(
            f'<g transform="translate({x:.0f} 46)">{line_sample(style)}<text x="42" y="10">{escape(text)}</text></g>'
        )
        x += 60 + _SIGN_PX * len(text)
    body = [
        f'<g transform="translate({i % columns * (WIDTH + _GAP)} {_HEAD + i // columns * (HEIGHT + _GAP)})">'
        f"{_panel(panel)}</g>"
        for i, panel in enumerate(panels)
    ]
    width = max(width, math.ceil(x))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="chart-title chart-description">\n'
        f'<title id="chart-title">{escape(title)}</title>\n<desc id="chart-description">{escape(description)}</desc>\n'
        f"<style>{theme_css(':root')}{CHART_CSS}</style>\n"
        f'<rect class="ground" width="{width}" height="{height}"/>\n'
        f'<text class="title" x="20" y="32">{escape(title)}</text>\n' + "\n".join([*legend, *body]) + "\n</svg>\n"
    )


def panel_svg(panel: Panel) -> str:
    """One panel as an element of a page, told in words to who does not see it. Raises InputError as `line_chart`.

    Its title is the page's to write: there, long names wrap.
    """
    words = escape(f"{panel.title}. {panel_words(panel)}", quote=True)
    return f'<svg class="chart" viewBox="0 {_UNTITLED} {WIDTH} {HEIGHT - _UNTITLED}" role="img" aria-label="{words}">{_panel(panel, has_title=False)}</svg>'


def panel_words(panel: Panel) -> str:
    """What the panel shows, in a sentence for each line: its ends, and its extremes where it has more than two points."""
    texts = [f"{panel.y_label} over {panel.x_label}."]
    for series in panel.series:
        known = [(x, y) for x, y in series.points if y is not None]
        if not known:
            texts.append(f"{series.name}: unknown.")
            continue
        ends = " to ".join(figure(y) for _, y in dict.fromkeys((known[0], known[-1])))
        values = [y for _, y in known]
        extremes = f" (between {figure(min(values))} and {figure(max(values))})" if len(known) > 2 else ""
        texts.append(f"{series.name}: {ends}{extremes}.")
    texts += [f"{guide.label}: {figure(guide.value)}." for guide in panel.guides]
    return " ".join(texts)


def _style(panel: Panel, index: int) -> int:
    style = panel.series[index].style
    return index if style is None else style


def _panel(panel: Panel, *, has_title: bool = True) -> str:
    points = _checked(panel)
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    y_values = [y for _, y in points] + [guide.value for guide in panel.guides if guide.axis == "y"]
    y_ticks = log_ticks(y_values) if panel.is_log else linear_ticks(max(panel.y_end, *y_values))
    y_of = scale(y_ticks[0], y_ticks[-1], bottom, _TOP, is_log=panel.is_log)
    x_ticks, x_of = _x_axis(panel, [x for series in panel.series for x, _ in series.points], right)
    parts = [f'<text class="panel" x="8" y="16">{escape(shortened(panel.title, 44))}</text>'] if has_title else []
    for y in y_ticks:
        at = y_of(y)
        parts += [
            f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>',
            f'<text class="soft" text-anchor="end" x="{_LEFT - 6}" y="{at + 4:.1f}">{tick_text(y)}</text>',
        ]
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    parts += [
        f'<text class="soft" text-anchor="middle" x="{x_of(x):.1f}" y="{bottom + 17}">{tick_text(x)}</text>'
        for x in x_ticks
    ]
    turned = f"translate(13 {(_TOP + bottom) / 2}) rotate(-90)"
    parts += [
        f'<text text-anchor="middle" x="{(_LEFT + right) / 2}" y="{bottom + 36}">{escape(panel.x_label)}</text>',
        f'<text text-anchor="middle" transform="{turned}">{escape(shortened(panel.y_label, 34))}</text>',
    ]
    parts += [_line(panel, i, x_of, y_of) for i in reversed(range(len(panel.series)))]
    parts += [_guide(guide, x_of, y_of) for guide in panel.guides]
    if panel.marked is not None:
        x, y = x_of(panel.marked[0]), y_of(panel.marked[1])
        parts += [
            f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="8"/>',
            (
                f'<text text-anchor="middle" x="{min(max(x, _LEFT + 28), right - 28):.1f}" y="{max(y - 13, 28):.1f}">'
                f"{escape(panel.mark_label)}</text>"
            ),
        ]
    return "".join(parts)


def _checked(panel: Panel) -> list[tuple[float, float]]:
    """All points that are known. Raises InputError where they cannot be drawn."""
    points = [(x, y) for series in panel.series for x, y in series.points if y is not None]
    where = f"chart {panel.title!r}"
    if not points:
        raise InputError("there is nothing to draw", where=where)
    numbers = [value for point in points for value in point] + [guide.value for guide in panel.guides]
    lowest = min(y for _, y in points)
    if not all(map(math.isfinite, numbers)) or lowest < 0 or (panel.is_log and lowest == 0):
        raise InputError(f"cannot draw these values of {panel.y_label}", where=where)
    return points


def _x_axis(panel: Panel, xs: Sequence[float], right: float) -> tuple[list[float], Callable[[float], float]]:
    if panel.x_end is not None:
        ticks = linear_ticks(panel.x_end)
        return ticks, scale(0.0, ticks[-1], _LEFT + 2, right - 12)
    distinct = sorted(set(xs))
    at = scale(distinct[0], distinct[-1], _LEFT + 12, right - 12)
    every = -(-len(distinct) // _MOST_TICKS)
    return distinct[::every], at


def _line(panel: Panel, index: int, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    series, style = panel.series[index], _style(panel, index)
    path, is_pen_down = [], False
    for x, y in series.points:
        if y is not None:
            path.append(f"{'L' if is_pen_down else 'M'}{x_of(x):.1f} {y_of(y):.1f}")
        is_pen_down = y is not None
    parts = [
        f'<path class="line" stroke="currentColor" stroke-dasharray="{DASHES[turned(style)]}" d="{"".join(path)}"/>',
    ]
    known = [(x, y) for x, y in series.points if y is not None]
    # Markers of lines that lie on each other are set off against each other.
    every = max(-(-len(known) // (_FEW_MARKERS if panel.is_brief else _MOST_MARKERS)), 1)
    for x, y in known[index % every :: every]:
        told = f"{series.name}, {panel.x_label} {tick_text(x)}: {figure(y)} {panel.y_label}"
        parts.append(marker(style, x_of(x), y_of(y), "" if panel.is_brief else escape(told)))
    return f'<g class="s{style % STYLES}">{"".join(parts)}</g>'


def _guide(guide: Guide, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    label, bottom, right = escape(shortened(guide.label, 30)), HEIGHT - _BOTTOM, WIDTH - _RIGHT
    if guide.axis == "y":
        at = y_of(guide.value)
        return (
            f'<path class="guide" d="M{_LEFT} {at:.1f}H{right}"/>'
            f'<text class="value" text-anchor="end" x="{right}" y="{at - 5:.1f}">{label}</text>'
        )
    at = x_of(guide.value)
    is_right = at > (_LEFT + right) / 2
    anchor, x = ("end", at - 5) if is_right else ("start", at + 5)
    return (
        f'<path class="guide" d="M{at:.1f} {_TOP - 12}V{bottom}"/>'
        f'<text text-anchor="{anchor}" x="{x:.1f}" y="{_TOP - 4}">{label}</text>'
    )
