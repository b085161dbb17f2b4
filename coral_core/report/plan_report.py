"""A plan for people: its tables, and the whole decision as Markdown. All figures are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coral_core.domain.allocation import SPARE_WEIGHT
from coral_core.report.figures import figure, stages_text, throughput_text, usd
from coral_core.report.plan_explained import limits_table, marginal_table, relaxation_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """A table under its title; figures are numbers or written out already."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]


def plan_tables(plan: Mapping[str, Any], decision: Mapping[str, Any], *, separator: str = " | ") -> list[PlanTable]:
    """What to rent, what changes where something runs already, how the demand is covered, and the baselines.

    `separator` stands between the stages of a template.
    """
    tables = [
        instances_table(plan, separator=separator),
        coverage_table(plan),
        baselines_table(plan, decision),
        runtimes_table(decision),
    ]
    return [table for table in (*tables[:1], changes_table(plan), *tables[1:]) if table.rows]


def headline(plan: Mapping[str, Any]) -> str:
    """Cost, what is not met, and how good the plan is proven to be: one line."""
    unmet = unmet_text(plan)
    met = "all demand met" if unmet == "none" else f"DEMAND NOT MET: {unmet}"
    proof = "proven" if plan["status"] == "optimal" else "NOT within the wished gap"
    preferred = plan.get("preference_usd_per_h", 0.0)
    counted = f" (preferences count as {usd(preferred)} USD/h more)" if preferred else ""
    return (
        f"{usd(plan['cost_usd_per_h'])} USD/h + {usd(plan['churn_usd_per_h'])} USD/h start-up{counted}; {met}; "
        f"bound {usd(plan['bound_usd_per_h'])} USD/h, gap {plan['gap_frac']:.3%} ({proof})"
    )


def instances_table(plan: Mapping[str, Any], *, separator: str = " | ") -> PlanTable:
    """One row per template and region, the total last."""
    items = plan["instances"]
    in_tokens = all(item["throughput_requests_per_s"] is None for item in items)
    rows: list[tuple[object, ...]] = [
        (
            item["model"],
            item.get("variant"),
            item["phase"],
            item["region"],
            "spot" if item.get("market") == "spot" else "on demand",
            item["count"],
            stages_text(item["stages"], separator),
            figure(item["throughput_tokens_per_s"]) if in_tokens else _throughput(item),
            usd(item["price_usd_per_h"]),
            usd(item["cost_usd_per_h"]),
            item["template"],
        )
        for item in items
    ]
    total = ("total", "", "", "", "", sum(item["count"] for item in items), "", "", "", usd(plan["cost_usd_per_h"]), "")
    each = "tokens/s each" if in_tokens else "throughput each"
    return PlanTable(
        title="Instances",
        columns=(
            *("model", "variant", "phase", "region", "market", "count", "layers on nodes"),
            *(each, "USD/h each", "USD/h all", "template"),
        ),
        rows=[*rows, total],
    )


def coverage_table(plan: Mapping[str, Any]) -> PlanTable:
    """Demand beside the capacity that the plan rents; none in plans that were recorded before there was one."""
    return PlanTable(
        title="Demand and capacity",
        columns=("model", "phase", "demand", "capacity", "unit", "used", "error bars"),
        rows=[
            (
                row["model"],
                row["phase"],
                row["demand"],
                row["capacity"],
                row["unit"],
                None if row["utilization_frac"] is None else f"{row['utilization_frac']:.1%}",
                error_bar_text(row),
            )
            for row in plan.get("coverage", ())
        ],
    )


def error_bar_text(row: Mapping[str, Any]) -> str | None:
    """Between which a capacity lies in nine of ten comparisons; None where no error is known, or none was recorded."""
    if not row["capacity"] or row.get("error_unknown_frac", 1.0) >= 1:
        return None
    high = row["capacity_high"]
    text = f"{figure(row['capacity_low'])} to {'?' if high is None else figure(high)}"
    return f"{text}, {row['error_unknown_frac']:.0%} unknown" if row["error_unknown_frac"] > 0 else text


def changes_table(plan: Mapping[str, Any]) -> PlanTable:
    """What to start, stop and keep; none where nothing runs yet."""
    changes = plan.get("changes", ())
    runs = any(change["running"] for change in changes)
    return PlanTable(
        title="Changes to what runs",
        columns=("change", "template", "region", "running", "planned"),
        rows=[
            (change_text(change["running"], change["planned"]), *(change[name] for name in _CHANGE))
            for change in (changes if runs else ())
        ],
    )


_CHANGE = ("template", "region", "running", "planned")


def change_text(running: int, planned: int) -> str:
    """`start 2`, `stop 1` or `keep`."""
    if planned == running:
        return "keep"
    return f"start {planned - running}" if planned > running else f"stop {running - planned}"


def baselines_table(plan: Mapping[str, Any], decision: Mapping[str, Any]) -> PlanTable:
    """The plan's cost beside the baselines', and whether the error bars of the capacities leave a winner."""
    own = plan["objective_usd_per_h"]
    comparisons = decision.get("comparisons", {})  # absent in plans that were recorded before there were any
    rows: list[tuple[object, ...]] = [("coral", usd(own), "1.000" if own else None, None, None, unmet_text(plan))]
    for name, result in sorted(decision["baselines"].items(), key=lambda item: item[1]["objective_usd_per_h"]):
        cost, beside = result["objective_usd_per_h"], comparisons.get(name, {})
        ratio = f"{cost / own:.3f}" if own else None
        rows.append((name, usd(cost), ratio, ratio_bar_text(beside), beside.get("cost_verdict"), unmet_text(result)))
    rows += [(name, None, None, None, None, reason) for name, reason in decision.get("baselines_left_out", {}).items()]
    return PlanTable(
        title="Cost beside the baselines",
        columns=("policy", "USD/h with start-up", "ratio to coral", "error bars", "verdict", "demand not met"),
        rows=rows,
    )


def ratio_bar_text(comparison: Mapping[str, Any]) -> str | None:
    """Between which a ratio of costs lies for all errors within their bars; None where it is not known, or was not recorded."""
    low, high = comparison.get("cost_ratio_low"), comparison.get("cost_ratio_high")
    return None if low is None or high is None else f"{low:.3f} to {high:.3f}"


def runtimes_table(decision: Mapping[str, Any]) -> PlanTable:
    """What plans cost that rely on certain runtimes alone; none in plans that were recorded before there was a choice."""
    document = decision.get("runtimes", {"restrictions": ()})
    return PlanTable(
        title="What may be relied on",
        columns=("runtimes", "templates", "USD/h with start-up", "against all templates", "demand not met"),
        rows=[
            (
                restriction_text(item["runtimes"])
                + (" (this plan)" if item["runtimes"] == document["allowed"] else ""),
                item["templates"],
                usd(item["objective_usd_per_h"]),
                None if item["runtimes"] is None else extra_text(item),
                unmet_text(item),
            )
            for item in document["restrictions"]
        ],
    )


def restriction_text(runtimes: Sequence[str] | None) -> str:
    """`vllm or coral`, or `all templates` where nothing is asked of them."""
    return "all templates" if runtimes is None else " or ".join(runtimes)


def extra_text(restriction: Mapping[str, Any]) -> str:
    """What a restriction costs beside a plan from all templates, in words; predicted, as all of a plan."""
    extra_usd_per_h, extra_frac = restriction["extra_usd_per_h"], restriction["extra_frac"]
    if extra_usd_per_h is None:
        return "less demand is met"
    share = "" if extra_frac is None else f" ({extra_frac:.1%})"
    return f"{usd(extra_usd_per_h)} USD/h{share} more" if extra_usd_per_h else "no more"


def unmet_text(answer: Mapping[str, Any]) -> str:
    """`none`, or which model and phase lacks which part of its demand, a spare for it, or instances of its floor."""
    missing = [
        f"{item['model']} {item['phase']} {unserved:.1%}"
        for item in answer["shortfall"]
        if (unserved := item["frac"] - item.get("spare_frac", 0.0)) > 0
    ]
    missing += [
        f"{item['model']} {item['phase']} would lose {item['spare_frac'] / SPARE_WEIGHT:.1%} with an instance"
        for item in answer["shortfall"]
        if item.get("spare_frac")
    ]
    missing += [
        f"{item['model']} {item['phase']} {item['instances']} instances below its floor"
        for item in answer.get("floor_deficit", ())
    ]
    return ", ".join(missing) or "none"


def plan_markdown(plan: Mapping[str, Any], decision: Mapping[str, Any]) -> str:
    """The report of a plan: what to rent, what it costs beside the baselines, why, and from which inputs."""
    lines = [
        f"# Plan for fleet `{plan['fleet']}`, scenario `{plan['scenario']}`",
        "",
        f"**{headline(plan)}**",
        "",
        f"Made {plan['created_at']} by `{plan['method']}`. All throughputs and costs are **predicted**, none measured.",
        *_listed("Notes", plan.get("notes", ())),
    ]
    for table in plan_tables(plan, decision):
        lines += ["", f"## {table.title}", "", *markdown_table(table.columns, table.rows)]
    explanation = decision["explanation"]
    lines += ["", "## Why", ""]
    for columns, rows in (limits_table(explanation), marginal_table(explanation)):
        lines += [*markdown_table(columns, rows), ""] if rows else ["No limit binds besides the demand itself.", ""]
    lines += [
        relaxation_text(explanation, plan),
        "",
        "## Inputs",
        "",
        *markdown_table(
            ("input", "value"),
            [
                ("library", f"{decision['library']['name']} version {decision['library']['version']}"),
                ("capacity sources", ", ".join(decision["capacity_sources"]) or "-"),
                ("code", decision["code_version"]),
                *((f"{name} (sha256)", value) for name, value in decision["input_hashes"].items()),
            ],
        ),
        "",
    ]
    return "\n".join(lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; pipes inside cells are escaped."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(figure(value).replace("|", "\\|") for value in row) + " |" for row in rows]
    return lines


def _listed(title: str, texts: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {text}" for text in texts)] if texts else []


def _throughput(item: Mapping[str, Any]) -> str:
    return throughput_text(item["throughput_tokens_per_s"], item["throughput_requests_per_s"])
