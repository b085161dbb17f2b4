"""Why a plan is what it is, for people: what binds, what the next tokens cost, why a template is in the plan or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coral_core.allocation.explain import volume_price
from coral_core.report.figures import figure, usd

Table = tuple[tuple[str, ...], list[tuple[object, ...]]]

_FAMILIES = {
    "capacity": "nodes to be had",
    "floor": "least instances",
    "cap": "most instances",
    "budget": "budget in USD/h",
    "quota": "quota that nodes share",
    "on_demand": "share served without spot nodes",
    "region_demand": "share served in a region",
    "redundancy": "share left after a loss",
    "pd_same_region": "share served by pairs in one region",
    "exclusion": "excluded",
}


def limits_table(explanation: Mapping[str, Any]) -> Table:
    """The limits that hold the plan back, and what moving each by one would save; no rows where none does."""
    columns = ("limit", "used of limit", "one more would save USD/h")
    rows: list[tuple[object, ...]] = [
        (_FAMILIES.get(item["family"], item["family"]), item["what"], usd(item["shadow_usd_per_h"]))
        for item in explanation["binding"]
    ]
    return columns, rows


def marginal_table(explanation: Mapping[str, Any]) -> Table:
    """What more of each model and phase would cost; `-` where no more is to be had at any price."""
    rows: list[tuple[object, ...]] = []
    for cost in explanation["marginal_costs"]:
        price, unit = volume_price(cost["usd_per_h_per_unit"], in_requests=cost["unit"] == "request/s")
        missing = cost["missing_frac"]
        met = missing == 0
        rows.append((cost["model"], cost["phase"], figure(price) if met else None, unit, f"{missing:.1%}"))
    return ("model", "phase", "the next costs", "unit", "demand not met"), rows


def relaxation_text(explanation: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Where these prices come from, and why they add up to less than the plan."""
    counted = " and preferences" if plan.get("preference_usd_per_h") else ""
    return (
        "These prices are those of a relaxation that may rent fractions of an instance, so it pays for exactly what is "
        f"asked: {usd(explanation['relaxed_objective_usd_per_h'])} USD/h. The plan rents whole instances and costs "
        f"{usd(plan['objective_usd_per_h'])} USD/h with start-up{counted}; with whole instances nothing costs less than "
        f"{usd(plan['bound_usd_per_h'])} USD/h."
    )


def template_facts(answer: Mapping[str, Any]) -> list[tuple[str, object]]:
    """What is known about one template, named for people; its reasons are sentences already."""
    in_requests = answer["template"].startswith("a-")
    facts: list[tuple[str, object]] = [
        (f"instances in {region}", count) for region, count in answer["chosen_count"].items()
    ]
    for region, value in answer["reduced_cost_usd_per_h"].items():
        facts.append((f"one more in {region} adds, in the relaxation", f"{usd(value)} USD/h"))
    facts += [(f"{region} lacks", ", ".join(configs)) for region, configs in answer["unavailable"].items()]
    facts += [("equalled with no more nodes by", answer["dominated_by"])] if answer["dominated_by"] else []
    for what, rate, name in (
        ("its price", answer["usd_per_h_per_unit"], ""),
        ("cheaper and chosen", answer["cheaper_usd_per_h_per_unit"], answer["cheaper_chosen"]),
    ):
        if rate is not None:
            price, unit = volume_price(rate, in_requests=in_requests)
            facts.append((what, f"{name} {figure(price)} {unit}".strip()))
    return facts
