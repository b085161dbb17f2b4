"""An evaluation for people: its tables, the same on the terminal and in Markdown. Each says what kind its figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coral_core.report.figures import figure, usd
from coral_core.report.plan_report import PlanTable, ratio_bar_text, restriction_text


def evaluation_tables(document: Mapping[str, Any]) -> list[PlanTable]:
    """Policies side by side, service by model, and each subject against the others beside the published ratio."""
    tables = [policies_table(document), models_table(document)]
    tables += [ratios_table(document, subject) for subject in document["ratios"]]
    return [table for table in tables if table.rows]


def policies_table(document: Mapping[str, Any]) -> PlanTable:
    """Cost as planned (means over epochs), service as simulated (means over seeds)."""
    return PlanTable(
        title="Policies: cost and shortfall predicted, goodput and attainment simulated, solve time measured",
        columns=(
            *("policy", "USD/h", "of it start-up", "billed USD/h", "goodput tokens/s", "95% interval", "attained"),
            *("attained but for hand-over", "planned shortfall", "instances", "mixed", "nodes", "solve s", "templates"),
        ),
        rows=[
            (
                name,
                usd(one["cost_usd_per_h"]),
                usd(one["startup_usd_per_h"]),
                None if one["billed_usd_per_h"] is None else usd(one["billed_usd_per_h"]),
                one["goodput_tokens_per_s"],
                interval_text(one["intervals"]["goodput_tokens_per_s"]),
                percent(one["attainment_frac"]),
                percent(one["without_handover_attainment_frac"]),
                percent(one["shortfall_frac"]),
                one["instances"],
                one["mixed_instances"],
                one["nodes"],
                one["solve_s"]["mean"],
                one["library_method"],
            )
            for name, one in document["policies"].items()
        ],
    )


def epochs_table(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> PlanTable:
    """Each epoch's plan, and how its requests were served (by the first seed)."""
    service = {
        (row["policy"], row["epoch"]): row
        for row in reversed(tables["service"])
        if row["model"] == "*" and row["epoch"] is not None
    }
    rows: list[tuple[object, ...]] = []
    for row in tables["epochs"]:
        served = service.get((row["policy"], row["epoch"]), {})
        rows.append(
            (
                row["policy"],
                row["epoch"],
                usd(row["cost_usd_per_h"]),
                usd(row["startup_usd_per_h"]),
                percent(row["shortfall_frac"]),
                *(row[name] for name in ("instances", "mixed_instances", "nodes", "solve_s")),
                served.get("goodput_tokens_per_s"),
                percent(served.get("attainment_frac")),
            )
        )
    return PlanTable(
        title="Epochs: cost and shortfall predicted, goodput and attainment simulated, solve time measured",
        columns=(
            *("policy", "epoch", "USD/h", "of it start-up", "planned shortfall", "instances", "mixed", "nodes"),
            *("solve s", "goodput tokens/s", "attained"),
        ),
        rows=rows,
    )


def models_table(document: Mapping[str, Any]) -> PlanTable:
    """Goodput and latencies by model, means over seeds."""
    return PlanTable(
        title="Service by model (simulated)",
        columns=(
            *("policy", "model", "offered tokens/s", "goodput tokens/s", "attained"),
            *("TTFT p50 s", "TTFT p95 s", "TPOT p50 s", "TPOT p95 s"),
        ),
        rows=[
            (
                name,
                model,
                row["offered_tokens_per_s"],
                row["goodput_tokens_per_s"],
                percent(row["attainment_frac"]),
                *(row[key] for key in ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s")),
            )
            for name, one in document["policies"].items()
            for model, row in one["models"].items()
        ],
    )


def ratios_table(document: Mapping[str, Any], subject: str) -> PlanTable:
    """How much dearer the others are and how much more goodput the subject has, beside what is published."""
    rows: list[tuple[object, ...]] = []
    for name, ratio in document["ratios"][subject].items():
        published = ratio["published"] or {}
        rows.append(
            (
                name,
                percent(document["policies"][name]["shortfall_frac"]),
                ratio["cost_ratio"],
                ratio_bar_text(ratio),
                ratio.get("cost_verdict"),
                published.get("cost_ratio"),
                ratio["goodput_ratio"],
                interval_text(ratio["intervals"]["goodput_ratio"]),
                published.get("goodput_ratio"),
                ratio["goodput_per_usd_ratio"],
            )
        )
    own = percent(document["policies"][subject]["shortfall_frac"])
    return PlanTable(
        title=(
            f"{subject} (worst planned shortfall {own}) against the others: their cost over its (predicted), "
            "its goodput over theirs (simulated)"
        ),
        columns=(
            *("policy", "planned shortfall", "cost ratio", "error bars", "cost verdict", "published cost ratio"),
            *("goodput ratio", "95% interval", "published goodput ratio", "goodput per USD ratio"),
        ),
        rows=rows,
    )


def evaluation_notes(document: Mapping[str, Any]) -> list[str]:
    """What a reader has to know beside the tables."""
    seeds = document["seeds"]
    notes = [
        f"epochs: {document['epochs']}; seeds: {', '.join(map(str, seeds))}",
        document["headroom_note"],
    ]
    if len(seeds) == 1:
        notes.append("one seed: no confidence interval")
    inputs = document["inputs"]
    if inputs.get("runtimes"):
        notes.append(f"only templates that {restriction_text(inputs['runtimes'])} can run are planned with")
    else:
        notes.append(
            "templates are planned with whether a runtime can run them or not: the scenario names no `runtimes`"
        )
    if all(isinstance(model["lengths"], Mapping) and "trace" in model["lengths"] for model in inputs["models"]):
        notes.append("all requests are of traces: seeds change nothing, and intervals over them say nothing")
    duration_s, startup_s = inputs["epochs"]["duration_s"], inputs["allocation"]["startup_s"]
    if document["epochs"] > 1 and duration_s < startup_s:
        notes.append(
            f"an epoch lasts {figure(duration_s)} s and a node takes {figure(startup_s)} s to start: what an epoch plans "
            "is up only after it is over"
        )
    short = [name for name, one in document["policies"].items() if one["shortfall_frac"] > 0]
    if short:
        notes.append(
            f"{', '.join(short)}: planned to leave demand unserved, so their cost is not that of the whole demand"
        )
    published = any(row["published"] for rows in document["ratios"].values() for row in rows.values())
    if published:
        notes.append(f"published ratios: {document['published_source']}")
    notes += [f"policy {name} failed and is in no figure: {why}" for name, why in document.get("failed", {}).items()]
    about: dict[str, list[str]] = {}
    for name, one in document["policies"].items():
        for note in one["notes"]:
            about.setdefault(note, []).append(name)
    notes += [f"{', '.join(names)}: {note}" for note, names in about.items()]
    return notes


def evaluation_markdown(document: Mapping[str, Any]) -> str:
    """The whole evaluation as Markdown."""
    parts = [f"# Evaluation of {document['scenario']}\n"]
    parts += [f"- {note}" for note in evaluation_notes(document)]
    for table in evaluation_tables(document):
        parts.append(f"\n## {table.title}\n")
        parts += [_line(table.columns), _line(["---"] * len(table.columns))]
        parts += [_line([figure(cell) for cell in row]) for row in table.rows]
    return "\n".join(parts) + "\n"


def interval_text(interval: Mapping[str, Any]) -> str:
    """`980 to 1,020`, or `-` where nothing is known of the spread."""
    if interval["low"] is None:
        return "-"
    return f"{figure(interval['low'])} to {figure(interval['high'])}"


def percent(value: float | None) -> str:
    """A share in percent, `-` where it is unknown."""
    return "-" if value is None else f"{value:.1%}"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
