"""A plan for people: its rows as a table, and the whole decision as Markdown. All figures are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLAN_COLUMNS = ("region", "model", "phase", "template", "count", "nodes", "layers per stage", "each", "USD/h")


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """One row per (template, region) of a plan document, in the order of `PLAN_COLUMNS`."""
    return [
        (
            item["region"],
            item["model"],
            item["phase"],
            item["template"],
            item["count"],
            nodes_text(item["nodes"]),
            stages_text(item["stages"]),
            throughput_text(item),
            item["cost_usd_per_h"],
        )
        for item in plan["instances"]
    ]


def nodes_text(nodes: Mapping[str, int]) -> str:
    """`2 x 1xL4 + 4xL40S`."""
    return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in sorted(nodes.items()))


def stages_text(stages: Sequence[Mapping[str, Any]]) -> str:
    """`26 on 1xL40S | 14 on 1xL4, 1xL4`: layers of each stage and the nodes that hold them."""
    return " | ".join(f"{stage['layers']} on {', '.join(stage['nodes'])}" for stage in stages)


def throughput_text(item: Mapping[str, Any]) -> str:
    """One instance's throughput in the unit of its phase."""
    if item["throughput_requests_per_s"] is not None:
        return f"{item['throughput_requests_per_s']:,.3g} requests/s"
    return f"{item['throughput_tokens_per_s']:,.0f} tokens/s"


def cost_rows(plan: Mapping[str, Any], decision: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """The plan's cost beside the baselines: (name, USD/h, ratio to the plan, demand not met)."""
    own = plan["objective_usd_per_h"]
    rows: list[tuple[object, ...]] = [("coral", own, 1.0 if own else None, shortfall_text(plan["shortfall"]))]
    for name, result in decision["baselines"].items():
        cost = result["objective_usd_per_h"]
        rows.append((name, cost, cost / own if own else None, shortfall_text(result["shortfall"])))
    return rows


def shortfall_text(shortfall: Sequence[Mapping[str, Any]]) -> str:
    """`none`, or which model and phase lacks which part of its demand."""
    missing = [f"{item['model']} {item['phase']} {item['frac']:.1%}" for item in shortfall if item["frac"] > 0]
    return ", ".join(missing) or "none"


def plan_markdown(plan: Mapping[str, Any], decision: Mapping[str, Any]) -> str:
    """The report of a plan: what to rent, what it costs beside the baselines, why, and from which inputs."""
    proof = (
        f"proven within {plan['gap_frac']:.2%} of the optimum"
        if plan["status"] == "optimal"
        else f"**not proven optimal**: at most {plan['gap_frac']:.2%} above the optimum"
    )
    cost = (
        f"**{plan['cost_usd_per_h']:.2f} USD/h** provisioning + {plan['churn_usd_per_h']:.2f} USD/h start-up; "
        f"bound {plan['bound_usd_per_h']:.2f} USD/h, {proof}. Demand not met: {shortfall_text(plan['shortfall'])}."
    )
    lines = [
        f"# Plan for fleet `{plan['fleet']}`, scenario `{plan['scenario']}`",
        "",
        f"Made {plan['created_at']} by `{plan['method']}`. All throughputs and costs are **predicted**, none measured.",
        "",
        cost,
        "",
        "## Instances",
        "",
        *markdown_table(PLAN_COLUMNS, plan_rows(plan)),
        "",
        "## Cost beside the baselines",
        "",
        *markdown_table(("policy", "USD/h with start-up", "ratio", "demand not met"), cost_rows(plan, decision)),
        "",
        "## Why",
        "",
        *_why_lines(decision["explanation"]),
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
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return lines


def _why_lines(explanation: Mapping[str, Any]) -> list[str]:
    binding = explanation["binding"]
    if not binding:
        return ["No limit binds besides the demand itself."]
    return [f"- {item['family']}: {item['what']}" for item in binding]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "\\|")
