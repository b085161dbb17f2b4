"""The page of a plan: what to rent, where, at what cost, and why it is so. All figures are predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from coral_core.report.bar_chart import Bar, BarChart, bar_svg, letter
from coral_core.report.figures import figure, usd
from coral_core.report.page import (
    Block,
    Figure,
    Key,
    Page,
    Section,
    Tile,
    ident_of,
    render_page,
)
from coral_core.report.pipelines import pipelines_of
from coral_core.report.plan_explained import limits_table, marginal_table, relaxation_text
from coral_core.report.plan_report import (
    PlanTable,
    baselines_table,
    changes_table,
    coverage_table,
    instances_table,
    runtimes_table,
    unmet_text,
)
from coral_core.report.region_map import map_svg, spots

Document = Mapping[str, Any]

PREDICTED: Final = "predicted"
_MOST_PIPELINES: Final = 200
_MOST_BARS: Final = 30


def plan_html(plan: Document, decision: Document) -> str:
    """One self-contained HTML file. Raises InputError where jinja2 is not installed."""
    return render_page(plan_page(plan, decision))


def plan_page(plan: Document, decision: Document) -> Page:
    """The page's content, of the documents as they are recorded."""
    sections: list[tuple[str, str, Sequence[Block]]] = [
        ("Pipelines", _PIPELINES, _pipelines(plan)),
        ("Cost", "", _costs(plan, decision)),
        ("Demand and capacity", _CAPACITY, _capacity(plan)),
        ("Regions", "", _regions(plan)),
        ("Why", _why(plan, decision["explanation"]), _reasons(decision["explanation"])),
        ("Instances", "", [instances_table(plan), *_filled(changes_table(plan))]),
        ("Inputs", _INPUTS, [_inputs(decision)]),
    ]
    return Page(
        title=f"Plan for fleet {plan['fleet']}",
        subtitle=f"Scenario {plan['scenario']}, made {plan['created_at']} by {plan['method']}.",
        tiles=tuple(_tiles(plan)),
        warnings=tuple(_warnings(plan)),
        notes=tuple(plan.get("notes", ())),
        sections=tuple(
            Section(ident=ident_of([title]), title=title, text=text, blocks=tuple(blocks))
            for title, text, blocks in sections
            if blocks
        ),
        footer="All throughputs and costs are predicted, at the prices named under Inputs. Nothing was measured.",
    )


_PIPELINES: Final = (
    "Each box is a stage of a pipeline: how many of the model's layers it holds, and the nodes that share its work. "
    "Dearest templates first."
)
_CAPACITY: Final = "What is rented is whole instances, so capacity is seldom exactly the demand."
_INPUTS: Final = "With the same inputs the plan comes out the same: `coral plan replay` shows it."


def _pipelines(plan: Document) -> list[Block]:
    items = plan["instances"]
    return [pipelines_of(items, title="All templates", most=_MOST_PIPELINES)] if items else []


def _tiles(plan: Document) -> list[Tile]:
    count = sum(item["count"] for item in plan["instances"])
    nodes = sum(item["count"] * sum(item["nodes"].values()) for item in plan["instances"])
    proof = "proven" if plan["status"] == "optimal" else "not within the wished gap"
    return [
        Tile(
            label="cost",
            value=f"{usd(plan['cost_usd_per_h'])} USD/h",
            kind=PREDICTED,
            note=f"and {usd(plan['churn_usd_per_h'])} for start-ups",
        ),
        Tile(label="instances", value=figure(count), kind=PREDICTED, note=f"on {figure(nodes)} nodes"),
        Tile(
            label="with start-ups, nothing costs less than",
            value=f"{usd(plan['bound_usd_per_h'])} USD/h",
            kind=PREDICTED,
            note=f"gap {plan['gap_frac']:.3%}, {proof}",
        ),
    ]


def _warnings(plan: Document) -> list[str]:
    unmet = unmet_text(plan)
    return [] if unmet == "none" else [f"demand is not met: {unmet}"]


def _costs(plan: Document, decision: Document) -> list[Block]:
    items = plan["instances"]
    baselines = baselines_table(plan, decision)
    totals = {"coral": plan["objective_usd_per_h"]} | {
        name: result["objective_usd_per_h"] for name, result in decision["baselines"].items()
    }
    beside = BarChart(
        title="With start-up",
        unit="USD/h",
        keys=("cost",),
        bars=tuple(Bar(name=name, parts={"cost": value}) for name, value in totals.items()),
    )
    found: list[Block] = [
        Figure(title="Cost beside the baselines", kind=PREDICTED, charts=((beside.title, bar_svg(beside)),)),
    ]
    for title, row_of in (
        ("by model and phase", lambda item: item["model"]),
        ("by combination of nodes", lambda item: " + ".join(sorted(item["nodes"]))),
    ):
        found += _stacked(f"Cost {title}", items, row_of)
    return [*found, baselines, *_filled(runtimes_table(decision))]


def _stacked(title: str, items: Sequence[Document], row_of: Callable[[Document], str]) -> list[Block]:
    """USD/h in a bar per row, split by phase; the dearest rows, and how many are left out."""
    rows: dict[str, dict[str, float]] = {}
    for item in items:
        parts = rows.setdefault(row_of(item), {})
        parts[item["phase"]] = parts.get(item["phase"], 0.0) + item["cost_usd_per_h"]
    if not rows:
        return []
    ordered = sorted(rows.items(), key=lambda row: (-sum(row[1].values()), row[0]))
    keys = tuple(
        phase for phase in ("prefill", "decode", "aggregated") if any(phase in parts for parts in rows.values())
    )
    chart = BarChart(
        title="Without start-up",
        unit="USD/h",
        keys=keys,
        bars=tuple(Bar(name=name, parts=parts) for name, parts in ordered[:_MOST_BARS]),
    )
    left = len(ordered) - _MOST_BARS
    return [
        Figure(
            title=title,
            kind=PREDICTED,
            charts=((chart.title, bar_svg(chart)),),
            keys=tuple(Key(name=key, style=i, letter=letter(i)) for i, key in enumerate(keys)),
            caption=f"{left} more are not drawn." if left > 0 else "",
        )
    ]


def _capacity(plan: Document) -> list[Block]:
    rows = plan.get("coverage", ())
    bars = tuple(
        Bar(
            name=f"{row['model']} {row['phase']}",
            parts={} if not row["demand"] else {"capacity": 100.0 * row["capacity"] / row["demand"]},
        )
        for row in rows[:_MOST_BARS]
    )
    if not bars:
        return []
    chart = BarChart(
        title="Capacity as a share of the demand", unit="%", keys=("capacity",), bars=bars, guide=(100.0, "demand")
    )
    left = len(rows) - len(bars)
    caption = f"{left} more are in the table." if left else ""
    return [
        Figure(title="Capacity", kind=PREDICTED, charts=((chart.title, bar_svg(chart)),), caption=caption),
        coverage_table(plan),
    ]


def _regions(plan: Document) -> list[Block]:
    costs: dict[str, float] = {}
    counts: dict[str, int] = {}
    for item in plan["instances"]:
        costs[item["region"]] = costs.get(item["region"], 0.0) + item["cost_usd_per_h"]
        counts[item["region"]] = counts.get(item["region"], 0) + item["count"]
    found = spots(costs)
    table = PlanTable(
        title="Where it runs (predicted)",
        columns=("on the map", "region", "place", "instances", "USD/h"),
        rows=[
            (
                spot.number if spot.place else None,
                spot.region,
                spot.place.name if spot.place else None,
                counts[spot.region],
                usd(spot.usd_per_h),
            )
            for spot in found
        ],
    )
    caption = "Numbers as in the table below; areas by USD/h. Land is schematic."
    drawn = Figure(title="Regions", kind=PREDICTED, charts=(("", map_svg(found)),), caption=caption)
    return [drawn, table] if found else []


def _why(plan: Document, explanation: Document) -> str:
    free = "" if explanation["binding"] else "No limit binds besides the demand itself. "
    return free + relaxation_text(explanation, plan)


def _reasons(explanation: Document) -> list[Block]:
    columns, rows = limits_table(explanation)
    binding = PlanTable(title="Limits that hold the plan back", columns=columns, rows=rows)
    columns, rows = marginal_table(explanation)
    return [*_filled(binding), PlanTable(title="What more of each would cost", columns=columns, rows=rows)]


def _filled(table: PlanTable) -> list[Block]:
    return [table] if table.rows else []


def _inputs(decision: Document) -> PlanTable:
    library = decision["library"]
    return PlanTable(
        title="Made from",
        columns=("input", "value"),
        rows=[
            ("library", f"{library['name']} version {library['version']}"),
            ("capacity sources", ", ".join(decision["capacity_sources"]) or None),
            ("prices", f"oldest of {decision['price_as_of']}"),
            ("code", decision["code_version"]),
            *((f"{name} (sha256)", value) for name, value in decision["input_hashes"].items()),
        ],
    )
