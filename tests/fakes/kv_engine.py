"""One vLLM engine without its HTTP server, driven by lines of JSON: what tests of the KV transfer put at either end.

Run by the engine's interpreter: `python kv_engine.py ENGINE_ARGUMENTS_JSON`. Every line on stdin is a command, every answer a
line on stdout; vLLM's own output goes to stderr. Between commands the engine steps, as a server's would.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the test that started it
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

from vllm import SamplingParams  # noqa: E402 - after stdout was put out of its reach
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

Json = dict[str, Any]


class Driver:
    """The engine, and what its requests have given so far."""

    def __init__(self, arguments: Json) -> None:
        for module in arguments.pop("before", ()):
            __import__(module)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.waiting: set[str] = set()
        self.finished: dict[str, Json] = {}

    def step(self) -> None:
        if not self.scheduler.has_requests():
            return
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
        """What has finished, once all has, or when the time is over."""
        ends_s = time.monotonic() + within_s
        while self.waiting and time.monotonic() < ends_s:
            self.step()
        finished, self.finished = self.finished, {}
        return {"finished": finished, "waiting": sorted(self.waiting)}

    def abort(self, ids: list[str]) -> Json:
        internal = [name for name in self.engine.output_processor.request_states if name.split("-")[0] in ids]
        self.engine.abort_request(internal or ids, internal=bool(internal))
        self.waiting -= set(ids)
        return {}

    def drained(self, within_s: float) -> Json:
        """How long until no block is in use, or the usage that is left when the time is over."""
        begun_s = time.monotonic()
        while (usage := self.scheduler.kv_cache_manager.usage) and time.monotonic() - begun_s < within_s:
            self.step()
        return {"usage": usage, "took_s": time.monotonic() - begun_s}

    def evaluate(self, code: str) -> Json:
        """For what only this process can see or break."""
        return {"value": eval(code, globals(), {"driver": self})}


def main() -> None:
    driver = Driver(json.loads(sys.argv[1]))
    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    while True:
        if not select.select([sys.stdin], [], [], 0.0 if driver.scheduler.has_requests() else 0.05)[0]:
            driver.step()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        command = json.loads(line)
        answers.write(json.dumps(getattr(driver, command.pop("do"))(**command)) + "\n")


if __name__ == "__main__":
    main()
