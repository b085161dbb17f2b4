"""One scenario with every lever at once, through the command line: variants, spot, N+1, exclusion, preference, budget."""

from __future__ import annotations

import json

import numpy as np
import pytest

from artifacts.library import open_library
from artifacts.plans import list_plans, read_plan, write_plan
from artifacts.store import open_store
from coral_core.allocation.verify import verify_allocation
from coral_core.cli.entry import run
from coral_core.clock import SystemClock
from tasks.plan import recorded_problem, replay_plan

YAML = """
name: levers
catalog: paper-core
configs: [1xL40S, 1xL4, 1xA10G]
regions: [us-east-2, ap-northeast-2]
models:
  - model: phi-4
    variants: [bf16, fp8]
    phases: [prefill, decode, aggregated]
    requests_per_s: 10
    lengths: azure-conv
    slo: {ttft_s: 1.2, tpot_s: 0.06}
    on_demand_frac: 0.5
    spare_instances: 1
    region_fracs: {ap-northeast-2: 0.2}
library: {n_max: 2, rho: 12}
spot:
  nodes: 3
  configs:
    1xL4: {price_usd_per_h: {us-east-2: 0.3}, interruptions_per_h: 0.02, source: bill, as_of: 2026-11-01}
  default: {price_frac: 0.45, source: assumption, as_of: 2026-11-01}
exclusions:
  - {config: 1xA10G, region: us-east-2}
preferences:
  - {region: ap-northeast-2, price_factor: 1.1}
allocation: {budget_usd_per_h: 30, startup_s: 300}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder with the default store in it, and the scenario."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "levers.yaml").write_text(YAML)
    return tmp_path


@pytest.fixture
def coral(here, capsys):
    """Run a command line in the folder; its JSON, or its text where it has none."""

    def call(*arguments, code=0):
        assert run([str(argument) for argument in arguments]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if "--json" in arguments and out else out + err

    return call


def newest(here):
    store = open_store(str(here / ".coral" / "store"))
    record = read_plan(store, "default")
    library = record.decision["library"]
    return store, record, open_library(store, library["name"], library["version"])


def test_a_plan_with_every_lever_is_made_kept_explained_and_replayed(coral, here):
    plan = coral("plan", "--scenario", "levers.yaml", "--json")
    assert plan["status"] == "optimal"
    assert all(row["frac"] == 0 for row in plan["shortfall"])
    assert plan["cost_usd_per_h"] <= 30
    assert plan["schema_version"] == 2

    items = plan["instances"]
    assert {item["market"] for item in items} == {"spot", "on_demand"}
    assert {item["variant"] for item in items} <= {"bf16", "fp8"}
    for item in items:
        assert item["template"].endswith("@spot") == (item["market"] == "spot")
        assert not (item["region"] == "us-east-2" and "1xA10G" in item["nodes"])
        known = item["market"] == "on_demand" or set(item["nodes"]) == {"1xL4"}
        assert (item["interruptions_per_h"] is not None) == known
    assert sum(item["cost_usd_per_h"] for item in items) == pytest.approx(plan["cost_usd_per_h"])
    for phase in ("prefill", "decode"):
        demand = next(row for row in plan["demand"] if row["phase"] == phase)
        assert (demand["on_demand_frac"], demand["spare_instances"]) == (0.5, 1)
        assert demand["region_fracs"] == {"ap-northeast-2": 0.2}
    assert plan["baselines"].keys() == {"homo", "homo_joint"}  # the third cannot keep a spare, and says so

    store, record, snapshot = newest(here)
    assert "spare" in record.decision["baselines_left_out"]["cauchy"]
    assert {item["variant"] for item in record.decision["templates"]} == {"bf16", "fp8"}
    problem = recorded_problem(record.decision, snapshot)
    assert (problem.available[:, 3:] <= 3).all()
    verify_allocation(problem, replay_plan(record.decision, snapshot))
    assert coral("plan", "replay", "--json")["same_instances"] is True

    assert coral("plan", "explain", "--json")["binding"]
    for item in items:
        answer = coral("plan", "explain", "--template", item["template"], "--json")
        assert answer["chosen_count"][item["region"]] == item["count"]
    rows = snapshot.read().to_pylist()
    unused = next(
        row["template_id"]
        for row in rows
        if row["template_id"] not in {i["template"].removesuffix("@spot") for i in items}
    )
    assert coral("plan", "explain", "--template", f"{unused}@spot", "--json")["chosen_count"] == {}

    text = coral("plan", "show")
    assert "spot" in text
    assert "fp8" in text
    again = coral("plan", "--scenario", "levers.yaml", "--keep-running", "--json")
    assert again["churn_usd_per_h"] == 0
    assert len(list_plans(store, "default")) == 2


def test_each_lever_that_is_taken_away_saves_or_costs_as_it_must(coral, here):
    def cost(*changes):
        text = YAML
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (here / "changed.yaml").write_text(text)
        return coral("plan", "--scenario", "changed.yaml", "--json", "--dry-run")

    coral("library", "build", "--scenario", "levers.yaml", "--json")
    every = cost()
    asked = every["objective_usd_per_h"] * (1 + 2e-3)
    # what is only asked for less can only cost less
    assert cost(("spare_instances: 1", "spare_instances: 0"))["objective_usd_per_h"] <= asked
    assert cost(("on_demand_frac: 0.5", "on_demand_frac: 0.0"))["objective_usd_per_h"] <= asked
    assert cost(("region_fracs: {ap-northeast-2: 0.2}", ""))["objective_usd_per_h"] <= asked
    # what is no longer offered can only cost more
    assert cost(("nodes: 3", "nodes: 0"))["objective_usd_per_h"] * (1 + 2e-3) >= every["objective_usd_per_h"]
    poor = cost(("budget_usd_per_h: 30", "budget_usd_per_h: 5"))
    assert poor["cost_usd_per_h"] <= 5 * (1 + 1e-8)
    assert any(row["frac"] > 0 for row in poor["shortfall"])


def test_plans_of_the_schema_before_markets_are_still_explained_and_newer_ones_refused(coral, here):
    old = (
        YAML.split("spot:", maxsplit=1)[0]
        .replace("    on_demand_frac: 0.5\n    spare_instances: 1\n    region_fracs: {ap-northeast-2: 0.2}\n", "")
        .replace("variants: [bf16, fp8]", "variant: fp8")
    )
    (here / "plain.yaml").write_text(old)
    coral("plan", "--scenario", "plain.yaml", "--json")
    store, record, snapshot = newest(here)
    decision = json.loads(json.dumps(record.decision))
    for name in ("exclusions", "preferences", "spot_configs", "baselines_left_out"):
        del decision[name]
    for row in decision["demand"]:
        for name in ("on_demand_frac", "spare_instances", "region_fracs"):
            del row[name]
    decision["schema_version"] = 1
    plan = json.loads(json.dumps(record.plan)) | {"schema_version": 1}
    for item in plan["instances"]:
        del item["market"], item["interruptions_per_h"]
    assert np.array_equal(
        recorded_problem(decision, snapshot).templates.nodes,
        recorded_problem(record.decision, snapshot).templates.nodes,
    )
    write_plan(store, "default", SystemClock().now(), plan=plan, decision=decision, report_md="# old\n")

    assert coral("plan", "replay", "--json")["same_instances"] is True
    template = plan["instances"][0]["template"]
    assert coral("plan", "explain", "--template", template, "--json")["chosen_count"]
    assert "on demand" in coral("plan", "show")

    newer = decision | {"schema_version": 3}
    write_plan(store, "default", SystemClock().now(), plan=plan, decision=newer, report_md="# new\n")
    assert "reads up to 2" in coral("plan", "replay", code=2)
