"""The flows on a Prefect server: runs, artifacts, forms, and deployments that are served."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest

from artifacts.library import newest_version, open_library
from artifacts.plans import PLAN, read_plan
from artifacts.store import open_store
from coral_core.errors import DataGapError, InputError
from coral_core.report.figures import usd
from coral_core.report.plan_report import headline
from tests.fakes.ray_processes import AGENTS, descendants, survivors
from tests.fakes.waiting import PATIENT_S, until

pytestmark = [
    pytest.mark.servers,
    # Prefect leaves sockets to the garbage collector, and in 3.9 uses what its own dependencies deprecate.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server():
    """A Prefect server of its own; the URL of its API."""
    from prefect.logging.configuration import setup_logging
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    # Else the first flow run does it, in the middle of a test, whose `caplog` then hears nothing more.
    setup_logging()
    with prefect_test_harness(server_startup_timeout=300):
        yield get_current_settings().api.url
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def build(store, **parameters):
    from flows.build_library import build_library
    from flows.parameters import BuildLibraryParameters

    settings = {"store": store.url, "executor": "inline"}
    return build_library(BuildLibraryParameters(**settings | parameters))


def artifact(key):
    from prefect.artifacts import Artifact

    found = Artifact.get(key)
    assert found is not None, f"no artifact {key}"
    return found


def run_artifacts(flow_name):
    """All artifacts of the newest run of a flow, newest first."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        flows = FlowFilter(name={"any_": [flow_name]})
        (run,) = client.read_flow_runs(flow_filter=flows, sort=FlowRunSort.START_TIME_DESC, limit=1)
        answer = client.request(
            "POST", "/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [str(run.id)]}}, "limit": 100}
        )
        return run, answer.json()


def test_a_build_is_shown_while_it_runs_and_when_it_is_done(server, store):
    from flows.build_library import watched_by

    seen = []
    with watched_by(seen.append):
        version = build(store, executor="ray", workers=2)
    manifest = open_library(store, "tiny").manifest
    assert (version, manifest.version, manifest.shards_failed) == (1, 1, 0)
    assert seen[0].done == 0
    assert (seen[-1].done, seen[-1].rows) == (manifest.shards_expected, manifest.rows)

    run, artifacts = run_artifacts("build-library")
    assert run.name == "build-library-tiny"
    assert run.state.is_completed()
    assert artifact("library-tiny-progress").data == 100.0
    table = json.loads(artifact("library-tiny").data)
    assert sum(row["templates"] for row in table) == manifest.rows
    assert {row["phase"] for row in table} == {"prefill", "decode"}
    links = "\n".join(str(item["data"]) for item in artifacts if item["type"] == "markdown")
    assert store.url_of("libraries/tiny/manifests/00000000000000000001.json") in links


def test_a_second_build_reuses_all_and_starts_no_executor(server, store):
    assert build(store, lattice_parts=2) == 1
    assert build(store, lattice_parts=2, executor="ray", ray_address="127.0.0.1:9") == 2
    assert open_library(store, "tiny").manifest.shards_expected == 12
    assert open_library(store, "tiny", 1).manifest.shards == open_library(store, "tiny", 2).manifest.shards


def test_a_build_whose_shards_fail_is_a_failed_run_that_shows_them(server, store, monkeypatch):
    from coral_core.errors import NoSolutionError, SolverError

    def fail(spec, store_url):
        raise SolverError("no licence", where=spec.table.model)

    monkeypatch.setattr("tasks.library.solve_shard", fail)
    with pytest.raises(NoSolutionError, match="no licence"):
        build(store)
    run, _ = run_artifacts("build-library")
    assert run.state.is_failed()
    assert "no licence" in run.state.message
    assert {row["error"] for row in json.loads(artifact("library-tiny-failures").data)} >= {"phi-4: no licence"}


def test_a_flow_killed_in_the_middle_is_finished_by_another_run(server, store):
    from flows.build_library import watched_by

    script = "import sys; from tests.fakes.ray_build import slow_flow; slow_flow(sys.argv[1], 1.5)"
    environment = os.environ | {"PREFECT_API_URL": server, "TMPDIR": os.environ["RAY_TMPDIR"]}
    flow = subprocess.Popen([sys.executable, "-c", script, store.url], env=environment)
    children = []
    try:
        until(lambda: len(store.list_keys("libraries/tiny/data")) >= 2, "two shards", within_s=240.0)
        children = descendants(flow.pid)
    finally:
        flow.kill()
        flow.wait()
    assert survivors(children, but=AGENTS) == []
    assert newest_version(store, "tiny") == 0
    seen = []
    with watched_by(seen.append):
        assert build(store) == 1
    assert 2 <= seen[0].reused < seen[0].total
    assert (seen[-1].done, seen[-1].failed) == (seen[-1].total, 0)


def test_an_unknown_scenario_is_a_failed_run_with_one_line(server, store):
    with pytest.raises(InputError, match="unknown scenario 'tinny'"):
        build(store, scenario="tinny")


def test_a_plan_is_recorded_shown_and_logged(server, store, caplog):
    from flows.parameters import ReallocateParameters
    from flows.reallocate import reallocate

    with pytest.raises(InputError, match="no such library"):
        reallocate(ReallocateParameters(store=store.url, fleet="blue"))
    build(store)
    url = reallocate(ReallocateParameters(store=store.url, fleet="blue")).plan_url
    stored = read_plan(store, "blue")
    assert url == stored.record.urls[PLAN]
    table = json.loads(artifact("plan-blue").data)
    assert (table[-1]["model"], table[-1]["USD/h all"]) == ("total", usd(stored.plan["cost_usd_per_h"]))
    assert [row["template"] for row in table[:-1]] == [item["template"] for item in stored.plan["instances"]]
    assert artifact("plan-blue-report").data == stored.report_md
    run, artifacts = run_artifacts("reallocate")
    assert any(url in str(item["data"]) for item in artifacts)
    assert run.name == "reallocate-tiny"
    assert f"plan of fleet blue: {headline(stored.plan)}" in caplog.text

    reallocate(ReallocateParameters(store=store.url, fleet="blue", keep_running=True))
    again = read_plan(store, "blue")
    assert again.record.time > stored.record.time
    assert again.decision["running"] != []
    assert again.plan["churn_usd_per_h"] == 0


def test_a_plan_from_a_library_of_other_inputs_is_refused(server, store, tmp_path):
    from coral_core.config.scenario import scenario_text
    from flows.parameters import ReallocateParameters
    from flows.reallocate import reallocate

    build(store)
    other = tmp_path / "other.yaml"
    other.write_text(scenario_text("tiny").replace("ttft_s: 1.2", "ttft_s: 1.3"))
    with pytest.raises(DataGapError, match=r"phi-4 bf16 prefill has changed.*library build"):
        reallocate(ReallocateParameters(store=store.url, scenario=str(other)))


@pytest.fixture(scope="module")
def served(server, tmp_path_factory):
    """`serve_all` in a process of its own, as `coral flows serve` runs it."""
    folder = tmp_path_factory.mktemp("served")
    process = subprocess.Popen(
        [sys.executable, "-c", "from flows.deployments import serve_all; serve_all(limit=1)"],
        env=os.environ | {"PREFECT_API_URL": server, "PREFECT_RUNNER_POLL_FREQUENCY": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield folder
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENT_S)


def read_deployment(name):
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    def read():
        with contextlib.suppress(ObjectNotFound):
            return client.read_deployment_by_name(name)

    with get_client(sync_client=True) as client:
        return until(read, f"deployment {name}", look_s=0.5)


def test_deployments_have_a_form_and_run_from_the_server(served):
    from prefect.client.orchestration import get_client
    from prefect.deployments import run_deployment
    from prefect.exceptions import PrefectHTTPStatusError

    plan = read_deployment("reallocate/reallocate")
    assert [schedule.active for schedule in plan.schedules] == [False]
    assert plan.global_concurrency_limit.limit == 1
    deployment = read_deployment("build-library/build-library")
    form = deployment.parameter_openapi_schema["definitions"]["BuildLibraryParameters"]["properties"]
    assert form["executor"]["enum"] == ["ray", "inline"]
    assert "tiny" in form["scenario"]["examples"]
    assert all(field["description"] for field in form.values())

    with get_client(sync_client=True) as client, pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
        client.create_flow_run_from_deployment(deployment.id, parameters={"params": {"workers": 0}})

    run = run_deployment(
        "build-library/build-library", parameters={"params": {"executor": "inline"}}, timeout=240, poll_interval=1
    )
    assert run.state.is_completed(), run.state
    assert open_library(open_store(str(served / ".coral" / "store")), "tiny").manifest.version == 1


def test_serving_without_a_server_names_the_fix(monkeypatch):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.deployments import require_server

    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(
            InputError, match=r"no Prefect server answers at http://127\.0\.0\.1:9/api.*prefect server start"
        ),
    ):
        require_server()
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(InputError, match="PREFECT_API_URL: no Prefect server is set"),
    ):
        require_server()
