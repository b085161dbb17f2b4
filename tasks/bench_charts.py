"""Charts of time against size, for the library and the allocation; all figures are measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coral_core.report.figures import figure
from coral_core.report.line_chart import Panel, Series, line_chart

Points = Sequence[Mapping[str, Any]]


def library_chart(scenario: str, growth: Points) -> str:
    """Combinations, time and memory of a build against N_max, from `LibraryBench.growth`; an SVG document."""
    panels = [
        _panel("combinations and templates", "thousands", growth, combinations=1e-3, templates_kept=1e-3),
        _panel("time of a build with commit", "seconds", growth, wall_s=1.0, build_core_s=1.0, solve_core_s=1.0),
        _panel("peak memory of the processes", "MiB", growth, peak_memory_bytes=2.0**-20),
    ]
    last = growth[-1]
    return line_chart(
        f"Library of {scenario}: time against size (measured)",
        panels,
        columns=3,
        description=(
            f"At N_max {last['n_max']}: {last['combinations']:,} combinations, {last['templates_kept']:,} templates kept, "
            f"{figure(last['wall_s'])} s, {figure(last['build_core_s'])} core seconds."
        ),
    )


def allocation_chart(scenario: str, growth: Points, over_time: Points) -> str:
    """Solve time against models, a line for each number of regions; and the proven gap against the time limit.

    From `bench_allocation`'s `growth` and `gap_over_time`, of which one may be empty; an SVG document.
    """
    panels, texts = [], []
    if growth:
        regions = sorted({point["regions"] for point in growth})
        panels = [
            Panel(
                title=title,
                x_label="models",
                y_label="seconds",
                series=tuple(
                    Series(name=f"{number} regions", points=_line(growth, "models", key, regions=number))
                    for number in regions
                ),
                is_log=True,
            )
            for title, key in (("time of a solve", "solve_s"), ("core seconds of a solve", "solve_core_s"))
        ]
        last = growth[-1]
        texts.append(f"{last['models']} models in {last['regions']} regions: {figure(last['solve_s'])} s.")
    if over_time:
        seeds = over_time[0]["seeds"]
        panels.append(
            Panel(
                title=f"gap proven within a time limit, {seeds} seeds",
                x_label="time limit (s)",
                y_label="gap (%)",
                series=tuple(
                    Series(name=name, points=_line(over_time, "time_limit_s", key, factor=100.0))
                    for name, key in (("median", "median_gap_frac"), ("worst", "worst_gap_frac"))
                ),
            )
        )
        last = over_time[-1]
        texts.append(
            f"Within {figure(last['time_limit_s'])} s: median gap {last['median_gap_frac']:.3%}, "
            f"worst {last['worst_gap_frac']:.3%}."
        )
    return line_chart(
        f"Allocation of {scenario}: time against size (measured)",
        panels,
        columns=min(3, len(panels)),
        description=" ".join(texts),
    )


def _panel(title: str, y_label: str, points: Points, **factor_of: float) -> Panel:
    lines = {key: _line(points, "n_max", key, factor=factor) for key, factor in factor_of.items()}
    return Panel(
        title=title,
        x_label="N_max (nodes)",
        y_label=y_label,
        series=tuple(Series(name=_words(key), points=line) for key, line in lines.items()),
        is_log=all(y > 0 for line in lines.values() for _, y in line),
    )


def _words(key: str) -> str:
    return {
        "combinations": "combinations",
        "templates_kept": "templates kept",
        "wall_s": "wall",
        "build_core_s": "all cores together",
        "solve_core_s": "of it placing",
        "peak_memory_bytes": "peak memory",
    }[key]


def _line(
    points: Points, x_key: str, y_key: str, *, factor: float = 1.0, **only: int
) -> tuple[tuple[float, float], ...]:
    chosen: Callable[[Mapping[str, Any]], bool] = lambda point: all(point[k] == v for k, v in only.items())  # noqa: E731
    return tuple((float(point[x_key]), factor * float(point[y_key])) for point in points if chosen(point))
