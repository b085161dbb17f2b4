"""The stage runtime while the machine stands still: who is lost, and who is not. Scenarios of `stage_driver`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from coral_core.engine.plugin import stage_wire
from coral_core.engine.plugin.on_cpu import end_with_parent
from coral_core.engine.plugin.stage_wire import Hub, Link, Wire
from tests.fakes.stage_engine import LAYOUTS, Engine, add_all

SILENCE_S = 5.0
PAUSE_S = 2.0 * SILENCE_S
NOTICED_S = 15.0


def silence(model: str, port: int) -> dict[str, Any]:
    """A hub whose clock jumps by a minute loses nobody; a node that really says nothing is lost, and ends when it wakes."""
    del model
    lost: dict[str, str] = {}
    skipped_s = 0.0
    stage_wire.ENGINE_SILENCE_S = SILENCE_S
    members = {name: fork_member(port, name) for name in ("still", "steady")}
    hub = Hub(
        host="127.0.0.1",
        port=port,
        keys=None,
        nodes=members,
        silence_s=SILENCE_S,
        on_lost=lost.__setitem__,
        clock=lambda: time.monotonic() + skipped_s,
    )
    heard: set[str] = set()
    while heard != members.keys():
        heard.add(hub.events.get(timeout=60.0)[0])
    skipped_s += 60.0
    time.sleep(2.0)
    after_jump = dict(lost)
    os.kill(members["still"], signal.SIGSTOP)
    noticed_s = seconds_until(lambda: bool(lost))
    os.kill(members["still"], signal.SIGCONT)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(members["still"], 0)[1])
    os.kill(members["steady"], signal.SIGKILL)
    hub.close()
    return {"after_jump": after_jump, "lost": lost, "noticed_s": noticed_s, "woken_exit": exit_code}


def pause(model: str, port: int) -> dict[str, Any]:
    """Engine and nodes stand still together under load, for longer than any of their limits; then one node alone."""
    os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(int(PAUSE_S - 1.0))
    stage_wire.ENGINE_SILENCE_S = SILENCE_S
    stand_still = fork_pauser()  # before this process has threads
    engine = Engine(model, port, LAYOUTS["2-1"], layout={"silence_s": SILENCE_S})
    executor = engine.core.model_executor
    add_all(engine)
    times_s = []
    for number in engine.steps():
        times_s.append(time.monotonic())
        if number == 10:
            stand_still([os.getpid(), *engine.pids.values()])
    time.sleep(2.0)  # a judgement that is late comes too
    engine.settle()
    lost, left_behind = dict(executor._pipeline.bindings.lost), engine.left_behind()
    os.kill(engine.pids["a"], signal.SIGSTOP)
    noticed_s = seconds_until(lambda: "a" in executor._hub._lost)
    os.kill(engine.pids["a"], signal.SIGKILL)
    return {
        "tokens": engine.tokens,
        "ends": engine.ends,
        "lost": lost,
        "left_behind": left_behind,
        "stood_still_s": max(after - before for before, after in pairwise(times_s)),
        "noticed_s": noticed_s,
    }


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {"silence": silence, "pause": pause}


def seconds_until(true: Callable[[], bool]) -> float:
    """Until it is so, at most twice as long as it may take."""
    began_s = time.monotonic()
    while not true() and time.monotonic() - began_s < 2 * NOTICED_S:
        time.sleep(0.05)
    return time.monotonic() - began_s


def fork_member(port: int, name: str) -> int:
    """A node that only says hello and that it lives."""
    pid = os.fork()
    if not pid:
        end_with_parent()
        link = Link(wire=Wire(None), address=f"tcp://127.0.0.1:{port}", name=name)
        while True:
            link.send("hello", {})
            time.sleep(0.5)
    return pid


def fork_pauser() -> Callable[[list[int]], None]:
    """What stops all of these processes together, and lets them go on together after PAUSE_S."""
    reads, writes = os.pipe()
    if not os.fork():
        end_with_parent()
        os.close(writes)
        with os.fdopen(reads) as orders:
            pids = json.loads(orders.readline() or "[]")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(PAUSE_S if number == signal.SIGSTOP else 0.0)
        sys.stderr.flush()
        os._exit(0)
    os.close(reads)

    def stand_still(pids: list[int]) -> None:
        os.write(writes, json.dumps(pids).encode() + b"\n")

    return stand_still
