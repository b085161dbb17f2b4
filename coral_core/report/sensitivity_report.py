"""What N_max and rho buy, as charts: on a page, or as an SVG of its own. Solve times are measured, the rest predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coral_core.report.line_chart import Panel, Series, line_chart, panel_svg
from coral_core.report.page import Figure, Key

TITLE: Final = "What N_max and rho buy, and what they cost"
PUBLISHED: Final = (6, 12.0)
"""(N_max, rho) beyond which the publication saw no more goodput per USD."""

Point = Mapping[str, Any]


def sensitivity_chart(points: Sequence[Point]) -> str:
    """The points as an SVG document: a row per model; worth, templates and solve time over N_max, a line per rho."""
    return line_chart(TITLE, sensitivity_panels(points), columns=3, description=sensitivity_words(points))


def sensitivity_figure(points: Sequence[Point]) -> Figure | None:
    """The same as a figure of a page; None where no library has a template."""
    panels = sensitivity_panels(points)
    if not panels:
        return None
    names = dict.fromkeys((series.name, series.style or 0) for panel in panels for series in panel.series)
    return Figure(
        title=TITLE,
        kind="predicted; solve time measured",
        charts=tuple((panel.title, panel_svg(panel)) for panel in panels),
        keys=tuple(Key(name=name, style=style) for name, style in names),
        caption=sensitivity_words(points),
    )


def sensitivity_panels(points: Sequence[Point]) -> list[Panel]:
    """Three panels per model that has a template; models without one have no worth to draw."""
    panels = []
    drawn = [point for point in points if point["templates"]]
    rhos = sorted({point["rho"] for point in drawn})
    for model in dict.fromkeys(point["model"] for point in drawn):
        of_model = sorted((p for p in drawn if p["model"] == model), key=lambda point: point["n_max"])
        mark = _published(of_model)
        unit = "requests/s" if of_model[0]["phase"] == "aggregated" else "tokens/s"
        for title, label, is_log, column in (
            (f"{model} {of_model[0]['phase']}: best template", f"{unit} per USD/h", False, "best_per_usd"),
            (f"{model}: templates kept", "templates", True, "templates"),
            (f"{model}: solve time", "core seconds", True, "solve_core_s"),
        ):
            panels.append(
                Panel(
                    title=title,
                    x_label="N_max (nodes)",
                    y_label=label,
                    series=tuple(
                        Series(
                            name=f"rho {rho:g}",
                            points=tuple((float(p["n_max"]), float(p[column])) for p in of_model if p["rho"] == rho),
                            style=i,
                        )
                        for i, rho in enumerate(rhos)
                        if any(p["rho"] == rho for p in of_model)
                    ),
                    is_log=is_log,
                    marked=None if mark is None else (float(mark["n_max"]), float(mark[column])),
                    mark_label="published",
                )
            )
    return panels


def sensitivity_words(points: Sequence[Point]) -> str:
    """The chart in words: for each model how far the published setting is from the best of the sweep."""
    texts = []
    for model in dict.fromkeys(point["model"] for point in points):
        of_model = [point for point in points if point["model"] == model and point["best_per_usd"]]
        if not of_model:
            texts.append(f"{model}: no template at any setting.")
            continue
        best = max(of_model, key=lambda point: point["best_per_usd"])
        text = (
            f"{model} {best['phase']}: the best template gives {best['best_per_usd']:.4g} per USD/h at N_max "
            f"{best['n_max']}, rho {best['rho']:g}, from {best['templates']:,} templates in "
            f"{best['solve_core_s']:.2g} core seconds"
        )
        mark = _published(of_model)
        if mark is not None:
            text += (
                f"; the published setting gives {mark['best_per_usd'] / best['best_per_usd']:.1%} of it, from "
                f"{mark['templates']:,} templates in {mark['solve_core_s']:.2g} core seconds"
            )
        texts.append(text + ".")
    return " ".join(texts)


def _published(points: Sequence[Point]) -> Point | None:
    return next((point for point in points if (point["n_max"], point["rho"]) == PUBLISHED), None)
