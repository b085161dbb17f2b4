"""An evaluation adds up: its summary is what its tables say, ratios are of its own figures, and it is recorded whole."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from artifacts.evaluations import (
    latest_sensitivity,
    list_evaluations,
    read_evaluation,
    read_table,
    write_evaluation,
    write_sensitivity,
)
from artifacts.store import open_store
from coral_core.cli.entry import run
from coral_core.config.policies import scenario_policies
from coral_core.errors import NoSolutionError, StoreError
from coral_core.report.evaluation_page import evaluation_html
from coral_core.report.evaluation_report import evaluation_markdown, evaluation_notes, evaluation_tables
from tasks.evaluate import KINDS, evaluate
from tasks.policy_plans import plan_epochs
from tests.fakes.evaluation_cases import micro, resolved, source_of
from tests.fakes.html_page import faults

NOW = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    scenario = resolved(tmp_path_factory.mktemp("micro"))
    return evaluate(source_of(scenario), scenario_policies(scenario), [0, 1])


def rows_of(found, table, **where):
    return [row for row in found.tables[table] if all(row[name] == value for name, value in where.items())]


def test_the_summary_is_what_the_tables_say(found):
    assert list(found.document["policies"]) == ["coral", "coral_paper", "homo_joint", "homo"]
    for name, one in found.document["policies"].items():
        epochs = rows_of(found, "epochs", policy=name)
        assert one["cost_usd_per_h"] == pytest.approx(sum(row["cost_usd_per_h"] for row in epochs) / 2)
        assert one["cost_usd_per_h"] == pytest.approx(one["provisioning_usd_per_h"] + one["startup_usd_per_h"])
        for row in epochs:
            parts = rows_of(found, "costs", policy=name, epoch=row["epoch"])
            assert sum(part["provisioning_usd_per_h"] for part in parts) == pytest.approx(row["provisioning_usd_per_h"])
            assert {part["phase"] for part in parts} == {"prefill", "decode"}
            instances = rows_of(found, "instances", policy=name, epoch=row["epoch"])
            assert sum(item["count"] for item in instances) == row["instances"]
            assert sum(item["count"] * item["price_usd_per_h"] for item in instances) == pytest.approx(
                row["provisioning_usd_per_h"]
            )
        whole = rows_of(found, "service", policy=name, epoch=None, model="*")
        assert [row["goodput_tokens_per_s"] for row in whole] == one["goodput_by_seed_tokens_per_s"]
        assert one["goodput_tokens_per_s"] == pytest.approx(sum(one["goodput_by_seed_tokens_per_s"]) / 2)
        for seed, row in enumerate(whole):
            by_epoch = rows_of(found, "service", policy=name, seed=seed, model="*")[:-1]
            assert len(by_epoch) == 2
            assert row["goodput_tokens_per_s"] == pytest.approx(
                sum(part["goodput_tokens_per_s"] for part in by_epoch) / 2
            )


def test_ratios_are_of_the_evaluations_own_figures(found):
    policies, ratios = found.document["policies"], found.document["ratios"]
    assert set(ratios) == {"coral", "coral_paper"}
    ours, theirs = policies["coral"], policies["homo"]
    ratio = ratios["coral"]["homo"]
    assert ratio["cost_ratio"] == pytest.approx(theirs["cost_usd_per_h"] / ours["cost_usd_per_h"])
    pairs = zip(ours["goodput_by_seed_tokens_per_s"], theirs["goodput_by_seed_tokens_per_s"], strict=True)
    assert ratio["goodput_ratio"] == pytest.approx(sum(a / b for a, b in pairs) / 2)
    assert ratio["published"] is None
    assert ratio["cost_verdict"] in ("error not known", "same")  # no error of an L40S is known
    assert ratios["coral"]["coral_paper"]["cost_ratio"] >= 1 - 1e-3  # ours has more choices, to the gap of the solver


def test_published_ratios_stand_beside_those_of_published_setups(tmp_path):
    named = resolved(tmp_path, ("name: micro", "name: paper-core"), ("seeds: [0, 1]", "seeds: [0]"))
    document = evaluate(source_of(named), scenario_policies(named, ["coral", "homo"]), [0]).document
    assert document["ratios"]["coral"]["homo"]["published"] == {
        "cost_ratio": 1.62,
        "goodput_ratio": None,
        "section": "6.3",
    }
    text = evaluation_markdown(document)
    assert "arXiv 2605.04357" in text
    assert "one seed: no confidence interval" in text


def test_what_cannot_be_simulated_has_costs_and_no_service(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.evaluate.why_not_simulated", lambda _: "no timing")
    scenario = resolved(tmp_path)
    found = evaluate(source_of(scenario), scenario_policies(scenario, ["coral", "homo"]), [0])
    one = found.document["policies"]["coral"]
    assert one["cost_usd_per_h"] > 0
    assert one["goodput_tokens_per_s"] is one["attainment_frac"] is one["billed_usd_per_h"] is None
    assert one["notes"] == ["not simulated: no timing"]
    assert found.document["ratios"]["coral"]["homo"]["goodput_ratio"] is None
    assert "not simulated: no timing" in evaluation_markdown(found.document)


def test_a_policy_that_fails_midway_is_named_and_the_others_stand(tmp_path):
    scenario = resolved(tmp_path)
    policies = scenario_policies(scenario, ["coral", "homo"])
    calls = []

    def second_epoch_fails(problem):
        calls.append(problem)
        if len(calls) == 2:
            raise NoSolutionError("gave up", where="epoch 1")
        return policies["homo"].solve(problem)

    broken = replace(policies["homo"], solve=second_epoch_fails)
    found = evaluate(source_of(scenario), {**policies, "homo": broken}, [0])
    assert found.document["failed"] == {"homo": "epoch 1: gave up"}
    assert list(found.document["policies"]) == ["coral"]
    assert found.document["ratios"] == {"coral": {}}
    assert {row["policy"] for rows in found.tables.values() for row in rows} == {"coral"}
    calls.clear()
    with pytest.raises(NoSolutionError, match="gave up"):
        evaluate(source_of(scenario), {"homo": broken}, [0])


def test_distributions_are_those_of_the_runs(found):
    for name, one in found.document["policies"].items():
        rows = rows_of(found, "latencies", policy=name, model="phi-4", latency="ttft")
        assert {row["seed"] for row in rows} == {0}
        values = [row["value_s"] for row in rows]
        assert values == sorted(values)
        assert (rows[0]["frac"], rows[-1]["frac"]) == (0.0, 1.0)
        [service] = rows_of(found, "service", policy=name, seed=0, epoch=None, model="phi-4")
        median = next(row["value_s"] for row in rows if row["frac"] == 0.5)
        assert median == pytest.approx(service["ttft_p50_s"])
        assert {row["offered_requests"] for row in rows} == {service["offered_requests"]}
        assert rows[0]["measured_requests"] <= service["offered_requests"]
        assert one["digests"]


def test_an_evaluation_names_what_it_was_made_from(found):
    document = found.document
    assert document["nodes"]["1xL4"]["gpu"] == "L4"
    assert set(document["nodes"]["1xL4"]["price_usd_per_h"]) == {"us-east-2", "ap-northeast-2"}
    assert document["slos"] == {"phi-4": {"ttft_s": 1.2, "tpot_s": 0.25}}
    assert {one["name"] for one in document["libraries"].values()} == {"micro", "micro-lattice"}
    hashes = [*document["input_hashes"].values(), *(one["sha256"] for one in document["libraries"].values())]
    assert all(len(value) == 64 for value in hashes)
    assert len(set(hashes)) == len(hashes)


def test_every_table_says_what_kind_its_figures_are(found):
    titles = [table.title for table in evaluation_tables(found.document)]
    assert all("simulated" in title for title in titles)
    assert set(KINDS.values()) == {"predicted", "simulated", "measured on this machine"}
    text = evaluation_markdown(found.document)
    for name in found.document["policies"]:
        assert f"| {name} |" in text


def test_an_evaluation_is_recorded_whole(found):
    store = open_store("memory://evaluations-whole")
    arguments = {"document": found.document, "tables": found.tables, "report_md": "# x\n", "report_html": "<p>"}
    urls = write_evaluation(store, "micro", NOW, **arguments)
    assert urls == write_evaluation(store, "micro", NOW, **arguments)
    assert set(urls) == {"summary.json", "report.md", "report.html", *(f"{name}.parquet" for name in found.tables)}
    store.put("evaluations/micro/copy of mine/summary.json", b"{}")
    assert list_evaluations(store, "micro") == [NOW]
    summary = read_evaluation(store, "micro", NOW)
    assert summary["policies"]["coral"]["goodput_tokens_per_s"] == pytest.approx(
        found.document["policies"]["coral"]["goodput_tokens_per_s"]
    )
    for name, rows in found.tables.items():
        assert read_table(store, "micro", NOW, name).num_rows == len(rows)
    assert read_table(store, "micro", NOW, "epochs").to_pylist() == found.tables["epochs"]
    key = next(key for key in store.list_keys("evaluations") if key.endswith("epochs.parquet"))
    store.put(key, store.get(key.replace("epochs", "costs")))
    with pytest.raises(StoreError, match="not what its summary names"):
        read_table(store, "micro", NOW, "epochs")


def test_a_sweep_lies_beside_evaluations_and_is_none(caplog):
    store = open_store("memory://evaluations-sweep")
    assert latest_sensitivity(store, "micro") == []
    for day, templates in ((1, 5), (2, 7)):
        time = datetime(2026, 5, day, tzinfo=UTC)
        points = [{"model": "m", "templates": templates}]
        urls = write_sensitivity(store, "micro", time, points=points, chart_svg="<svg/>" if day == 1 else None)
        assert set(urls) == {"sensitivity.json", *(["sensitivity.svg"] if day == 1 else [])}
    assert latest_sensitivity(store, "micro") == [{"model": "m", "templates": 7}]
    newest = next(key for key in reversed(store.list_keys("evaluations")) if key.endswith("sensitivity.json"))
    for damaged in (b"", b"[]", b'{"schema_version": 9}'):
        store.put(newest, damaged)
        assert latest_sensitivity(store, "micro") == []
        assert "sensitivity is not shown" in caplog.text
        caplog.clear()
    assert list_evaluations(store, "micro") == []


def test_the_page_of_a_true_evaluation_is_whole(found):
    text = evaluation_html(found.document, found.tables, time="now")
    assert not faults(text)
    for name in found.document["policies"]:
        assert name in text
    assert "SLO 1.2 s" in text
    assert found.document["input_hashes"]["catalogue"] in text


@pytest.fixture
def coral(tmp_path, monkeypatch, capsys):
    """Run a command line in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_command_evaluates_and_records(coral, tmp_path):
    path = micro(tmp_path)
    code, out, err = coral("evaluate", path, "--policies", "coral", "homo", "--seeds", 3, 4, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["scenario"] == "micro"
    assert document["seeds"] == [3, 4]
    assert set(document["policies"]) == {"coral", "homo"}
    assert {"cost_usd_per_h", "goodput_tokens_per_s", "attainment_frac"} <= set(document["policies"]["coral"])
    store = open_store(str(tmp_path / ".coral" / "store"))
    [time] = list_evaluations(store, "micro")
    assert read_evaluation(store, "micro", time)["seeds"] == [3, 4]

    assert document["url"].endswith("/report.html")
    index = store.get("evaluations/micro/index.md").decode()
    assert "report.html" in index
    assert "[micro](micro/index.md)" in store.get("evaluations/index.md").decode()

    report = tmp_path / "here.html"
    code, out, _ = coral("evaluate", path, "--policies", "coral", "--seeds", "3", "--dry-run", "--report", report)
    assert code == 0
    assert not faults(report.read_text(encoding="utf-8"))
    assert "simulated" in out
    assert "nothing was recorded" in out
    assert len(list_evaluations(store, "micro")) == 1


def test_a_failed_policy_shows_in_the_exit_code(coral, tmp_path, monkeypatch):
    def fails(source, policy, **options):
        if policy.name == "homo":
            raise NoSolutionError("gave up", where="epoch 1")
        return plan_epochs(source, policy, **options)

    monkeypatch.setattr("tasks.evaluate.plan_epochs", fails)
    path = micro(tmp_path)
    code, out, err = coral("evaluate", path, "--policies", "coral", "homo", "--seeds", 1)
    assert code == 3
    assert "homo: failed: epoch 1: gave up" in err
    assert "policy homo failed and is in no figure: epoch 1: gave up" in out


def test_without_jinja2_all_but_the_page_is_recorded(coral, tmp_path, monkeypatch):
    monkeypatch.setattr("coral_core.report.page.can_render", lambda: False)
    path = micro(tmp_path)
    code, out, err = coral("evaluate", path, "--policies", "coral", "--seeds", 1, "--json")
    assert code == 0
    assert "no HTML report" in err
    assert json.loads(out)["url"].endswith("/report.md")
    code, _, err = coral("evaluate", path, "--policies", "coral", "--report", "x.html")
    assert code == 2
    assert "coral-serve[report]" in err


def test_the_command_simulates_one_policy(coral, tmp_path):
    path = micro(tmp_path)
    code, out, err = coral("simulate", path, "--policy", "homo", "--seed", 1, "--decode-utilization", "0.3", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["max_utilization_frac"]["decode"] == 0.3
    assert any("decode 0.3 of what" in note for note in evaluation_notes(document))
    assert list(document["policies"]) == ["homo"]
    assert len(document["tables"]["epochs"]) == 2
    again = json.loads(
        coral("simulate", path, "--policy", "homo", "--seed", 1, "--decode-utilization", "0.3", "--json")[1]
    )
    assert again["policies"]["homo"]["digests"] == document["policies"]["homo"]["digests"]
    code, out, _ = coral("simulate", path)
    assert code == 0
    assert "Epochs" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "{path}", "--policies", "korall"), "unknown policy 'korall'"),
        (("simulate", "{path}", "--policy", "helix"), "no fixed pool"),
        (("simulate", "{path}", "--prefill-utilization", "1.5"), "--prefill-utilization: 1.5 is not in (0, 1]"),
        (("evaluate", "no-such-scenario"), "unknown scenario"),
        (("evaluate", "{path}", "--report", "no-such/report.html"), "no such folder"),
        (("evaluate", "{path}", "--report", "."), "is a folder"),
    ],
)
def test_wrong_words_are_answered_in_one_line(coral, tmp_path, arguments, message):
    path = micro(tmp_path)
    code, out, err = coral(*(argument.format(path=path) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err
