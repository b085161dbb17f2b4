"""Times single steps of an engine with a truncated model and dummy weights; run by the engine's interpreter.

`python -m coral_core.engine.plugin.profile_steps --layers N MODEL FLAGS...` takes the flags of `vllm serve`, starts the
engine core in this process, and answers questions: one line of JSON each on standard input and output.

    {"phase": "prefill", "requests": 4, "tokens": 128, "samples": 10}    4 prompts of 128 tokens in one step
    {"phase": "decode", "requests": 4, "tokens": 128, "samples": 10}     one token for each of 4, contexts of about 128

The first line says what was started. Steps are timed around the core's own step: scheduling, the model, sampling, and
booking what came out; tokens become text elsewhere. A prompt is drawn at random, so that no two share a prefix.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from coral_core.engine.plugin.on_cpu import sleep_to_yield, start_by_fork
from coral_core.engine.plugin.profile_model import truncated
from coral_core.engine.plugin.serve import CPU_DISTRIBUTION, answering_for_vllm

WARM_UP_STEPS = 2
STEPS_PER_PROMPT = 4096
"""More steps than this for one question: something does not go on."""


class Timed:
    """An engine whose steps are timed."""

    def __init__(self, flags: list[str], layers: int) -> None:
        start_by_fork()
        sleep_to_yield()
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - seconds, and after the version is answered for
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = EngineArgs.from_cli_args(parser.parse_args(flags))
        arguments.hf_overrides = functools.partial(truncated, layers=layers)
        arguments.load_format = "dummy"
        arguments.enable_prefix_caching = False
        # A GPU's engine would schedule ahead: a call of its step would then not be a step, and a prompt would take two.
        arguments.async_scheduling = False
        self.engine = LLMEngine.from_engine_args(arguments)
        core = self.engine.engine_core.engine_core
        blocks = core.scheduler.kv_cache_config.num_blocks
        config = self.engine.vllm_config
        self.kv_tokens = blocks * config.cache_config.block_size
        self.vocab = config.model_config.get_vocab_size()
        self.most_tokens = config.scheduler_config.max_num_batched_tokens
        self.most_requests = config.scheduler_config.max_num_seqs
        self.most_context = config.model_config.max_model_len
        self._draw = random.Random(0)  # noqa: S311 - prompts, not secrets
        self._asked = 0

    def measure(self, phase: str, requests: int, tokens: int, samples: int) -> list[float]:
        """Seconds of each sampled step. ValueError for what this engine cannot do in one step."""
        if requests > self.most_requests or tokens >= self.most_context:
            raise ValueError(f"at most {self.most_requests} requests of fewer than {self.most_context} tokens")
        if requests * (tokens + samples) > self.kv_tokens:
            raise ValueError(f"{requests} requests of {tokens} tokens do not fit {self.kv_tokens} tokens of KV")
        if phase == "decode":
            return self._decode(requests, tokens, samples)
        if requests * tokens > self.most_tokens:
            raise ValueError(f"{requests} prompts of {tokens} tokens are more than {self.most_tokens} of one step")
        return [self._prefill(requests, tokens) for _ in range(WARM_UP_STEPS + samples)][WARM_UP_STEPS:]

    def _prefill(self, requests: int, tokens: int) -> float:
        self._ask(requests, tokens, 1)
        times: list[float] = []
        while self.engine.has_unfinished_requests():
            self._step(times)
        (took_s,) = times
        return took_s

    def _decode(self, requests: int, tokens: int, samples: int) -> list[float]:
        """Seconds of steps in which all requests decode, contexts about `tokens` in their middle. ValueError where not all do.

        Prompts that one step cannot take come one after the other: the first go on decoding until the last is there, so
        requests end when they are aborted, and prompts are shorter by what they gain meanwhile.
        """
        steps, coming = WARM_UP_STEPS + samples, (requests * tokens - 1) // self.most_tokens
        prompt = max(tokens - (steps + coming) // 2, 1)
        names = self._ask(requests, prompt, self.most_context - prompt)
        waiting, whole = set(names), 0
        times: list[float] = []
        try:
            while whole < steps:
                found = self._step(times)
                if any(one.finished for one in found) or (not waiting and 0 < len(found) < requests):
                    raise ValueError(
                        f"{requests} requests of {tokens} tokens do not decode in one step for {steps} steps"
                    )
                whole += not waiting
                waiting -= {one.request_id for one in found}
        finally:
            self.engine.abort_request(names)
            self.engine.step()  # in which workers hear of it
        return times[-samples:]

    def _ask(self, requests: int, tokens: int, wanted: int) -> list[str]:
        from vllm import SamplingParams  # noqa: PLC0415 - loaded by now

        names = [str(self._asked + number) for number in range(requests)]
        self._asked += requests
        for name in names:
            prompt = {"prompt_token_ids": [self._draw.randrange(self.vocab) for _ in range(tokens)]}
            terms = SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=True, detokenize=False)
            self.engine.add_request(name, prompt, terms)
        return names

    def _step(self, times: list[float]) -> list[Any]:
        """What came of a step; the seconds of the core's own step are added to `times`."""
        client = self.engine.engine_core
        own = client.get_output

        def timed() -> object:
            began_s = time.perf_counter()
            found = own()
            times.append(time.perf_counter() - began_s)
            return found

        client.get_output = timed
        try:
            found: list[Any] = self.engine.step()
        finally:
            del client.get_output
        if len(times) > STEPS_PER_PROMPT:
            raise RuntimeError(f"{len(times)} steps, and requests are left")
        return found


def answer(line: str, measure: Callable[..., list[float]]) -> dict[str, Any]:
    """The answer to a question; what cannot be measured is answered with its reason."""
    try:
        asked = json.loads(line)
        terms = {name: int(asked[name]) for name in ("requests", "tokens", "samples")}
        return {"samples_s": measure(str(asked["phase"]), **terms)}
    except (ValueError, KeyError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def own_output() -> TextIO:
    """Standard output for answers alone; what the engine prints goes to standard error from now on."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def main() -> None:
    """Start the engine, say so, answer until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--layers", type=int, required=True)
    given, flags = parser.parse_known_args()
    out = own_output()
    setattr(importlib.metadata, "version", answering_for_vllm(importlib.metadata.version))  # noqa: B010 - a patch, and said so
    began_s = time.perf_counter()
    timed = Timed(["--model", *flags], given.layers)
    started = {
        "layers": given.layers,
        "kv_tokens": timed.kv_tokens,
        "engine_start_s": time.perf_counter() - began_s,
        "version": _version(),
    }
    print(json.dumps(started), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line, timed.measure)), file=out, flush=True)


def _version() -> str:
    try:
        return importlib.metadata.version("vllm").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(CPU_DISTRIBUTION)


if __name__ == "__main__":
    main()
