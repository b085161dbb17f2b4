"""A profile's measured times against the size of a step, as SVG."""

from __future__ import annotations

from itertools import count

from coral_core.domain.workload import Phase
from coral_core.perf.profile import Profile, ProfilePoint
from coral_core.report.line_chart import Panel, Series, line_chart
from coral_core.units import MS

_AXES = {Phase.PREFILL: ("prefill", "prompt tokens in the step"), Phase.DECODE: ("decode", "requests in the step")}


def profile_chart(profile: Profile) -> str:
    """Milliseconds of a layer: prefill against the step's prompt tokens, decode against its requests, a line for each TP and length."""
    panels: list[Panel] = []
    styles = count()  # over both panels: they share the legend
    for phase, (title, x_label) in _AXES.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in sorted(profile.points, key=lambda one: (one.tp, one.requests, one.tokens)):
            if point.phase is phase:
                lines.setdefault(_name(point), []).append((_size(point), point.layer_s / MS))
        if lines:
            series = tuple(
                Series(name=name, points=tuple(sorted(points)), style=next(styles)) for name, points in lines.items()
            )
            panels.append(Panel(title=title, x_label=x_label, y_label="ms per layer", series=series))
    key = profile.key
    return line_chart(
        f"{key.model} on {key.config}, {key.engine_name} (measured)",
        panels,
        columns=2,
        description=f"{len(profile.points)} measured times of one layer. {profile.source}",
    )


def _size(point: ProfilePoint) -> float:
    return point.requests * point.tokens if point.phase is Phase.PREFILL else point.requests


def _name(point: ProfilePoint) -> str:
    if point.phase is Phase.PREFILL:
        return f"TP {point.tp}, {point.requests:g} prompts"
    return f"TP {point.tp}, context {point.tokens:g}"
