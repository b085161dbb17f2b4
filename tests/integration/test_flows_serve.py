"""`coral flows serve` as a user starts it: an own server, a schedule that fires, events, notices, and a clean end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import psutil
import pytest

from artifacts.demand import append_demand
from artifacts.plans import list_plans
from artifacts.store import open_store
from coral_core.clock import SystemClock
from coral_core.config.demand import DemandSpec
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import Settings
from coral_core.forecast import DemandSample
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.providers import open_provider
from tasks.watch import Watched, WatchPolicy, keep_watch, look
from tests.fakes.control_processes import free_ports
from tests.fakes.waiting import PATIENT_S, until

pytestmark = [
    pytest.mark.servers,
    pytest.mark.timeout(1200),  # the fixtures start a server and wait for runs, each a process that imports the world
    # Prefect leaves sockets to the garbage collector, and in 3.9 uses what its own dependencies deprecate.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def await_(what, found):
    return until(found, what, within_s=240.0, look_s=0.3)


@pytest.fixture(scope="module")
def webhook():
    """A receiver of notices: its URL and what it was told."""
    told = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", told
    server.shutdown()
    server.server_close()


class Served:
    """`coral flows serve` in a process of its own, in a folder with a library of `tiny`."""

    def __init__(self, folder, notify, *, build=True):
        self.folder, self.port = folder, free_ports(1)[0]
        self.store = open_store(str(folder / "store"))
        if build:
            spec = build_spec_from_scenario(resolve_scenario(load_scenario("tiny")))
            build_library(spec, self.store, InlineExecutor())
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.log = (folder / "serve.log").open("wb")
        environment = {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
            "CORAL_STORE": self.store.url,
            "CORAL_NOTIFY": notify,
            "CORAL_FLEET": "blue",
        }
        command = "from coral_core.cli.entry import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, "flows", "serve", "--port", str(self.port), "--every", "5"],
            env=os.environ | environment,
            cwd=folder,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def end(self):
        """By a signal that it can act on: killed outright, it would leave its server behind."""
        self.process.terminate()
        try:
            self.process.wait(timeout=120)
        finally:
            self.process.kill()
            self.log.close()

    def said(self):
        return (self.folder / "serve.log").read_text()

    def await_said(self, text):
        await_(text, lambda: text in self.said() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()

    def ask(self, path, **body):
        """The answer of the API; its small database says 503 while somebody else writes."""
        answer = await_(path, lambda: (a := self._post(path, body)).status_code != 503 and a)
        answer.raise_for_status()
        return answer.json()

    def _post(self, path, body):
        return httpx.post(f"{self.api}/{path}", json=body, timeout=PATIENT_S)

    def rests(self):
        """No run is under way or due; the scheduler may have made some more while it was being switched off."""
        for run in self.runs("SCHEDULED"):
            httpx.delete(f"{self.api}/flow_runs/{run['id']}", timeout=PATIENT_S)
        return not self.runs("RUNNING", "PENDING", "SCHEDULED")

    def deployment(self):
        (found,) = self.ask("deployments/filter", deployments={"name": {"any_": ["reallocate"]}})
        return found

    def runs(self, *states):
        chosen = {"state": {"type": {"any_": list(states)}}} if states else None
        return self.ask("flow_runs/filter", flow_runs=chosen, sort="START_TIME_ASC", limit=200)


@pytest.fixture(scope="module")
def served(tmp_path_factory, webhook):
    found = Served(tmp_path_factory.mktemp("served"), webhook[0])
    try:
        found.await_said("Ctrl-C ends")
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def quiet(served):
    """The schedule has fired, is switched off, and nothing is under way."""
    await_("two scheduled runs", lambda: len(served.runs("COMPLETED")) >= 2)
    found = served.deployment()
    (schedule,) = found["schedules"]
    path = f"{served.api}/deployments/{found['id']}/schedules/{schedule['id']}"
    # The small database answers 503 while somebody else writes.
    await_("switching off", lambda: httpx.patch(path, json={"active": False}, timeout=PATIENT_S).is_success)
    await_("rest", served.rests)
    return served


def test_the_schedule_fires_by_itself_again_and_again_and_never_twice_at_once(quiet):
    done = quiet.runs("COMPLETED")
    scheduled = [run for run in done if (run["created_by"] or {}).get("type") == "SCHEDULE"]
    assert len(scheduled) >= 2
    assert all("auto-scheduled" in run["tags"] for run in scheduled)
    assert all(earlier["end_time"] <= later["start_time"] for earlier, later in itertools.pairwise(scheduled))
    # Other tests ask this server for runs too, some of which are to fail.
    failed = [run for run in quiet.runs("FAILED", "CRASHED") if (run["created_by"] or {}).get("type") == "SCHEDULE"]
    assert not failed
    assert len(scheduled) <= len(list_plans(quiet.store, "blue")) <= len(done)


class EnoughError(Exception):
    """Ends a watch that would go on for ever."""


def test_news_that_the_watch_sees_starts_one_run_at_once(quiet, tmp_path):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.events import PrefectRuns

    resolved = resolve_scenario(load_scenario("tiny"))
    provider = open_provider(Settings(rehearsal=tmp_path / "rehearsal"))
    watched = Watched(resolved=resolved, store=quiet.store, fleet="blue", provider=provider, demand=DemandSpec())
    before = {run["id"] for run in quiet.runs()}
    said, looks = [], itertools.count()

    def sleep(duration_s):
        time.sleep(duration_s)
        if runs.seen(time.time()).last_start_s > begun_s and next(looks) == 5:
            raise EnoughError

    with temporary_settings({PREFECT_API_URL: quiet.api}):
        runs = PrefectRuns("blue")
        assert not runs.seen(time.time()).running
        PrefectRuns("green").ask([])  # of another fleet
        begun_s = time.time()
        asked = DemandSample(time_s=begun_s, duration_s=60, model="phi-4", requests_per_s=1000.0)
        append_demand(quiet.store, "blue", [asked], source="gateway")
        policy = WatchPolicy(poll_s=1.0, window_s=40.0)
        with pytest.raises(EnoughError):  # a few looks after the run has begun
            keep_watch(lambda: look(watched), runs, policy, clock=SystemClock(), sleep=sleep, say=said.append)
        await_("the run's end", lambda: (s := runs.seen(time.time())).last_start_s > begun_s and not s.running)
    new = [run for run in quiet.runs() if run["id"] not in before]
    assert [(run["created_by"]["type"], run["state"]["type"]) for run in new] == [("AUTOMATION", "COMPLETED")]
    assert new[0]["parameters"]["params"]["fleet"] == "blue"
    assert said[0].startswith("demand-above-plan: phi-4: 1e+03 requests/s are asked for, the plan holds ")
    assert said.count("asked for a run because of 1 piece of news") == 1


def test_failed_runs_and_shortfalls_are_told(quiet, webhook):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.events import SHORTFALL, emit

    told = webhook[1]
    quiet.ask(
        f"deployments/{quiet.deployment()['id']}/create_flow_run",
        parameters={"params": {"scenario": "no-such-scenario"}},
        state={"type": "SCHEDULED"},
    )
    await_("a notice of the failure", lambda: [t for t in told if "failed" in t["subject"]])
    failure = next(t for t in told if "failed" in t["subject"])
    assert failure["subject"] == "Coral: reallocate-no-such-scenario failed"
    assert "unknown scenario 'no-such-scenario'" in failure["body"]
    assert "/runs/flow-run/" in failure["body"]
    with temporary_settings({PREFECT_API_URL: quiet.api}):
        emit(SHORTFALL, "blue", {"fleet": "blue", "text": "phi-4: 30% is not met", "plan": "s3://b/plan.json"})
    await_("a notice of the shortfall", lambda: [t for t in told if "falls short" in t["subject"]])
    shortfall = next(t for t in told if "falls short" in t["subject"])
    assert shortfall["text"] == "Coral: fleet blue falls short\nphi-4: 30% is not met\ns3://b/plan.json"


def test_automations_are_made_once_and_stay_switched_off(quiet, webhook):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.automations import install_automations

    def automations():
        return {a["name"]: a for a in quiet.ask("automations/filter")}

    names = {
        "coral: plan fleet blue anew on news",
        "coral: build the library anew on new profiles",
        "coral: tell of failed runs",
        "coral: tell of shortfalls",
    }
    first = automations()
    assert set(first) == names
    off = first["coral: tell of failed runs"]["id"]
    path = f"{quiet.api}/automations/{off}"
    await_("switching off", lambda: httpx.patch(path, json={"enabled": False}, timeout=PATIENT_S).is_success)
    with temporary_settings({PREFECT_API_URL: quiet.api}):
        install_automations(fleet="blue", notify="custom-webhook/coral-notifications")
        again = automations()
        assert {name: a["id"] for name, a in again.items()} == {name: a["id"] for name, a in first.items()}
        assert [a["name"] for a in again.values() if not a["enabled"]] == ["coral: tell of failed runs"]
        with pytest.raises(Exception, match=r"no block 'ops' of type 'slack-webhook'.*Blocks page"):
            install_automations(fleet="blue", notify="slack-webhook/ops")
        assert "CORAL_NOTIFY" in install_automations(fleet="blue", notify="")[-1]
        assert set(automations()) == {
            "coral: plan fleet blue anew on news",
            "coral: build the library anew on new profiles",
        }
        install_automations(fleet="blue", notify=webhook[0])  # the other tests of this file need them
    assert [a["enabled"] for a in automations().values()] == [True] * 4


def test_the_form_says_what_each_field_is_for(quiet):
    found = quiet.deployment()
    models = found["parameter_openapi_schema"]["definitions"]
    fields = models["ReallocateParameters"]["properties"]
    assert next(iter(fields)) == "scenario"
    told = {
        name: field.get("description") or models[field["$ref"][14:]]["description"] for name, field in fields.items()
    }
    assert all(told.values())
    assert fields["mode"]["enum"] == ["plan", "approve", "apply"]
    assert found["parameters"]["params"] == {"scenario": "tiny", "mode": "plan", "fleet": "blue"}


def test_an_interrupt_ends_all_that_was_started(tmp_path):
    served = Served(tmp_path, "", build=False)
    try:
        served.await_said("Beginning flow run")
        started = psutil.Process(served.process.pid).children(recursive=True)
        assert any("prefect" in " ".join(child.cmdline()) for child in started)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=PATIENT_S) == 0, served.said()
    finally:
        served.end()
    _, alive = psutil.wait_procs(started, timeout=PATIENT_S)
    assert alive == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.api}/health")
    assert "nobody is told of failures and shortfalls but the logs" in served.said()


def test_a_port_that_is_taken_and_a_schedule_that_is_none_are_told(monkeypatch):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from coral_core.errors import InputError
    from flows.deployments import reallocate_schedule
    from flows.server import server_at_hand

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            temporary_settings(restore_defaults={PREFECT_API_URL}),
            pytest.raises(InputError, match=r"--port: port \d+ cannot be used"),
            server_at_hand(taken.getsockname()[1]),
        ):
            pass
    assert reallocate_schedule("") is None
    assert reallocate_schedule("90").interval.total_seconds() == 90
    assert reallocate_schedule("*/5 * * * *").cron == "*/5 * * * *"
    for wrong in ("often", "0", "nan", "1e999", "* * *"):
        with pytest.raises(InputError, match="--every"):
            reallocate_schedule(wrong)
