"""The lever table for people: one table for each rate and supply on the terminal, one for each supply in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coral_core.report.bar_chart import Bar, BarChart, bar_svg
from coral_core.report.evaluation_report import percent
from coral_core.report.figures import figure, usd
from coral_core.report.page import Figure, Page, Section, render_page
from coral_core.report.plan_report import PlanTable

Row = Mapping[str, Any]


def lever_tables(document: Mapping[str, Any]) -> list[PlanTable]:
    """A table for each rate and supply, in the order of the rows."""
    return [
        PlanTable(
            title=f"{rate:g} requests/s of each model, {supply} supply",
            columns=(
                *("plan", "USD/h with start-up", "ratio to homo_joint", "not met", "goodput", "attained"),
                *("USD per million good tokens", "solve s", "gap"),
            ),
            rows=[_full_row(row) for row in rows],
        )
        for (rate, supply), rows in _groups(document)
    ]


def lever_notes(document: Mapping[str, Any]) -> list[str]:
    """What holds for all rows."""
    run = document["run"]
    kinds = (
        "cost, ratio and demand not met (mean over the models) are predicted; goodput (share of the tokens offered) and "
        "attainment are simulated; solve times are measured"
    )
    notes = [kinds]
    if run["seeds"]:
        seeds = ", ".join(map(str, run["seeds"]))
        notes.append(f"{run['simulated_s'] / 60:g} simulated minutes for each of the seeds {seeds}")
    else:
        notes.append("nothing was simulated")
    if "scarce" in run["supplies"]:
        notes.append(
            f"scarce: {run['memory_frac']:g} x the GPU memory of the published plan at the same rate and ample supply; "
            "the same nodes for all rows, half of each kind on the spot market where that is a lever"
        )
    notes += [f"spot: {source}" for source in document["spot_sources"]]
    notes.append(f"with spot nodes, on-demand nodes can serve at least {document['on_demand_frac']:.0%} of the demand")
    several = {name: variants for name, variants in document["variants"].items() if len(variants) > 1}
    notes.append("variants: " + ("; ".join(f"{name} {', '.join(few)}" for name, few in several.items()) or "no others"))
    unproven = [row for row in document["rows"] if row.get("status") == "gap"]
    if unproven:
        shown = "; ".join(
            f"{row['name']}, {row['requests_per_s']:g} requests/s, {row['supply']} ({percent(row['gap_frac'])})"
            for row in unproven
        )
        notes.append(f"not proven within the time limit, so that a better plan may exist (gap of the cost): {shown}")
    for row in document["rows"]:
        if "failed" in row:
            notes.append(f"{row['name']}, {row['requests_per_s']:g} requests/s, {row['supply']}: {row['failed']}")
    return notes


def lever_markdown(document: Mapping[str, Any]) -> str:
    """One Markdown table for each supply, a group of columns for each rate, and the notes."""
    groups = _groups(document)
    parts: list[str] = []
    for supply in dict.fromkeys(supply for (_, supply), _ in groups):
        rates = {rate: rows for (rate, of), rows in groups if of == supply}
        columns = [f"{name}, {rate:g} req/s" for rate in rates for name in ("USD/h", "ratio", "not met", "goodput")]
        parts += [f"**{supply} supply**", ""]
        parts += [_line(["plan", *columns]), _line(["---", *["---:"] * len(columns)])]
        for rows in zip(*rates.values(), strict=True):
            parts.append(_line([rows[0]["name"], *(cell for row in rows for cell in _short_row(row))]))
        parts.append("")
    return "\n".join([*parts, *(f"- {note}" for note in lever_notes(document)), ""])


def lever_page(document: Mapping[str, Any], *, time: str) -> str:
    """Charts of the costs and all tables as one HTML page. Raises InputError where jinja2 is not installed."""
    return render_page(
        Page(
            title=f"What each lever is worth: {document['scenario']}",
            subtitle=f"Coral {document['code_version']}, {time}",
            tiles=(),
            warnings=(),
            notes=tuple(lever_notes(document)),
            sections=(
                Section(
                    ident="costs",
                    title="Cost",
                    text="USD/h with start-up of each plan. Where demand is not met in full, less was bought.",
                    blocks=(
                        Figure(
                            title="Cost by plan",
                            kind="predicted",
                            charts=tuple((chart.title, bar_svg(chart)) for chart in lever_charts(document)),
                            in_pairs=True,
                        ),
                    ),
                ),
                Section(ident="tables", title="Tables", text="", blocks=tuple(lever_tables(document))),
            ),
            footer="Nothing here was measured on GPUs.",
        )
    )


def lever_charts(document: Mapping[str, Any]) -> list[BarChart]:
    """USD/h by plan, a chart for each rate and supply; a plan that failed has no bar's length."""
    return [
        BarChart(
            title=f"{rate:g} requests/s, {supply} supply (predicted)",
            unit="USD/h",
            keys=("USD/h with start-up",),
            bars=tuple(
                Bar(
                    name=row["name"],
                    parts={} if "cost_usd_per_h" not in row else {"USD/h with start-up": row["cost_usd_per_h"]},
                )
                for row in rows
            ),
        )
        for (rate, supply), rows in _groups(document)
    ]


def _groups(document: Mapping[str, Any]) -> list[tuple[tuple[float, str], list[Row]]]:
    found: dict[tuple[float, str], list[Row]] = {}
    for row in document["rows"]:
        found.setdefault((row["requests_per_s"], row["supply"]), []).append(row)
    return list(found.items())


def _full_row(row: Row) -> tuple[object, ...]:
    if "cost_usd_per_h" not in row:
        return (row["name"], *[None] * 8)
    return (
        row["name"],
        usd(row["cost_usd_per_h"]),
        row["ratio_to_homo_joint"],
        _not_met(row),
        percent(row.get("goodput_frac")),
        percent(row.get("attainment_frac")),
        row.get("usd_per_million_good_tokens"),
        row["solve_s"],
        f"{row['gap_frac']:.2%}",
    )


def _short_row(row: Row) -> list[str]:
    if "cost_usd_per_h" not in row:
        return ["failed", "-", "-", "-"]
    ratio = row["ratio_to_homo_joint"]
    return [
        usd(row["cost_usd_per_h"]),
        "-" if ratio is None else f"{ratio:.3f}",
        _not_met(row),
        percent(row.get("goodput_frac")),
    ]


def _not_met(row: Row) -> str:
    return "none" if row["not_served_frac"] == 0 else percent(row["not_served_frac"])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(figure(cell) for cell in cells)} |"
