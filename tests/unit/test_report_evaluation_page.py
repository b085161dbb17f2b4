"""The report is one file that needs nothing else, says what kind each figure is, and stands whatever was found."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from coral_core.errors import InputError
from coral_core.report import evaluation_charts as charts
from coral_core.report.evaluation_page import evaluation_html, evaluation_page, shown_epoch
from coral_core.report.page import can_render, ident_of, page_or_none
from tests.fakes.html_page import faults, read_page
from tests.fakes.report_cases import STAGES_USD_PER_H, evaluation

TIME = "2026-05-01T00:00:00+00:00"
POLICIES = ("coral", "coral_paper", "homo_joint", "homo", "cauchy", "helix")
POINT = {
    "model": "phi-4",
    "phase": "prefill",
    "n_max": 6,
    "rho": 12.0,
    "templates": 10,
    "solve_core_s": 0.5,
    "best_per_usd": 100.0,
}


def html(sensitivity=(), changed=None, **case):
    document, tables = evaluation(**case)
    if changed:
        changed(document, tables)
    text = evaluation_html(document, tables, time=TIME, sensitivity=sensitivity)
    assert not faults(text)
    return text


def headings(text):
    return [one.text for one in read_page(text) if one.tag == "h2"]


def charts_of(text, title):
    """The words of the charts of the figures of this title."""
    elements = read_page(text)
    found, is_inside = [], False
    for one in elements:
        if one.tag == "figure":
            is_inside = one.text.startswith(title)
        elif is_inside and one.tag == "svg" and one.attributes.get("class") == "chart":
            found.append(one.attributes["aria-label"])
    return found


def test_the_whole_report_has_all_its_parts():
    text = html(policies=POLICIES, models=("phi-4", "qwen3-32b"), sensitivity=[POINT])
    assert headings(text) == [
        "Policies side by side",
        "Against the baselines",
        "Cost",
        "Goodput",
        "Latencies",
        "Chosen templates",
        "Regions",
        "Instances",
        "Solve times",
        "Sensitivity",
        "Inputs",
    ]
    links = [one.attributes["href"] for one in read_page(text) if one.tag == "a"]
    assert links == [f"#{ident_of([title])}" for title in headings(text)]
    for words in (
        "ab" * 32,
        "cd" * 32,
        "ef" * 32,
        "made-up version 3",
        "9.9.9",
        "0, 1, 2",
        "a list, and 1 more sources",
    ):
        assert words in text
    assert "arXiv 0000.00000" in text
    assert text.count("<title>Evaluation of made-up</title>") == 1
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_figures_are_those_of_the_evaluation():
    text = html()
    [cost] = charts_of(text, "Cost by policy")
    assert f"coral: {STAGES_USD_PER_H + 0.5:.4g} USD/h (provisioning {STAGES_USD_PER_H:.4g}, start-up 0.5)" in cost
    [gpus] = charts_of(text, "Cost by GPU type")
    assert "coral: 5.1 USD/h (L40S 3.5, L4 1.6)" in gpus
    assert "homo: 10.2 USD/h (L40S 7, L4 3.2)" in gpus
    [goodput] = charts_of(text, "Goodput by policy")
    assert "coral: 900 tokens/s. homo: 450 tokens/s. demand: 1,000 tokens/s." in goodput
    by_epoch, attained = charts_of(text, "Goodput by epoch")
    assert "coral: 901" in by_epoch  # the mean over seeds 0, 1, 2
    assert "demand: 1,000" in by_epoch
    assert "coral: 90 to 90." in attained
    [supply] = charts_of(text, "Supply by epoch")
    assert "supply: 16 to 15" in supply
    ttft, tpot = charts_of(text, "Latencies by model")
    assert "SLO 1.2 s" in ttft
    assert "SLO 0.06 s" in tpot
    assert "coral: 0 to 80" in ttft  # a fifth of the requests never got a first token
    assert "coral: 0 to 100" in tpot
    [instances] = charts_of(text, "Instances by policy")
    assert "(one configuration 1, mixed configurations 1)" in instances
    [regions] = charts_of(text, "Where coral rents")
    assert "1: us-east-2 (Ohio), 5.10 USD/h" in regions


def test_templates_are_drawn_as_their_stages():
    elements = read_page(html())
    stages = [one.text for one in elements if one.tag == "li" and one.parents[-1] == "ol"]
    assert stages[:2] == ["26 layers2xL40S", "14 layers2 × 1xL4"]
    summaries = [one.text for one in elements if one.tag == "summary"]
    assert "coral, epoch 0 predicted" in summaries
    assert "homo, epoch 0 predicted" in summaries


def test_one_epoch_and_one_seed_leave_out_what_there_is_not():
    text = html(epochs=1, seeds=(7,))
    assert "one seed: no confidence interval" in text
    assert not charts_of(text, "Cost by epoch")
    assert not charts_of(text, "Supply by epoch")
    assert charts_of(text, "Cost by policy")
    assert "whisker" not in text.split("</style>")[1]
    assert "seed 7" in text


def test_a_single_policy_is_compared_with_nothing():
    text = html(policies=("cauchy",), changed=lambda document, _: document.update(ratios={}))
    assert "Against the baselines" not in headings(text)
    assert "cauchy: cost" in text


def test_what_was_not_simulated_has_no_service():
    text = html(is_simulated=False)
    assert "coral, homo: not simulated: no timing" in text
    assert not charts_of(text, "Goodput by policy")
    assert not charts_of(text, "Latencies by model")
    assert charts_of(text, "Cost by policy")


def test_zero_goodput_is_drawn_as_zero():
    text = html(goodput=0.0)
    [goodput] = charts_of(text, "Goodput by policy")
    assert "coral: 0 tokens/s" in goodput


def test_a_failed_policy_and_a_shortfall_stand_before_all_figures():
    def changed(document, _):
        document["failed"] = {"helix": "epoch 3: <gave> up"}
        document["policies"]["coral"]["shortfall_frac"] = 0.25

    text = html(changed=changed)
    warnings = [one.text for one in read_page(text) if one.attributes.get("class") == "warn"]
    assert len(warnings) == 2
    assert "helix failed and is in no figure: epoch 3: <gave> up" in warnings[0]
    assert "up to 25.0%" in warnings[1]


def test_an_epoch_without_a_plan_interrupts_the_line():
    def changed(_, tables):
        tables["epochs"] = [row for row in tables["epochs"] if (row["policy"], row["epoch"]) != ("homo", 1)]

    text = html(epochs=4, changed=changed)
    [cost] = charts_of(text, "Cost by epoch")
    assert "homo" in cost


def test_nodes_of_a_fixed_pool_are_unknown_and_not_zero():
    def changed(document, tables):
        document["policies"]["homo"].update(mixed_instances=None, nodes=None)
        for row in tables["instances"]:
            if row["policy"] == "homo":
                row.update(stages=None, price_usd_per_h=None, model=None, phase=None)
        tables["costs"] = [row for row in tables["costs"] if row["policy"] != "homo"]

    text = html(changed=changed)
    [instances] = charts_of(text, "Instances by policy")
    assert "homo: unknown" in instances
    [gpus] = charts_of(text, "Cost by GPU type")
    assert "homo: unknown" in gpus
    elements = read_page(text)
    table = next(i for i, one in enumerate(elements) if one.tag == "caption" and "USD/h by region" in one.text)
    rows = [one.text for one in elements[table:] if one.tag in {"th", "td"}][:10]
    assert rows == ["region", "on the map", "place", "coral", "homo", "us-east-2", "1", "Ohio", "5.10", "-"]


def test_what_spot_nodes_cost_is_shared_out_by_their_prices_on_demand():
    def changed(_, tables):
        for row in tables["instances"]:
            row["stages"] = [{"layers": 40, "nodes": ["2xL40S@spot", "1xL4@spot"]}]
            row["price_usd_per_h"] = 0.43

    [gpus] = charts_of(html(changed=changed), "Cost by GPU type")
    assert "coral: 0.43 USD/h (L40S 0.35, L4 0.08)" in gpus
    facts = [{"price_usd_per_h": {"a": 1.0}, "gpu_count": 1}, {"price_usd_per_h": {}, "gpu_count": 3}]
    assert charts.price_shares(facts, "a") == [0.25, 0.75]


def test_names_are_text_whatever_they_hold():
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    text = html(models=(hostile, "{{ 7 * 7 }}"), scenario=f"</title>{hostile}", policies=("coral", hostile))
    assert "<script" not in text
    assert "49" not in [one.text for one in read_page(text) if one.tag in {"td", "th"}]
    assert any(hostile in one.text for one in read_page(text) if one.tag == "td")


def test_many_models_with_long_names_stay_below_two_megabytes():
    models = tuple(
        f"organisation-with-a-long-name/model-{i:02d}-instruct-with-a-very-long-suffix-{i}" for i in range(46)
    )
    text = html(models=models, policies=POLICIES, epochs=10)
    assert len(text.encode()) < 2_000_000
    assert "more templates of" in text  # of the other policies not all are drawn
    [by_model] = charts_of(text, "Cost by model")
    assert "others (39)" in by_model
    assert len(charts_of(text, "Latencies by model")) == 92
    titles = [one.text for one in read_page(text) if one.attributes.get("class") == "drawing"]
    assert {f"{model}: TTFT" for model in models} <= set(titles)  # whole: names may differ in their middle alone


def test_styles_of_policies_do_not_depend_on_the_others():
    def styles(*policies):
        return charts.policy_styles(evaluation(policies=policies)[0])

    assert styles("coral", "homo")["homo"] == styles(*POLICIES)["homo"]
    assert len(set(styles(*POLICIES, "mine", "yours").values())) == 8


def test_the_dearest_epoch_is_drawn():
    _, tables = evaluation(epochs=3)
    assert shown_epoch(tables, "coral") == 0
    tables["epochs"][1]["provisioning_usd_per_h"] *= 2
    assert shown_epoch(tables, "coral") == 1


def test_distributions_are_cut_between_their_points():
    document, tables = evaluation()
    for row in tables["latencies"]:
        row["value_s"] *= 100 if row["policy"] == "homo" else 1
    [figure] = charts.latency_figures(document, tables)
    assert "homo" in figure.charts[0][1]
    late = [row for row in tables["latencies"] if row["frac"] > 0.5]
    for row in late:
        row["value_s"] += 1000
    for row in tables["latencies"]:
        row["value_s"] += 50  # all beyond what is drawn
    [figure] = charts.latency_figures(document, tables)
    assert "coral: 0" in figure.charts[0][1]


def test_without_jinja2_the_reason_and_the_cure_are_named(monkeypatch):
    assert can_render()
    page = evaluation_page(*evaluation(), time=TIME)
    assert page.sections
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"jinja2 is not installed .*coral-serve\[report\]"):
        evaluation_html(*evaluation(), time=TIME)


def test_a_report_never_costs_what_it_reports_on(caplog, monkeypatch):
    assert page_or_none(lambda: "<p>") == "<p>"
    assert page_or_none(lambda: evaluation_html({}, {}, time=TIME)) is None
    assert "no HTML report was made: KeyError" in caplog.text
    monkeypatch.setattr("coral_core.report.page.can_render", lambda: False)
    assert page_or_none(lambda: "<p>") is None


def test_the_template_ships_with_the_package():
    package = Path(importlib.import_module("coral_core.report").__file__).parent
    assert (package / "templates" / "page.html.j2").is_file()
    assert ident_of(["<>"]) == "section"
