"""A local Ray is quiet, private, and leaves nothing behind, however its run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tasks import fanout
from tasks.fanout import fan_out, ray_session
from tests.fakes.ray_processes import AGENTS, descendants, survivors
from tests.fakes.ray_work import double
from tests.fakes.waiting import PATIENT_S

pytestmark = pytest.mark.servers

SCRIPT = """
import sys
from tasks.fanout import fan_out
from tests.fakes.ray_processes import AGENTS, descendants, survivors
from tests.fakes.ray_work import Order, obey
actions = sys.argv[1:]
for outcome in fan_out([Order(i, action) for i, action in enumerate(actions)], obey, workers=2, max_in_flight=8):
    print(outcome.index, outcome.value, flush=True)
"""


@pytest.fixture
def bare_environment(tmp_path):
    """What a user's shell has: none of the settings that the tests' own environment makes."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
    home = tmp_path / "home"
    home.mkdir()
    return {**kept, "HOME": str(home)}


@pytest.fixture
def script(tmp_path, bare_environment):
    """Starts the script above with the given actions; a folder of its own for Ray tells its processes apart."""
    temporary = Path(tempfile.mkdtemp(prefix="ct-"))
    started = []

    def start(*actions):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *actions],
            env={**bare_environment, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    start.folder = temporary
    yield start
    for process in started:
        process.kill()
        process.communicate()
    subprocess.run(["rm", "-rf", str(temporary)], check=True)


def test_a_run_prints_nothing_of_its_own_and_leaves_nothing(script, bare_environment):
    # Ray would tell of the lost worker on stdout; the last takes 3 s, so that it is looked at before it ends.
    process = script("double", "die", "double", "sleep")
    first = process.stdout.readline()
    started = descendants(process.pid)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert sorted([first.strip(), *out.splitlines()]) == ["0 0", "1 None", "2 4", "3 None"]
    assert started
    assert survivors(started) == []
    assert list(script.folder.iterdir()) == []
    assert list(Path(bare_environment["HOME"]).iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ending_the_caller_ends_ray(script, how):
    process = script("double", "sleep-long")
    assert process.stdout.readline() == "0 0\n"
    started = descendants(process.pid)
    assert {"raylet", "gcs_server"} <= {child.name() for child in started}
    listening = [
        connection.laddr.ip
        for child in started
        for connection in child.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    process.send_signal(how)
    assert process.wait(timeout=PATIENT_S) != 0
    allowed = AGENTS if how == signal.SIGKILL else set()
    assert survivors(started, but=allowed) == []


def test_a_cluster_without_any_cpu_is_given_up_and_items_are_recorded(monkeypatch):
    monkeypatch.setattr(fanout, "NO_WORKERS_LIMIT_S", 1.5)
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        with ray_session(workers=0):
            assert signal.getsignal(signal.SIGTERM) is handler
            outcomes = list(fan_out([1, 2, 3], double, max_in_flight=2))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert sorted(outcome.index for outcome in outcomes) == [0, 1, 2]
    assert {outcome.failure.kind for outcome in outcomes} == {"no_workers"}
