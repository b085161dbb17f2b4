"""Real vLLM on the CPU under supervision: ready by a completion, and each way to fail named in time."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from coral_core.clock import ListeningClock
from coral_core.domain.launch import NodeLaunch
from coral_core.engine.kept import MARK_VARIABLE, end_left_behind
from coral_core.engine.process import EngineProcess, start_engine
from coral_core.engine.scrape import EngineSample
from coral_core.engine.state import Cause, Condition, EngineState, StartStep

OWNER = f"tests-{os.getpid()}"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "10",
}
NOTICED_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Starts engines of the tiny model, with more flags where a test needs them."""

    interpreter: Path
    model: Path
    logs: Path

    def __call__(self, name: str, *flags: str, model: Path | None = None) -> tuple[EngineProcess, str]:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        launch = NodeLaunch(
            node=name,
            argv=(
                *("-m", "coral_core.engine.plugin.serve", "serve", str(model or self.model)),
                *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
                *("--max-model-len", "2048", "--max-num-batched-tokens", "128", "--block-size", "32"),
                *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "64M"),
                *("--disable-uvicorn-access-log", *flags),
            ),
            env=ENVIRONMENT,
            ports=(port,),
            serves=True,
        )
        url = f"http://127.0.0.1:{port}"
        log = self.logs / f"{name}.log"
        return start_engine(launch, interpreter=self.interpreter, log=log, owner=OWNER, url=url), url


@pytest.fixture(scope="module")
def start(engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    yield Starter(interpreter=engine_python, model=tiny_model, logs=tmp_path_factory.mktemp("engines"))
    end_left_behind(OWNER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A ready engine before anything is done to it: how it started, what it answered, what it then said of itself."""

    engine: EngineProcess
    url: str
    started: EngineState
    tokens: list[int]
    sample: EngineSample


@pytest.fixture(scope="module")
def pair(start: Starter) -> Iterator[list[Served]]:
    """Two engines that start at the same time; each is broken by one test."""
    engines = [start(f"n{number}") for number in range(2)]
    try:
        yield [served(engine, url) for engine, url in engines]
    finally:
        for engine, _ in engines:
            engine.stop(5.0)


def served(engine: EngineProcess, url: str) -> Served:
    started = engine.wait(240.0)
    assert started.condition is Condition.READY, started
    tokens = ask(url, prompt=[5, 6, 7], max_tokens=16, return_token_ids=True)["choices"][0]["token_ids"]
    # The probe of one token at the start, and these; read once they are through.
    assert until(partial(has_counted, engine, 17.0), 20.0)
    assert engine.sample is not None
    return Served(engine=engine, url=url, started=started, tokens=tokens, sample=engine.sample)


def ask(url: str, **request) -> dict:
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **request}
    message = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(message, timeout=60.0) as answer:
        return json.load(answer)


def has_counted(engine: EngineProcess, tokens: float) -> bool:
    """Whether the engine is idle again and has generated at least so many tokens."""
    sample = engine.sample
    return sample is not None and sample.running_requests == 0.0 and (sample.generation_tokens_total or 0.0) >= tokens


def until(holds: Callable[[], bool], timeout_s: float) -> bool:
    waited_s = ListeningClock(time.monotonic)
    while not holds() and waited_s() < timeout_s:
        time.sleep(0.1)
    return holds()


def below(engine: EngineProcess, title: str) -> psutil.Process:
    """The first process of the engine whose title begins so."""
    return next(
        one for one in psutil.Process(engine.pid).children(recursive=True) if one.cmdline()[0].startswith(title)
    )


def until_final(engine: EngineProcess, timeout_s: float) -> float:
    waited_s = ListeningClock(time.monotonic)  # the machine may stand still: nobody notices anything then
    while not engine.state.final and waited_s() < timeout_s:
        time.sleep(0.05)
    assert engine.state.final, f"nothing noticed in {timeout_s} s"
    return waited_s()


def all_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_a_start_is_timed_by_steps_up_to_a_real_completion(pair, record_property):
    for one in pair:
        assert [step for step, _ in one.started.reached] == list(StartStep)
        times = [at_s for _, at_s in one.started.reached]
        assert times == sorted(times)
        record_property("start_s", str(dict(one.started.reached)))


def test_equal_engines_answer_equally_and_their_metrics_count_it(pair):
    assert pair[0].tokens == pair[1].tokens
    assert len(pair[0].tokens) == 16
    for one in pair:
        assert one.sample.ttft_s.count >= 2.0
        assert one.sample.kv_usage_frac == 0.0


def test_long_prompts_are_no_hang_but_a_worker_stopped_while_idle_is_though_health_is_well(pair):
    engine, url = pair[0].engine, pair[0].url
    prompt = [5 + number % 900 for number in range(2000)]  # 16 steps of prefill each
    threads = [
        threading.Thread(target=ask, args=(url,), kwargs={"prompt": [first, *prompt], "max_tokens": 8})
        for first in range(5, 11)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    time.sleep(4.0)
    assert engine.state.condition is Condition.READY
    pids = [engine.pid, *(one.pid for one in psutil.Process(engine.pid).children(recursive=True))]
    below(engine, "VLLM::Worker").suspend()
    noticed_s = until_final(engine, 30.0)
    assert noticed_s <= NOTICED_S
    assert engine.state.failure.cause is Cause.HUNG
    with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
        assert answer.status == 200
    began_s = time.monotonic()
    assert engine.stop(3.0).condition is Condition.FAILED
    assert time.monotonic() - began_s < 8.0
    assert all_gone(pids)


def test_a_killed_worker_is_noticed_and_named(pair):
    engine, url = pair[1].engine, pair[1].url
    outcome: list[object] = []

    def ask_for_much() -> None:
        try:
            outcome.append(ask(url, prompt=[5, 6], max_tokens=1900))
        except urllib.error.HTTPError as error:
            outcome.append(error)
            error.close()
        except (OSError, http.client.HTTPException) as error:
            outcome.append(error)

    for one in psutil.Process(engine.pid).children(recursive=True):
        assert MARK_VARIABLE in one.environ(), f"{one.cmdline()} could not be found by whoever comes after its owner"
    asked = threading.Thread(target=ask_for_much)
    asked.start()
    time.sleep(0.5)
    below(engine, "VLLM::Worker").kill()
    noticed_s = until_final(engine, 30.0)
    asked.join(30.0)
    assert isinstance(outcome[0], Exception), outcome
    assert noticed_s <= NOTICED_S
    assert engine.state.failure.cause is Cause.RANK_DIED
    assert "VllmWorker-0 died unexpectedly" in engine.state.failure.what
    assert all_gone([engine.pid])


def test_told_to_end_in_the_middle_of_an_answer_it_ends_in_order(start):
    engine, url = start("answering")
    served(engine, url)
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    message = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(message, timeout=60.0) as answer:
        assert answer.readline()
        assert engine.stop(30.0).condition is Condition.ENDED
    assert "Application shutdown complete" in (start.logs / "answering.log").read_text(), "it had to be killed"


@pytest.fixture(scope="module")
def doomed(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineProcess]:
    """Engines that cannot start, all at once, because what takes long is the same for each: imports."""
    return {
        "path": start("path", model=tmp_path_factory.mktemp("none") / "no-such-model")[0],
        "flag": start("flag", "--no-such-flag")[0],
        "memory": start("memory", "--kv-cache-memory-bytes", "900G")[0],
    }


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [
        ("path", Cause.BAD_MODEL, "no-such-model"),
        ("flag", Cause.BAD_FLAG, "--no-such-flag"),
        ("memory", Cause.MEMORY, "900.0 GiB"),
    ],
)
def test_a_start_that_cannot_succeed_says_why_and_what_to_do(doomed, name, cause, said):
    state = doomed[name].wait(200.0)
    assert state.condition is Condition.FAILED
    assert state.failure.cause is cause
    error = str(state.failure.error(f"engine on {name}"))
    assert said in error
    assert "engine.yaml" in error
    assert all_gone([doomed[name].pid])
