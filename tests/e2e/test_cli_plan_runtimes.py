"""Plans from what a runtime can run, from the command line: what they cost, what they leave out, and how to start one."""

from __future__ import annotations

import json

import pytest

from artifacts.library import open_library
from artifacts.plans import read_plan
from artifacts.store import open_store
from coral_core.cli.entry import run
from coral_core.clock import SystemClock
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.allocation import Running
from coral_core.domain.launch import Runtime
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.plan import make_plan
from tests.fakes.tiny_text import tiny_without_headroom

ENGINE = """device: cuda
models:
  phi-4: {bf16: {path: /models/phi-4, max_model_len_tokens: 8192}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The scenarios `free.yaml` and `stock.yaml`: `tiny`, smaller still, of one model and two nodes a template; one library for both."""
    text = tiny_without_headroom().replace("n_max: 3", "n_max: 2").replace("name: tiny", "name: small")
    head, _, tail = text.partition("  - model: gpt-oss-20b")
    text = head + tail[tail.index("library:") :]
    path = tmp_path_factory.mktemp("runtimes")
    (path / "free.yaml").write_text(text)
    (path / "stock.yaml").write_text(text + "runtimes: [vllm]\n")
    (path / "engine.yaml").write_text(ENGINE)
    resolved = resolve_scenario(load_scenario(str(path / "stock.yaml")))
    store = open_store((path / ".coral/store").as_uri())
    build_library(build_spec_from_scenario(resolved), store, InlineExecutor())
    return path


@pytest.fixture
def coral(folder, monkeypatch, capsys):
    """Run a command line in the folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder)

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def restrictions(decision):
    return {tuple(item["runtimes"] or ()): item for item in decision["runtimes"]["restrictions"]}


def test_a_plan_for_a_runtime_uses_what_it_runs_and_says_what_that_costs(coral, folder):
    code, out, _ = coral("plan", "--scenario", "stock.yaml")
    assert code == 0
    assert "note: only what vllm can run is used (" in out
    assert "What may be relied on" in out
    store = open_store((folder / ".coral/store").as_uri())
    stored = read_plan(store, "default")
    assert stored.decision["runtimes"]["allowed"] == ["vllm"]
    assert {item["runtime"] for item in stored.plan["instances"]} == {"vllm"}
    assert all(
        len(layouts) == len(stage["nodes"])
        for item in stored.plan["instances"]
        for stage in item["stages"]
        for layouts in [stage["layouts"]]
    )
    found = restrictions(stored.decision)
    own, free = found["vllm",], found[()]
    assert own["templates"] < free["templates"]
    assert own["extra_usd_per_h"] == pytest.approx(own["objective_usd_per_h"] - free["objective_usd_per_h"], abs=1e-9)
    assert stored.plan["objective_usd_per_h"] == own["objective_usd_per_h"]
    assert max(free["objective_usd_per_h"], 0.01) <= found["vllm", "coral"]["objective_usd_per_h"]
    for page in (stored.report_md, next((folder / ".coral").rglob("report.html")).read_text()):
        assert "vllm (this plan)" in page
    assert coral("plan", "replay")[0] == 0

    snapshot = open_library(store, "small")
    left_out = next(row["template_id"] for row in snapshot.read().to_pylist() if len(row["stage_nodes"][0]) > 1)
    code, out, _ = coral("plan", "explain", "--template", left_out)
    assert code == 0
    assert f"{left_out} is not in the plan:\n- not runnable because a stage has several nodes (vllm)" in out
    chosen = stored.plan["instances"][0]["template"]
    assert f"{chosen} is in the plan" in coral("plan", "explain", "--template", chosen)[1]


def test_an_unrestricted_plan_says_how_much_of_it_nothing_runs(coral):
    code, out, _ = coral("plan", "--scenario", "free.yaml", "--json", "--dry-run")
    plan = json.loads(out)
    assert code == 0
    lost = [item for item in plan["instances"] if item["runtime"] is None]
    notes = [note for note in plan["notes"] if "no runtime can run" in note]
    assert len(notes) == (1 if lost else 0)
    assert all("coral" in item["not_runnable"] for item in lost)
    if lost:
        assert notes[0].startswith(f"{sum(item['count'] for item in lost)} instances")


def test_what_runs_and_may_not_be_relied_on_is_stopped_and_said_so(folder):
    store = open_store((folder / ".coral/store").as_uri())
    snapshot = open_library(store, "small")
    resolved = resolve_scenario(load_scenario(str(folder / "stock.yaml")))
    region = resolved.scenario.regions[0]
    wide = next(row["template_id"] for row in snapshot.read().to_pylist() if len(row["stage_nodes"][0]) > 1)
    plan = make_plan(
        resolved,
        snapshot,
        fleet="f",
        now=SystemClock().now(),
        running=[Running(template=wide, region=region, count=2)],
    ).plan
    assert {"template": wide, "region": region, "running": 2, "planned": 0} in plan["changes"]
    assert "2 running instances are of templates that vllm cannot run: the plan stops them" in plan["notes"]
    nothing = make_plan(resolved, snapshot, fleet="f", now=SystemClock().now(), runtimes=[Runtime.CORAL])
    assert nothing.decision["runtimes"]["allowed"] == ["coral"]


def test_the_commands_of_an_instance_are_shown(coral, folder):
    assert coral("plan", "--scenario", "stock.yaml")[0] == 0
    store = open_store((folder / ".coral/store").as_uri())
    item = next(i for i in read_plan(store, "default").plan["instances"] if i["phase"] == "decode")
    ask = ("plan", "launch", "--engine", "engine.yaml", "--template", item["template"])
    code, out, _ = coral(*ask, "--host", "10.1.1.1", "--first-port", "9000", "--json")
    plan = json.loads(out)
    [node] = plan["nodes"]
    assert code == 0
    assert (plan["model"], plan["phase"], plan["runtime"], plan["url"]) == (
        "phi-4",
        "decode",
        "vllm",
        "http://10.1.1.1:9000",
    )
    assert node["argv"][2:4] == ["serve", "/models/phi-4"]
    assert node["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.1.1.1"
    code, out, _ = coral(*ask)
    assert code == 0
    assert "VLLM_HOST_IP=127.0.0.1" in out
    assert "serve /models/phi-4 --served-model-name phi-4" in out
    for extra, what in (
        (("--host", "a", "--host", "b"), "the template has 1 nodes"),
        (("--template", "nothing"), "unknown template"),
    ):
        code, _, err = coral(*ask, *extra) if extra[0] == "--host" else coral(*ask[:4], *extra)
        assert code == 2
        assert what in err
    code, _, err = coral(*ask[:4])
    assert (code, "templates" in err) == (2, True)
