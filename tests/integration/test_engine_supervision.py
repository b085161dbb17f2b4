"""Engine processes from launch to end, with a program in vLLM's place: nothing outlives its owner, whoever dies how."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from itertools import count
from pathlib import Path

import pytest

from coral_core.domain.launch import NodeLaunch
from coral_core.engine.kept import MARK_VARIABLE, end_left_behind
from coral_core.engine.liveness import LivenessTerms
from coral_core.engine.process import EngineProcess, WatchTerms, start_engine, watch_terms
from coral_core.engine.state import Cause, Condition, StartStep
from coral_core.errors import InputError, ServingError

PROGRAM = Path(__file__).resolve().parents[1] / "fakes" / "engine_program.py"
LOGS = PROGRAM.parent / "engine_logs"
QUICK = WatchTerms(
    start_s=20.0, look_s=0.1, liveness=LivenessTerms(probe_after_s=0.3, hung_after_s=0.9, gone_after_s=0.9)
)


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def until(holds, timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return holds()


class Case:
    """Engines of one test; all of them are ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = f"test-{folder.name}-{os.getpid()}"
        self.engines: list[EngineProcess] = []

    def start(
        self, *words: object, terms: WatchTerms = QUICK, serves: bool = True, interpreter: str = sys.executable
    ) -> EngineProcess:
        self.port = free_port()
        launch = NodeLaunch(
            node="n1",
            argv=("-I", "-S", str(PROGRAM), str(self.port), *map(str, words)),
            env={"SAID": "yes"},
            ports=(self.port,),
            serves=serves,
        )
        url = f"http://127.0.0.1:{self.port}" if serves else None
        log = self.folder / "logs" / "engine.log"
        engine = start_engine(launch, interpreter=Path(interpreter), log=log, owner=self.owner, url=url, terms=terms)
        self.engines.append(engine)
        return engine

    def ready(self, *words: object, **options) -> EngineProcess:
        engine = self.start(*words, **options)
        state = engine.wait(20.0)
        assert state.condition is Condition.READY, state
        return engine

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5.0) as answer:
            return answer.read().decode()


@pytest.fixture
def case(tmp_path):
    case = Case(tmp_path)
    yield case
    for engine in case.engines:
        engine.stop(0.0)
    assert end_left_behind(case.owner) == ()


def test_an_engine_becomes_ready_by_a_completion_serves_and_ends(case):
    engine = case.ready()
    steps = [step for step, _ in engine.state.reached]
    assert steps == [StartStep.LAUNCHED, StartStep.IMPORTED, StartStep.WEIGHTS, StartStep.HTTP, StartStep.ANSWERED]
    assert engine.state.step is StartStep.ANSWERED
    assert until(lambda: engine.sample is not None and engine.sample.running_requests == 0.0)
    environment = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
    assert b"SAID=yes" in environment
    assert any(variable.startswith(f"{MARK_VARIABLE}={case.owner}#".encode()) for variable in environment)
    began_s = time.monotonic()
    assert engine.stop(5.0).condition is Condition.ENDED
    assert time.monotonic() - began_s < 4.0
    assert engine.state.exit_code == -signal.SIGTERM
    assert not alive(engine.pid)


def test_stop_may_be_repeated_from_several_threads(case):
    engine = case.ready()
    threads = [threading.Thread(target=engine.stop, args=(5.0,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert engine.stop(5.0).condition is Condition.ENDED


@pytest.mark.parametrize("stopped", [False, True])
def test_who_ignores_sigterm_is_killed_after_its_grace_with_all_it_started(case, stopped):
    engine = case.ready("deaf", "children")
    child = int(case.get("/child"))
    if stopped:
        os.kill(engine.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    state = engine.stop(0.6)
    assert 0.6 <= time.monotonic() - began_s < 5.0
    assert state.exit_code == -signal.SIGKILL
    assert not alive(engine.pid)
    assert not alive(child)


def test_what_a_dead_engine_left_in_another_session_goes_at_once(case):
    engine = case.ready("children")
    child = int(case.get("/child"))
    os.kill(engine.pid, signal.SIGKILL)
    assert until(lambda: engine.state.final)
    assert engine.state.failure.cause is Cause.KILLED
    assert "signal 9" in engine.state.failure.what
    assert not alive(child)
    assert engine.stop(1.0).condition is Condition.FAILED


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from coral_core.domain.launch import NodeLaunch
from coral_core.engine.process import start_engine
port, program, folder, owner = int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
launch = NodeLaunch(node="n", argv=("-I", "-S", program, str(port), "children", *sys.argv[6:]), env={}, ports=(port,), serves=True)
engine = start_engine(launch, interpreter=Path(sys.executable), log=folder / "log", owner=owner, url=f"http://127.0.0.1:{port}")
engine.wait(20.0)
print(engine.pid, engine._kept._keeper.pid, flush=True)
time.sleep(600)
"""


def owned(case, *words: str) -> tuple[subprocess.Popen[str], int, int, int]:
    """An owner in a process of its own with a ready engine: owner, keeper, engine, the engine's child."""
    case.port = free_port()
    root = Path(__file__).resolve().parents[2]
    arguments = [str(root), str(case.port), str(PROGRAM), str(case.folder), case.owner, *words]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    engine, keeper = map(int, owner.stdout.readline().split())
    return owner, keeper, engine, int(case.get("/child"))


def test_an_engine_ends_when_its_owner_is_killed(case):
    owner, keeper, engine, child = owned(case)
    assert alive(engine)
    owner.kill()
    owner.communicate()
    assert until(lambda: not any(map(alive, (keeper, engine, child))), 5.0)
    assert end_left_behind(case.owner) == ()


def test_what_is_left_when_owner_and_keeper_are_killed_is_found_by_its_owners_name(case):
    owner, keeper, engine, child = owned(case, "deaf")
    for pid in (owner.pid, keeper):
        os.kill(pid, signal.SIGKILL)
    owner.communicate()
    assert until(lambda: not alive(engine), 5.0), "the engine's root dies with its keeper"
    assert alive(child)
    assert end_left_behind("somebody-else") == ()
    assert end_left_behind(case.owner) == (child,)
    assert not alive(child)


def test_an_owners_interrupt_is_not_the_engines(case):
    owner, keeper, engine, child = owned(case)
    os.kill(keeper, signal.SIGINT)
    os.kill(keeper, signal.SIGTERM)
    time.sleep(0.3)
    assert alive(keeper)
    assert alive(engine)
    owner.kill()
    owner.communicate()
    assert until(lambda: not any(map(alive, (keeper, engine, child))))


def test_an_engine_whose_keeper_is_killed_ends_whole_and_says_so(case):
    engine = case.ready("children")
    child = int(case.get("/child"))
    os.kill(engine._kept._keeper.pid, signal.SIGKILL)
    assert until(lambda: engine.state.final)
    assert engine.state.failure.cause is Cause.KILLED
    assert "the process that keeps it" in engine.state.failure.what
    assert not alive(engine.pid)
    assert not alive(child)


def test_a_keeper_that_does_not_answer_is_ended_too(case, monkeypatch):
    monkeypatch.setattr("coral_core.engine.process.LAST_WORDS_S", 0.5)
    engine = case.ready("children")
    child = int(case.get("/child"))
    os.kill(engine._kept._keeper.pid, signal.SIGSTOP)
    assert engine.stop(0.1).condition is Condition.ENDED
    assert not alive(engine.pid)
    assert not alive(child)


@pytest.mark.parametrize(
    ("words", "cause", "said"),
    [
        (("prints", LOGS / "bad_path.txt", "exits", 1), Cause.BAD_MODEL, "/models/nowhere"),
        (("prints", LOGS / "kv_beyond_memory.txt", "exits", 1), Cause.MEMORY, "ValueError: Available memory"),
        (("exits", 3), Cause.LEFT, "exit code 3"),
        (("dies",), Cause.KILLED, "signal 9"),
    ],
)
def test_a_start_that_fails_says_why(case, words, cause, said):
    engine = case.start(*words)
    state = engine.wait(10.0)
    assert state.condition is Condition.FAILED
    assert state.failure.cause is cause
    assert said in state.failure.what
    assert said in str(state.failure.error("engine n1"))
    assert engine.stop(1.0) == state


def test_lines_that_end_as_on_windows_and_progress_bars_are_read(case, tmp_path):
    text = b"10%\r50%\r(Worker pid=1) ERROR 01-01 00:00:00 [a.py:1] ValueError: with a return\r\nRuntimeError: later"
    (tmp_path / "said").write_bytes(text)
    state = case.start("prints", tmp_path / "said", "exits", 1).wait(10.0)
    assert state.failure.what == "ValueError: with a return"
    assert state.failure.log_lines[-1] == "RuntimeError: later"


def test_a_taken_port_is_named_before_anything_is_started(case, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        launch = NodeLaunch(node="n", argv=(), env={}, ports=(free_port(), port), serves=True)
        engine = start_engine(launch, interpreter=Path(sys.executable), log=tmp_path / "log", owner="o")
    assert engine.state.failure.cause is Cause.PORT_TAKEN
    assert f"port {port} is taken" in engine.state.failure.what
    assert engine.pid is None
    assert engine.stop(1.0).condition is Condition.FAILED


def test_an_interpreter_that_is_none_is_refused(case):
    state = case.start(interpreter="/no/such/python").wait(10.0)
    assert state.failure.cause is Cause.NOT_LAUNCHED
    assert "CORAL_ENGINE_PYTHON" in state.failure.fix


@pytest.mark.parametrize(("limit", "hung_after_s"), [("10", 9.0), ("1", 9.0), ("61", 60.0), ("soon", 9.0), (None, 9.0)])
def test_a_launch_that_allows_longer_steps_is_watched_with_more_patience(limit, hung_after_s):
    environment = {} if limit is None else {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": limit}
    assert watch_terms(environment).liveness.hung_after_s == hung_after_s


@pytest.mark.parametrize("times", [2, None])
def test_a_bug_in_a_look_is_told_and_no_state_is_believed_for_ever(case, monkeypatch, caplog, times):
    engine = case.ready()
    look, bugs = engine._look_at_work, count()

    def buggy(probe):
        if times is None or next(bugs) < times:
            raise KeyError("a bug")
        look(probe)

    monkeypatch.setattr(engine, "_look_at_work", buggy)
    if times is None:
        assert until(lambda: engine.state.final)
        assert (engine.state.failure.cause, "KeyError" in engine.state.failure.what) == (Cause.BUG, True)
    else:
        assert until(lambda: "Traceback" in caplog.text)
        os.kill(engine.pid, signal.SIGKILL)  # is noticed as ever
        assert until(lambda: engine.state.final)
        assert engine.state.failure.cause is not Cause.BUG
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(("limit", "start_s"), [("7200", 7200.0), ("soon", 900.0), (None, 900.0)])
def test_a_start_may_take_as_long_as_its_launch_says(limit, start_s):
    environment = {} if limit is None else {"VLLM_ENGINE_READY_TIMEOUT_S": limit}
    assert watch_terms(environment).start_s == start_s


@pytest.mark.parametrize("owner", ["", "a#b", "a\0b"])
def test_an_owner_that_no_mark_can_carry_is_refused(tmp_path, owner):
    launch = NodeLaunch(node="n", argv=(), env={}, ports=(), serves=False)
    with pytest.raises(InputError, match="owner"):
        start_engine(launch, interpreter=Path(sys.executable), log=tmp_path / "log", owner=owner)


def test_a_log_that_cannot_be_written_is_an_error_of_the_node(tmp_path):
    (tmp_path / "file").touch()
    launch = NodeLaunch(node="n7", argv=(), env={}, ports=(), serves=False)
    with pytest.raises(ServingError, match=r"n7: cannot start an engine that logs to .*file/log"):
        start_engine(launch, interpreter=Path(sys.executable), log=tmp_path / "file" / "log", owner="o")


def test_a_start_without_end_fails_after_its_time(case):
    engine = case.start("never", terms=WatchTerms(start_s=0.4))
    state = engine.wait(10.0)
    assert state.failure.cause is Cause.START_TIMEOUT
    assert "'launched'" in state.failure.what
    assert "start_limit_s" in state.failure.fix
    assert until(lambda: engine.pid is not None)  # a slow machine has not told yet
    assert alive(engine.pid), "ending it is for whoever started it"
    assert engine.stop(2.0).condition is Condition.FAILED
    assert not alive(engine.pid)


def test_a_node_that_serves_nobody_is_ready_with_its_weights(case):
    engine = case.ready(serves=False)
    assert engine.state.step is StartStep.WEIGHTS
    assert engine.sample is None


@pytest.mark.parametrize("words", [(), ("refuses",)])
def test_an_idle_engine_that_stands_still_is_found_hung_by_a_probe(case, words):
    engine = case.ready(*words)
    time.sleep(1.2)
    assert engine.state.condition is Condition.READY, "probes are answered"
    case.get("/stop")
    began_s = time.monotonic()
    assert until(lambda: engine.state.final)
    assert time.monotonic() - began_s < 5.0
    assert engine.state.failure.cause is Cause.HUNG
    assert alive(engine.pid)
    case.get("/go")
    assert engine.stop(1.0).failure.cause is Cause.HUNG
    assert engine.state.exit_code == -signal.SIGTERM


def test_an_engine_that_answers_nothing_at_all_is_found_hung(case, monkeypatch):
    monkeypatch.setattr("coral_core.engine.probe.LOOK_S", 0.2)
    engine = case.ready()
    os.kill(engine.pid, signal.SIGSTOP)
    assert until(lambda: engine.state.final)
    assert engine.state.failure.cause is Cause.HUNG


def test_stopped_while_it_starts_it_is_ended_and_not_failed(case):
    engine = case.start("never")
    assert until(lambda: engine.pid is not None)
    assert engine.stop(2.0).condition is Condition.ENDED
