"""Plans for people: figures, tables, the headline and the Markdown page, on documents made by hand."""

from __future__ import annotations

import pytest

from coral_core.report.figures import figure, stages_text, throughput_text, usd
from coral_core.report.plan_explained import limits_table, marginal_table, relaxation_text, template_facts
from coral_core.report.plan_report import (
    change_text,
    headline,
    instances_table,
    plan_markdown,
    plan_tables,
    unmet_text,
)

STAGES = [{"layers": 26, "nodes": ["big"]}, {"layers": 14, "nodes": ["small", "small"]}]


def instance(**changes):
    return {
        "template": "d-1",
        "model": "m",
        "phase": "decode",
        "region": "east",
        "count": 2,
        "nodes": {"big": 1, "small": 2},
        "stages": STAGES,
        "throughput_tokens_per_s": 47_820.4,
        "throughput_requests_per_s": None,
        "price_usd_per_h": 3.5412,
        "cost_usd_per_h": 7.0824,
    } | changes


def plan(**changes):
    return {
        "fleet": "blue",
        "scenario": "s",
        "created_at": "2026-01-01T00:00:00+00:00",
        "method": "ilp:highs",
        "status": "optimal",
        "cost_usd_per_h": 7.0824,
        "churn_usd_per_h": 0.5,
        "objective_usd_per_h": 7.5824,
        "bound_usd_per_h": 7.58,
        "gap_frac": 0.0003,
        "instances": [instance()],
        "shortfall": [{"model": "m", "phase": "decode", "tokens_per_s": 0.0, "frac": 0.0}],
        "coverage": [
            {
                "model": "m",
                "phase": "decode",
                "unit": "tokens/s",
                "demand": 90_000.0,
                "capacity": 95_640.8,
                "utilization_frac": 0.941,
            },
            {
                "model": "n",
                "phase": "decode",
                "unit": "tokens/s",
                "demand": 1.0,
                "capacity": 0.0,
                "utilization_frac": None,
            },
        ],
        "changes": [{"template": "d-1", "region": "east", "running": 0, "planned": 2}],
        "notes": ["prices are old", "pipes | stay"],
    } | changes


EXPLANATION = {
    "relaxed_objective_usd_per_h": 5.0,
    "binding": [{"family": "capacity", "what": "east big: 2 of 2", "shadow_usd_per_h": 1.25}],
    "marginal_costs": [
        {"model": "m", "phase": "decode", "unit": "token/s", "usd_per_h_per_unit": 0.0036, "missing_frac": 0.0},
        {"model": "m", "phase": "aggregated", "unit": "request/s", "usd_per_h_per_unit": 3.6, "missing_frac": 0.0},
        {"model": "n", "phase": "decode", "unit": "token/s", "usd_per_h_per_unit": 0.0, "missing_frac": 1.0},
    ],
}
DECISION = {
    "baselines": {
        "homo": {"objective_usd_per_h": 15.1648, "shortfall": []},
        "cauchy": {"objective_usd_per_h": 7.2, "shortfall": []},
    },
    "comparisons": {
        "homo": {"cost_ratio": 2.0, "cost_ratio_low": 1.4, "cost_ratio_high": 2.6, "cost_verdict": "dearer"},
        "cauchy": {
            "cost_ratio": 0.95,
            "cost_ratio_low": None,
            "cost_ratio_high": None,
            "cost_verdict": "error not known",
        },
    },
    "explanation": EXPLANATION,
    "library": {"name": "s", "version": 3},
    "capacity_sources": ["estimated"],
    "code_version": "1",
    "input_hashes": {"prices": "abc"},
}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (12_345, "12,345"),
        (47_820.4, "47,820"),
        (999.96, "1000"),
        (605.93, "605.9"),
        (0.0, "0"),
        (0.00008, "0.00008"),
        (-2.5, "-2.5"),
        ("word", "word"),
    ],
)
def test_figures_have_no_exponent(value, text):
    assert figure(value) == text


def test_stages_and_throughputs_are_short():
    assert stages_text(STAGES) == "26 on big | 14 on 2 x small"
    assert stages_text(STAGES, "\n") == "26 on big\n14 on 2 x small"
    assert throughput_text(47_820.4, None) == "47,820 tokens/s"
    assert throughput_text(None, 1.234567) == "1.235 requests/s"
    assert usd(1234.567) == "1,234.57"


def test_each_and_all_are_told_apart_and_the_total_is_the_cost():
    table = instances_table(plan())
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["USD/h each"], row["USD/h all"], row["tokens/s each"]) == ("3.54", "7.08", "47,820")
    total = dict(zip(table.columns, table.rows[-1], strict=True))
    assert (total["model"], total["count"], total["USD/h all"]) == ("total", 2, "7.08")


def test_units_stand_in_the_cells_where_they_differ():
    aggregated = instance(phase="aggregated", throughput_tokens_per_s=None, throughput_requests_per_s=1.5)
    table = instances_table(plan(instances=[instance(), aggregated]))
    assert [row[table.columns.index("throughput each")] for row in table.rows[:2]] == [
        "47,820 tokens/s",
        "1.5 requests/s",
    ]


def test_the_headline_says_first_what_is_not_met():
    assert "7.08 USD/h + 0.50 USD/h start-up; all demand met; bound 7.58 USD/h, gap 0.030% (proven)" in headline(plan())
    short = plan(
        status="gap",
        shortfall=[{"model": "m", "phase": "decode", "tokens_per_s": 9.0, "frac": 0.123}],
        floor_deficit=[{"model": "m", "phase": "decode", "instances": 2}],
    )
    assert "DEMAND NOT MET: m decode 12.3%, m decode 2 instances below its floor" in headline(short)
    assert "NOT within the wished gap" in headline(short)


def test_what_is_served_without_a_spare_is_told_apart_from_what_is_not_served():
    row = {"model": "m", "phase": "decode", "frac": 0.332, "spare_frac": 0.035}
    assert unmet_text(plan(shortfall=[row])) == "m decode 29.7%, m decode would lose 35.0% with an instance"
    exposed = row | {"frac": 0.035}
    assert unmet_text(plan(shortfall=[exposed])) == "m decode would lose 35.0% with an instance"


def test_a_baseline_without_an_answer_says_why():
    decision = DECISION | {"baselines_left_out": {"cauchy": "it has no spare to keep"}}
    table = plan_tables(plan(), decision)[-1]
    assert table.rows[-1] == ("cauchy", None, None, None, None, "it has no spare to keep")


def test_preferences_and_markets_are_shown_where_there_are_any():
    assert "preferences" not in headline(plan())
    assert "(preferences count as 0.50 USD/h more)" in headline(plan(preference_usd_per_h=0.5))
    assert "with start-up and preferences;" in relaxation_text(EXPLANATION, plan(preference_usd_per_h=0.5))
    table = instances_table(plan(instances=[instance(market="spot", variant="fp8"), instance()]))
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows[:2]]
    assert [(cell["market"], cell["variant"]) for cell in cells] == [("spot", "fp8"), ("on demand", None)]


def test_changes_are_shown_only_where_something_runs():
    def titles(document):
        return [table.title for table in plan_tables(document, DECISION)]

    assert "Changes to what runs" not in titles(plan())
    running = [{"template": "d-1", "region": "east", "running": 5, "planned": 2}]
    table = plan_tables(plan(changes=running), DECISION)[1]
    assert table.rows == [("stop 3", "d-1", "east", 5, 2)]
    assert (change_text(1, 4), change_text(2, 2)) == ("start 3", "keep")
    old = {key: value for key, value in plan().items() if key not in {"coverage", "changes", "notes"}}
    assert titles(old) == ["Instances", "Cost beside the baselines"]
    assert "# Plan" in plan_markdown(old, DECISION)


def test_nothing_served_is_used_nowhere():
    coverage = plan_tables(plan(), DECISION)[1]
    assert [row[5] for row in coverage.rows] == ["94.1%", None]


def test_the_page_has_headline_notes_tables_and_reasons():
    page = plan_markdown(plan(), DECISION)
    for text in (
        "**7.08 USD/h",
        "- prices are old",
        "26 on big \\| 14 on 2 x small",
        "| homo | 15.16 | 2.000 | 1.400 to 2.600 | dearer | none |",
        "| cauchy | 7.20 | 0.950 | - | error not known | none |",
        "| nodes to be had | east big: 2 of 2 | 1.25 |",
        "| library | s version 3 |",
    ):
        assert text in page
    free = {**DECISION, "explanation": {**EXPLANATION, "binding": []}}
    assert "No limit binds" in plan_markdown(plan(objective_usd_per_h=0.0), free)


def test_prices_are_by_volume_and_unknown_where_nothing_more_is_to_be_had():
    columns, rows = marginal_table(EXPLANATION)
    assert len(columns) == len(rows[0])
    assert [(row[2], row[3]) for row in rows] == [
        ("1", "USD per million tokens"),
        ("1", "USD per 1,000 requests"),
        (None, "USD per million tokens"),
    ]
    assert limits_table(EXPLANATION)[1] == [("nodes to be had", "east big: 2 of 2", "1.25")]
    text = relaxation_text(EXPLANATION, plan())
    assert "5.00 USD/h" in text
    assert "7.58 USD/h" in text


def test_facts_of_a_template_leave_out_what_is_not_so():
    answer = {
        "template": "d-1",
        "chosen_count": {"east": 2},
        "reduced_cost_usd_per_h": {"east": 1.5},
        "unavailable": {"west": ["big", "small"]},
        "dominated_by": "d-2",
        "usd_per_h_per_unit": 0.0036,
        "cheaper_chosen": "d-3",
        "cheaper_usd_per_h_per_unit": 0.0018,
    }
    facts = dict(template_facts(answer))
    assert facts["instances in east"] == 2
    assert facts["west lacks"] == "big, small"
    assert facts["its price"] == "1 USD per million tokens"
    assert facts["cheaper and chosen"] == "d-3 0.5 USD per million tokens"
    bare = {
        **answer,
        **{key: {} for key in ("chosen_count", "reduced_cost_usd_per_h", "unavailable")},
        **dict.fromkeys(["dominated_by", "usd_per_h_per_unit", "cheaper_usd_per_h_per_unit"]),
    }
    assert template_facts(bare) == []
