"""What an engine's log says, on logs recorded from vllm 0.32.0 (CPU build) with tracebacks shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral_core.engine.engine_log import CRASH_WINDOW_S, LAST_LINES, LONGEST_LINE, EngineLog
from coral_core.engine.state import Cause, Condition, EngineState, StartStep
from coral_core.errors import ServingError

LOGS = Path(__file__).resolve().parents[1] / "fakes" / "engine_logs"


def lines_of(name: str) -> list[str]:
    return (LOGS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def read(*lines: str, at_s: float = 1.0) -> EngineLog:
    log = EngineLog()
    log.read(lines, at_s)
    return log


def test_a_start_is_seen_step_by_step():
    log = EngineLog()
    for number, line in enumerate(lines_of("started"), 1):
        log.read([line], float(number))
    steps = [step for step, _ in log.reached]
    assert steps == [StartStep.LAUNCHED, StartStep.IMPORTED, StartStep.WORKERS, StartStep.WEIGHTS, StartStep.KV_CACHE]
    times = [at_s for _, at_s in log.reached]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [
        ("bad_flag", Cause.BAD_FLAG, "unrecognized arguments: --no-such-flag"),
        ("bad_path", Cause.BAD_MODEL, "'/models/nowhere'"),
        ("half_a_file", Cause.BAD_MODEL, "SafetensorError: Error while deserializing header: incomplete metadata"),
        ("context_too_long", Cause.BAD_TERMS, "ModelConfig: Value error, User-specified max_model_len (9999999)"),
        ("kv_beyond_memory", Cause.MEMORY, "ValueError: Available memory on node 0"),
        ("kv_below_context", Cause.MEMORY, "ValueError: To serve at least one request"),
        ("port_taken", Cause.PORT_TAKEN, "Address already in use"),
        ("headless_rank_died", Cause.RANK_DIED, "Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"),
    ],
)
def test_the_first_thing_that_went_wrong_is_the_cause(name, cause, said):
    log = read(*lines_of(name))
    failure = log.failure(1, 2.0, was_ready=False)
    assert failure.cause is cause
    assert said in failure.what
    assert failure.fix
    assert 0 < len(failure.log_lines) <= LAST_LINES


def test_the_error_is_one_line_that_names_engine_cause_last_lines_and_fix():
    error = read(*lines_of("kv_beyond_memory")).failure(1, 2.0, was_ready=False).error("engine of node n1")
    assert isinstance(error, ServingError)
    assert str(error).startswith("engine of node n1: ValueError: Available memory")
    assert "Engine core initialization failed" in str(error)
    assert str(error).endswith("place fewer engines on the node)")
    assert "\n" not in str(error)


def test_without_a_cause_the_exit_says_what_there_is_to_say():
    killed = read("INFO:     fine").failure(-9, 5.0, was_ready=True)
    assert (killed.cause, killed.what) == (Cause.KILLED, "killed by signal 9")
    assert "memory" in killed.fix
    assert read().failure(-15, 5.0, was_ready=True).fix == ""
    left = EngineLog().failure(0, 5.0, was_ready=True)
    assert left.cause is Cause.LEFT
    assert "exit code 0" in left.what
    assert left.error("n").what == left.what


def test_a_request_that_failed_long_ago_does_not_explain_a_crash():
    log = read("ValueError: of one request", at_s=100.0)
    log.read(["(Worker pid=1) ERROR 01-01 00:00:00 [a.py:1] RuntimeError: the crash"], 500.0)
    log.read(["EngineDeadError: see above"], 501.0)
    assert log.failure(1, 502.0, was_ready=True).what == "RuntimeError: the crash"
    assert log.failure(1, 502.0, was_ready=True).cause is Cause.CRASHED
    assert log.failure(-6, 501.0 + CRASH_WINDOW_S + 1.0, was_ready=True).cause is Cause.KILLED


def test_out_of_memory_while_serving_keeps_its_name_and_its_fix():
    failure = read("torch.OutOfMemoryError: CUDA out of memory.").failure(1, 2.0, was_ready=True)
    assert failure.cause is Cause.MEMORY
    assert failure.fix


def test_endless_and_binary_lines_are_kept_short():
    log = read("x" * 1_000_000, "\x00\ufffd" * 10, *["line"] * 50)
    assert len(log.tail()) == LAST_LINES
    assert max(map(len, read("x" * 1_000_000).tail())) == LONGEST_LINE


def test_a_step_keeps_the_time_at_which_it_was_first_seen():
    log = EngineLog()
    log.reach(StartStep.HTTP, 3.0)
    log.reach(StartStep.HTTP, 4.0)
    assert log.reached == [(StartStep.LAUNCHED, 0.0), (StartStep.HTTP, 3.0)]


def test_only_failed_and_ended_are_final():
    final = {condition for condition in Condition if EngineState(condition=condition).final}
    assert final == {Condition.FAILED, Condition.ENDED}
    assert EngineState(condition=Condition.STARTING).step is StartStep.LAUNCHED
