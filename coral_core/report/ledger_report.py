"""The ledger for people: how wrong predictions were, the worst first, as tables, Markdown and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coral_core.report.bar_chart import Bar, BarChart, bar_svg
from coral_core.report.evaluation_report import percent
from coral_core.report.figures import figure
from coral_core.report.page import Figure, Page, Section, render_page
from coral_core.report.plan_report import PlanTable

_METRICS: Final = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "layer_time_s": "layer time",
    "latency_s": "whole latency",
    "prompt_s": "prompt time",
}


def ledger_tables(document: Mapping[str, Any]) -> list[PlanTable]:
    """What is aimed at and what was found by group, then every entry."""
    return [
        PlanTable(
            title="Groups (predicted against measured)",
            columns=("group", "metric", "n", "median error", "90th", "aim", "met"),
            rows=[
                (
                    row["group"],
                    _METRICS[row["metric"]],
                    row["n"],
                    percent(row["median_abs_error_frac"]),
                    percent(row["p90_abs_error_frac"]),
                    percent(row["target_median_frac"]),
                    {None: "-", True: "yes", False: "NO"}[row["met"]],
                )
                for row in document["targets"]
            ],
        ),
        PlanTable(
            title="Entries, the worst first (predicted against measured)",
            columns=("model", "GPU", "phase", "metric", "measured by", "n", "median error", "90th", "bias"),
            rows=[
                (
                    row["model"],
                    row["gpu"],
                    row["phase"],
                    _METRICS[row["metric"]],
                    row["engine"] or "kernels",
                    row["n"],
                    percent(row["median_abs_error_frac"]),
                    percent(row["p90_abs_error_frac"]),
                    f"{row['median_error_frac']:+.0%}",
                )
                for row in document["entries"]
            ],
        ),
    ]


def ledger_notes(document: Mapping[str, Any]) -> list[str]:
    """How the figures came about, and what was left out."""
    folds = (
        "no model is scored with costs fitted to its own runs (k-fold over models); layer times take one factor per GPU and "
        "phase from the other model, while L4, T4, V100 and A100-40 have GEMM factors fitted to single GPUs of one of the two"
    )
    queues = (
        f"{document['queue_bound_runs_left_out']} runs left out because they measure a queue: TTFT more than 5 times "
        "that of their series at the lowest concurrency"
    )
    general = "error: |predicted / measured - 1|; bias: its median with sign"
    how = [folds, queues] if document["held_out"] else ["predicted with the factors that ship"]
    return [general, *how, *(f"left out, {reason}: {count}" for reason, count in document["left_out"].items())]


def ledger_markdown(document: Mapping[str, Any]) -> str:
    """Both tables and the notes as Markdown."""
    parts: list[str] = []
    for table in ledger_tables(document):
        parts += [f"**{table.title}**", "", _line(table.columns), _line(["---"] * len(table.columns))]
        parts += [*map(_line, table.rows), ""]
    return "\n".join([*parts, *(f"- {note}" for note in ledger_notes(document)), ""])


def ledger_charts(document: Mapping[str, Any]) -> list[BarChart]:
    """The median error of every entry, a chart for each metric, the worst first."""
    charts = []
    for metric in dict.fromkeys(row["metric"] for row in document["entries"]):
        rows = [row for row in document["entries"] if row["metric"] == metric]
        charts.append(
            BarChart(
                title=f"{_METRICS[metric]}: median error (predicted against measured)",
                unit="%",
                keys=("median error",),
                bars=tuple(
                    Bar(name=_bar_name(row), parts={"median error": 100 * row["median_abs_error_frac"]}) for row in rows
                ),
            )
        )
    return charts


def _bar_name(row: Mapping[str, Any]) -> str:
    """Short enough to be shown whole: only layer times have several phases, and only whole engines a name."""
    phase = row["phase"] if row["metric"] == "layer_time_s" else ""
    return f"{', '.join(filter(None, (row['model'], row['gpu'], phase, row['engine'])))} (n = {row['n']})"


def ledger_page(document: Mapping[str, Any], *, time: str) -> str:
    """Charts and tables as one HTML page. Raises InputError where jinja2 is not installed."""
    return render_page(
        Page(
            title="How wrong predictions are",
            subtitle=time,
            tiles=(),
            warnings=(),
            notes=tuple(ledger_notes(document)),
            sections=(
                Section(
                    ident="errors",
                    title="Errors",
                    text="Median relative error by model, GPU and phase, the worst first.",
                    blocks=(
                        Figure(
                            title="Median error",
                            kind="predicted against measured",
                            charts=tuple((chart.title, bar_svg(chart)) for chart in ledger_charts(document)),
                            in_pairs=True,
                        ),
                    ),
                ),
                Section(ident="tables", title="Tables", text="", blocks=tuple(ledger_tables(document))),
            ),
            footer="Measured figures are other people's runs; nothing here was measured by Coral."
            if document["held_out"]
            else "Measured figures are the runs and profiles that were given.",
        )
    )


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(figure(cell) for cell in cells)} |"
