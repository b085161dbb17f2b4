"""The planner's commands from end to end, on the base install's own executor: build, plan, explain, replay."""

from __future__ import annotations

import json

import pytest

from artifacts.library import open_library
from artifacts.store import open_store
from coral_core.cli.entry import run
from tests.fakes.tiny_text import tiny_without_headroom


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder with the default store in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def coral(here, capsys):
    """Run a command line in the empty folder; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def small(here):
    """`tiny`, smaller still: one model, two nodes a template."""
    text = tiny_without_headroom().replace("n_max: 3", "n_max: 2").replace("name: tiny", "name: small")
    head, _, tail = text.partition("  - model: gpt-oss-20b")
    path = here / "small.yaml"
    path.write_text(head + tail[tail.index("library:") :])
    return path


def test_a_plan_is_made_recorded_explained_and_replayed(coral, here, small):
    code, out, _ = coral("plan", "--scenario", small, "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["kind"] == "predicted"
    assert plan["instances"]
    assert plan["gap_frac"] <= 1e-3
    assert plan["bound_usd_per_h"] <= plan["objective_usd_per_h"] + 1e-9
    assert {"homo", "homo_joint", "cauchy"} == set(plan["baselines"])
    assert (here / plan["url"].removeprefix("file://")).exists() or plan["url"].startswith("file://")

    code, out, _ = coral("plan", "list", "--json")
    [listed] = json.loads(out)
    assert listed["scenario"] == "small"
    assert listed["cost_usd_per_h"] == plan["cost_usd_per_h"]
    assert listed["shortfall"] == []

    code, out, _ = coral("plan", "replay", "--json")
    assert code == 0
    assert json.loads(out)["same_instances"] is True

    code, out, _ = coral("plan", "explain", "--json")
    assert code == 0
    assert {"binding", "shadow_prices", "marginal_costs"} <= set(json.loads(out))


def test_explain_says_why_a_template_is_in_the_plan_or_not(coral, here, small):
    coral("library", "build", "--scenario", small, "--keep-all", "--json")
    _, out, _ = coral("plan", "--scenario", small, "--json")
    chosen = json.loads(out)["instances"][0]["template"]
    ids = open_library(open_store(str(here / ".coral" / "store")), "small").read()["template_id"].to_pylist()

    def explained(template):
        code, out, err = coral("plan", "explain", "--template", template, "--json")
        assert code == 0, err
        answer = json.loads(out)
        code, out, err = coral("plan", "explain", "--template", template)
        assert code == 0, err
        assert all(reason in out for reason in answer["reasons"])
        return answer, out

    answer, text = explained(chosen)
    assert answer["chosen_count"]
    assert f"{chosen} is in the plan" in text
    answers = [explained(template) for template in ids[:: max(1, len(ids) // 8)] if template != chosen]
    assert all("is not in the plan" in text for answer, text in answers if not answer["chosen_count"])
    assert any("per million tokens" in text for _, text in answers)
    dominated = [answer for answer, _ in answers if answer["dominated_by"]]
    assert dominated
    assert all(answer["dominated_by"] in ids and not answer["chosen_count"] for answer in dominated)

    code, out, err = coral("plan", "explain", "--template", "d-0000000000000000")
    assert (code, out) == (2, "")
    assert "unknown template" in err


def test_the_plan_covers_its_demand_with_its_own_figures(coral, small):
    _, out, _ = coral("plan", "--scenario", small, "--json")
    plan = json.loads(out)
    for row in plan["demand"]:
        served = sum(
            item["count"] * item["throughput_tokens_per_s"]
            for item in plan["instances"]
            if (item["model"], item["phase"]) == (row["model"], row["phase"])
        )
        assert served >= row["tokens_per_s"] * (1 - 1e-9)
    cost = sum(item["cost_usd_per_h"] for item in plan["instances"])
    assert cost == pytest.approx(plan["cost_usd_per_h"])
    for item in plan["instances"]:
        assert sum(stage["layers"] for stage in item["stages"]) == 40
        assert sum(len(stage["nodes"]) for stage in item["stages"]) == sum(item["nodes"].values())


def test_a_dry_run_writes_nothing(coral, here, small):
    code, out, _ = coral("plan", "--scenario", small, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["url"] is None
    assert [path for path in here.rglob("*") if path.is_file()] == [small]


def test_the_same_plan_with_a_running_fleet_costs_no_start_up(coral, small):
    _, out, _ = coral("plan", "--scenario", small, "--json")
    first = json.loads(out)
    _, out, _ = coral("plan", "--scenario", small, "--keep-running", "--json")
    second = json.loads(out)
    assert first["churn_usd_per_h"] > 0
    assert second["churn_usd_per_h"] == 0
    assert second["objective_usd_per_h"] <= first["objective_usd_per_h"]
    _, out, _ = coral("plan", "show", "--at", "latest")
    assert "Changes to what runs" in out
    assert "keep" in out
    # Asked for less, the fleet shrinks: what is given up is named.
    small.write_text(small.read_text().replace("requests_per_s: 10", "requests_per_s: 0"))
    _, out, _ = coral("plan", "--scenario", small, "--keep-running")
    assert "stop 1" in out


def test_a_library_of_other_inputs_is_built_anew_and_says_why(coral, small):
    coral("library", "build", "--scenario", small, "--json")
    small.write_text(small.read_text().replace("tpot_s: 0.06", "tpot_s: 0.05"))
    code, _, err = coral("plan", "--scenario", small, "--json")
    assert code == 0
    assert "stale" in err
    code, out, _ = coral("library", "list", "--json")
    assert json.loads(out)[0]["version"] == 2
    _, out, _ = coral("library", "diff", "small", "1", "2", "--json")
    decode = next(row for row in json.loads(out) if row["phase"] == "decode")
    assert decode["removed"] > 0
    assert decode["added"] > 0


def test_planning_from_a_named_stale_version_is_refused(coral, small):
    coral("library", "build", "--scenario", small, "--json")
    small.write_text(small.read_text().replace("tpot_s: 0.06", "tpot_s: 0.05"))
    code, _, err = coral("plan", "--scenario", small, "--library-version", "1")
    assert code == 4
    assert "built from other inputs" in err
    assert err.count("\n") == 1


def test_a_second_build_reuses_every_shard(coral, small):
    _, out, _ = coral("library", "build", "--scenario", small, "--json")
    first = json.loads(out)
    _, out, _ = coral("library", "build", "--scenario", small, "--dry-run", "--json")
    assert json.loads(out) == {"library": "small", "shards": 2, "finished": 2}
    _, out, _ = coral("library", "build", "--scenario", small, "--json")
    second = json.loads(out)
    assert second["version"] == first["version"] + 1
    assert [shard["sha256"] for shard in second["shards"]] == [shard["sha256"] for shard in first["shards"]]


def test_scarce_supply_is_a_stated_shortfall(coral, small):
    text = small.read_text()
    small.write_text(text + "availability: {kind: constant, nodes: {us-east-2: {1xL40S: 1}}}\n")
    code, out, _ = coral("plan", "--scenario", small, "--json")
    plan = json.loads(out)
    assert code == 0
    missing = [row for row in plan["shortfall"] if row["frac"] > 0]
    assert missing
    for command in ("show", "list"):
        _, out, _ = coral("plan", command)
        assert f"phi-4 {missing[0]['phase']} {missing[0]['frac']:.1%}" in out
    _, out, _ = coral("plan", "show")
    assert "DEMAND NOT MET" in out.splitlines()[0]
    code, _, err = coral("plan", "--scenario", small, "--require-full", "--json")
    assert code == 3
    assert "not fully met" in err


def test_tables_for_people_carry_the_same_figures(coral, small):
    _, out, _ = coral("plan", "--scenario", small, "--json")
    plan = json.loads(out)
    code, out, _ = coral("plan", "show")
    assert code == 0
    assert f"{plan['cost_usd_per_h']:.2f} USD/h" in out.splitlines()[0]
    assert "all demand met" in out.splitlines()[0]
    for row in plan["coverage"]:
        assert f"{row['utilization_frac']:.1%}" in out
    assert all(f"note: {note}" in out for note in plan["notes"])
    assert "[prefill, decode, aggregated]" in out
    assert plan["instances"][0]["template"] in out
    assert "predicted" in out
    for arguments in (("plan", "explain"), ("library", "list"), ("library", "show", "small"), ("plan", "list")):
        code, out, _ = coral(*arguments)
        assert code == 0
        assert out.strip()


def test_a_library_is_shown_for_one_model_and_compared_by_version(coral, small):
    coral("library", "build", "--scenario", small, "--json")
    _, out, _ = coral("library", "show", "small", "--model", "phi-4", "--top", "1")
    assert out.count("phi-4") == 2
    assert "e+" not in out
    code, out, err = coral("library", "show", "small", "--model", "phi-5")
    assert (code, out) == (2, "")
    assert "did you mean phi-4" in err
    _, out, _ = coral("library", "diff", "small", "1")
    assert "version 1 -> 1" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--scenario", "nope"), "nope"),
        (("plan", "show"), "no plan"),
        (("plan", "show", "--at", "yesterday"), "yesterday"),
        (("library", "show", "nope"), "nope"),
        (("library", "build", "--scenario", "missing.yaml"), "missing.yaml"),
        (("library", "build", "--method", "magic"), "magic"),
        (("plan", "--stroe", "x"), "--stroe"),
        (("library", "build", "--store", "ftp://x"), "ftp"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(coral, arguments, words):
    code, out, err = coral(*arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_damaged_plan_does_not_hide_the_others(coral, here, small):
    coral("plan", "--scenario", small, "--json")
    coral("plan", "--scenario", small, "--json")
    first = min((here / ".coral/store/plans/default").glob("*/plan.json"))
    first.write_text(first.read_text().replace('"count":', '"count":1', 1))
    code, out, err = coral("plan", "list", "--json")
    assert code == 6
    assert len(json.loads(out)) == 1
    assert str(first) in err


def test_careful_plans_count_on_the_slow_end_once(coral, small):
    _, out, _ = coral("plan", "--scenario", small, "--dry-run", "--json")
    middle = json.loads(out)
    code, out, _ = coral("plan", "--scenario", small, "--pessimistic", "--dry-run", "--json")
    careful = json.loads(out)
    assert code == 0
    assert careful["objective_usd_per_h"] > middle["objective_usd_per_h"]
    for row in careful["coverage"]:
        assert row["capacity_low"] == pytest.approx(row["capacity"])
        assert row["capacity_high"] is None
        assert row["error_unknown_frac"] == 0
    assert not any("slow end" in note for note in careful["notes"])
    assert any("capacities are the lower ends" in note for note in careful["notes"])
    assert not any("lower ends" in note for note in middle["notes"])
