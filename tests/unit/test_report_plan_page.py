"""The page of a plan: its pipelines, costs, capacity, places and reasons, from the documents as they are recorded."""

from __future__ import annotations

import json

import pytest

from coral_core.cli.entry import run
from coral_core.report.plan_page import plan_html
from tests.fakes.html_page import faults, read_page

STAGES = [{"layers": 26, "nodes": ["2xL40S"]}, {"layers": 14, "nodes": ["1xL4", "1xL4"]}]


def instance(**changes):
    return {
        "template": "d-1",
        "model": "m",
        "phase": "decode",
        "region": "us-east-2",
        "count": 2,
        "nodes": {"2xL40S": 1, "1xL4": 2},
        "stages": STAGES,
        "throughput_tokens_per_s": 100.0,
        "throughput_requests_per_s": None,
        "price_usd_per_h": 3.5,
        "cost_usd_per_h": 7.0,
    } | changes


def documents(instances, **changes):
    plan = {
        "fleet": "blue",
        "scenario": "s",
        "created_at": "2026-01-01T00:00:00+00:00",
        "method": "ilp:highs",
        "status": "optimal",
        "cost_usd_per_h": sum(item["cost_usd_per_h"] for item in instances),
        "churn_usd_per_h": 0.5,
        "objective_usd_per_h": 7.5,
        "bound_usd_per_h": 7.49,
        "gap_frac": 0.0013,
        "instances": instances,
        "shortfall": [],
        "coverage": [
            {"model": "m", "phase": "decode", "unit": "tokens/s", "demand": d, "capacity": 200.0, "utilization_frac": u}
            for d, u in ((160.0, 0.8), (0.0, None))
        ],
        "changes": [{"template": "d-1", "region": "us-east-2", "running": 1, "planned": 2}],
        "notes": ["prices are old"],
    } | changes
    decision = {
        "baselines": {"homo": {"objective_usd_per_h": 15.0, "shortfall": []}},
        "explanation": {
            "relaxed_objective_usd_per_h": 5.0,
            "binding": [{"family": "capacity", "what": "us-east-2 1xL4: 2 of 2", "shadow_usd_per_h": 1.25}],
            "marginal_costs": [
                {"model": "m", "phase": "decode", "unit": "token/s", "usd_per_h_per_unit": 0.0036, "missing_frac": 0.0}
            ],
        },
        "library": {"name": "lib", "version": 3},
        "capacity_sources": ["estimated"],
        "code_version": "9.9.9",
        "price_as_of": "2026-01-01",
        "input_hashes": {"scenario": "ab" * 32},
    }
    return plan, decision


def page(instances=None, **changes):
    text = plan_html(*documents([instance()] if instances is None else instances, **changes))
    assert not faults(text)
    return text


def labels(text):
    return [one.attributes["aria-label"] for one in read_page(text) if one.attributes.get("class") == "chart"]


def test_the_page_has_all_that_explains_a_plan():
    text = page([instance(), instance(template="p-1", phase="prefill", region="eu-west-1", nodes={"1xL4": 1})])
    assert [one.text for one in read_page(text) if one.tag == "h2"] == [
        "Pipelines",
        "Cost",
        "Demand and capacity",
        "Regions",
        "Why",
        "Instances",
        "Inputs",
    ]
    beside, by_model, by_nodes, capacity, places = labels(text)
    assert "coral: 7.5 USD/h. homo: 15 USD/h." in beside
    assert "m: 14 USD/h (prefill 7, decode 7)" in by_model
    assert "1xL4 + 2xL40S: 7 USD/h (decode 7)" in by_nodes
    assert "m decode: 125 %. m decode: unknown. demand: 100 %." in capacity
    assert "us-east-2 (Ohio), 7.00 USD/h" in places
    for words in ("26 layers", "2 × 1xL4", "gap 0.130%, proven", "us-east-2 1xL4: 2 of 2", "start 1", "lib version 3"):
        assert words in text
    assert "No limit binds" not in text
    assert "ab" * 32 in text


def test_what_is_not_met_stands_first_and_what_binds_nothing_is_said():
    plan, decision = documents(
        [instance()], status="gap", shortfall=[{"model": "m", "phase": "decode", "tokens_per_s": 9.0, "frac": 0.123}]
    )
    decision["explanation"]["binding"] = []
    text = plan_html(plan, decision)
    [warning] = [one.text for one in read_page(text) if one.attributes.get("class") == "warn"]
    assert "demand is not met: m decode 12.3%" in warning
    assert "not within the wished gap" in text
    assert "No limit binds besides the demand itself." in text


def test_a_plan_of_nothing_has_a_page():
    text = page([], coverage=[], changes=[], notes=[])
    assert "Regions" not in [one.text for one in read_page(text) if one.tag == "h2"]


def test_many_instances_and_hostile_names_stay_small_and_text():
    name = '"><script>alert(1)</script>'
    many = [instance(template=f"d-{i}", model=f"{name}{i}", nodes={f"1x{i}": 1}) for i in range(400)]
    text = page(many)
    assert "<script" not in text
    assert len(text.encode()) < 2_000_000
    assert "200 more templates of" in text
    assert "370 more are not drawn." in text


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_command_writes_and_records_the_page(dry_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.html"
    arguments = ["plan", "--report", str(path), "--executor", "inline", "--json"]
    assert run([*arguments, *(["--dry-run"] if dry_run else [])]) == 0
    document = json.loads(capsys.readouterr().out)
    text = path.read_text(encoding="utf-8")
    assert not faults(text)
    for item in document["instances"]:
        assert item["template"] in text
    recorded = list(tmp_path.glob(".coral/store/plans/default/*/report.html"))
    assert [one.read_text(encoding="utf-8") for one in recorded] == ([] if dry_run else [text])


def test_a_report_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "--report", "no-such/plan.html"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / ".coral").exists()
    taken = tmp_path / "taken.html"
    taken.write_text("mine")
    taken.chmod(0o400)
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(13, "no right to")))
    assert run(["plan", "--report", str(taken), "--executor", "inline"]) == 2
    assert "cannot be written: no right to" in capsys.readouterr().err
