"""The program that measures on a node, over HTTP, with steps that follow a closed form in the place of an engine."""

from __future__ import annotations

import pytest

from coral_core.domain.launch import NodeLaunch
from coral_core.domain.workload import Phase
from coral_core.engine.process import start_engine
from coral_core.engine.state import Condition
from coral_core.errors import InputError, MeasurementError
from coral_core.perf.profiling import Shot
from tasks.local_serving import free_ports
from tasks.measure import HttpEngines
from tests.fakes.profile_interpreter import DIES, interpreter
from tests.fakes.waiting import PATIENT_S

pytestmark = pytest.mark.servers

SHOT = Shot(tp=1, layers=2, phase=Phase.DECODE, requests=4, tokens=64)


@pytest.fixture
def served(tmp_path):
    """Starts the program with flags and variables; its address."""
    started = []

    def serve(*flags: str, **env: str) -> str:
        (port,) = free_ports(1)
        argv = ("-m", "coral_core.engine.plugin.profile_server", "--port", str(port), "MODEL", *flags)
        engine = start_engine(
            NodeLaunch(node="0", argv=argv, env=env, ports=(port,), serves=True),
            interpreter=interpreter(tmp_path),
            log=tmp_path / "log",
            owner="test-profile-server",
            url=f"http://127.0.0.1:{port}",
        )
        started.append(engine)
        state = engine.wait(PATIENT_S)
        assert state.condition is Condition.READY, state
        return f"http://127.0.0.1:{port}"

    yield serve
    for engine in started:
        engine.stop(5.0)


def test_one_engine_after_another_is_measured(served):
    engines = HttpEngines(served(), version="0.32.0")
    for layers in (2, 4):
        start = engines.open(1, layers, within_s=PATIENT_S)
        assert (start.layers, start.kv_tokens) == (layers, 8000 // layers)
        assert start.start_s > 0
        shot = Shot(tp=1, layers=layers, phase=Phase.DECODE, requests=4, tokens=64)
        samples = engines.measure(shot, 3, within_s=PATIENT_S)
        assert samples == (pytest.approx(0.01 + layers * (2e-3 + 8e-4 + 2.56e-4)),) * 3
    engines.close()
    with pytest.raises(MeasurementError, match="no engine is open"):
        engines.measure(SHOT, 3, within_s=PATIENT_S)


def test_an_engine_that_does_not_start_is_told_with_its_last_words(served):
    with pytest.raises(MeasurementError, match=r"ended with 3: .*no such device"):
        HttpEngines(served("--refuse")).open(1, 2, within_s=PATIENT_S)


def test_an_engine_that_dies_is_told(served):
    engines = HttpEngines(served(**{DIES: "1"}))
    engines.open(1, 2, within_s=PATIENT_S)
    engines.measure(SHOT, 3, within_s=PATIENT_S)
    with pytest.raises(MeasurementError, match="ended with 9"):
        engines.measure(SHOT, 3, within_s=PATIENT_S)


def test_another_version_is_not_measured(served):
    with pytest.raises(MeasurementError, match=r"runs version 0\.32\.0, not 0\.33\.0"):
        HttpEngines(served(), version="0.33.0").open(1, 2, within_s=PATIENT_S)


def test_questions_that_are_none_are_refused(served):
    url = served()
    engines = HttpEngines(url)
    engines.open(1, 2, within_s=PATIENT_S)
    with pytest.raises(MeasurementError, match="KeyError"):
        engines._post("/nothing", {}, PATIENT_S)
    with pytest.raises(MeasurementError, match="KeyError"):
        engines._post("/open", {"tp": 1}, PATIENT_S)


def test_a_node_that_is_not_there():
    (port,) = free_ports(1)
    with pytest.raises(MeasurementError, match="does not answer"):
        HttpEngines(f"http://127.0.0.1:{port}").open(1, 2, within_s=5.0)


def test_a_refusal_of_the_engine_is_an_input_error(monkeypatch):
    engines = HttpEngines("http://127.0.0.1:1")
    monkeypatch.setattr(HttpEngines, "_post", lambda *_: {"refused": "too many"})
    with pytest.raises(InputError, match="too many"):
        engines.measure(SHOT, 3, within_s=1.0)
