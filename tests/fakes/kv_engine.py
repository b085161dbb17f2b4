"""vLLM engines without their HTTP servers, driven by lines of JSON: what tests of the KV transfer put at either end.

Run by the engine's interpreter: `python kv_engine.py ENGINES_JSON`. vLLM is imported once, and every engine is a fork of that.
It reads commands from the pipe `reads` and answers on the pipe `writes`, a line each; what else it says goes to the file `log`.
Between commands the engine steps, as a server's would.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any

import vllm.v1.worker.cpu_worker  # noqa: F401 - what engines would import, once for all of them
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from coral_core.clock import ListeningClock
from coral_core.engine.plugin.on_cpu import wait_patiently

Json = dict[str, Any]


class Driver:
    """The engine, and what its requests have given so far."""

    def __init__(self, arguments: Json) -> None:
        wait_patiently()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.waiting: set[str] = set()
        self.finished: dict[str, Json] = {}

    def step(self) -> None:
        if not self.scheduler.has_requests():
            return
        if not self.scheduler.running:
            time.sleep(0.001)  # as vLLM's own loop does, so that other threads get a turn
        for output in self.engine.step():
            if output.finished:
                self.waiting.discard(output.request_id)
                self.finished[output.request_id] = {
                    "tokens": list(output.outputs[0].token_ids),
                    "reason": output.outputs[0].finish_reason,
                    "params": output.kv_transfer_params,
                    "cached": output.num_cached_tokens,
                }

    def start(self, requests: list[Json]) -> Json:
        for request in requests:
            extra = {"kv_transfer_params": request["params"]} if request.get("params") else None
            sampling = SamplingParams(
                max_tokens=request["max_tokens"], temperature=0.0, ignore_eos=True, extra_args=extra
            )
            self.engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, sampling)
            self.waiting.add(request["id"])
        return {}

    def collect(self, within_s: float) -> Json:
        """What has finished, once all has, or when the time is over; a pause of the machine is none of it."""
        took_s = ListeningClock(time.monotonic)
        while self.waiting and took_s() < within_s:
            self.step()
        finished, self.finished = self.finished, {}
        return {"finished": finished, "waiting": sorted(self.waiting), "took_s": took_s()}

    def abort(self, ids: list[str]) -> Json:
        internal = [name for name in self.engine.output_processor.request_states if name.split("-")[0] in ids]
        self.engine.abort_request(internal or ids, internal=bool(internal))
        self.waiting -= set(ids)
        return {}

    def drained(self, within_s: float) -> Json:
        """How long until no block is in use, or the usage that is left when the time is over."""
        took_s = ListeningClock(time.monotonic)
        while (usage := self.scheduler.kv_cache_manager.usage) and took_s() < within_s:
            self.step()
        return {"usage": usage, "took_s": took_s()}

    def evaluate(self, code: str) -> Json:
        """For what only this process can see or break."""
        return {"value": eval(code, globals(), {"driver": self})}


def end_with_parent() -> None:
    """Have the kernel end this process with the one that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def serve(engine: Json) -> None:
    """One engine, until its pipe is closed."""
    os.environ.update(engine["environment"])
    log = os.open(engine["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    commands, answers = os.fdopen(engine["reads"]), os.fdopen(engine["writes"], "w", buffering=1)
    driver = Driver(engine["arguments"])
    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    while True:
        if not select.select([commands], [], [], 0.0 if driver.scheduler.has_requests() else 0.05)[0]:
            driver.step()
            continue
        line = commands.readline()
        if not line:
            return
        command = json.loads(line)
        answers.write(json.dumps(getattr(driver, command.pop("do"))(**command)) + "\n")


def main() -> None:
    """Fork the engines, and wait for the last of them."""
    end_with_parent()
    engines = json.loads(sys.argv[1])
    for engine in engines:
        if os.fork():
            continue
        end_with_parent()
        os.setsid()
        for other in engines:
            if other is not engine:
                os.close(other["reads"])
                os.close(other["writes"])
        try:
            serve(engine)
        except BaseException:  # noqa: BLE001 - it goes to the log, and the process ends
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    for engine in engines:
        os.close(engine["reads"])
        os.close(engine["writes"])
    for _ in engines:
        os.wait()


if __name__ == "__main__":
    main()
