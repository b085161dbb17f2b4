"""vLLM in this process, plain or over forked nodes of the stage runtime, and the requests that tests put to it.

Imported by the engine's interpreter only. What nodes need is imported here once, before they are forked.
"""

from __future__ import annotations

import importlib
import os
import random
import traceback
from collections.abc import Iterator
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from coral_core.engine.plugin import stage_executor, stage_node
from coral_core.engine.plugin.on_cpu import end_with_parent, sleep_to_yield

sleep_to_yield()
# What nodes would import, once for all of them.
for _module in ("model_executor.models.qwen3", "v1.worker.cpu_model_runner", "v1.worker.cpu_worker", "v1.engine.core"):
    importlib.import_module(f"vllm.{_module}")

BLOCK_TOKENS = 32
LAYER_BLOCK_BYTES = 2 * 2 * 32 * BLOCK_TOKENS * 4
REQUESTS = 32

Stages = list[tuple[int, dict[str, float]]]
LAYOUTS: dict[str, Stages] = {
    "1x2": [(4, {"a": 1}), (4, {"b": 1})],
    "2-1": [(5, {"a": 1, "b": 2}), (3, {"c": 1})],
    "2-3": [(4, {"a": 2, "b": 1}), (4, {"c": 1, "d": 1, "e": 2})],
    "1-2-1": [(2, {"a": 1}), (5, {"b": 1, "c": 2}), (1, {"d": 1})],
    "uneven": [(1, {"a": 1}), (7, {"b": 3, "c": 2})],
}


class Engine:
    """vLLM in this process, over nodes of its own if there are stages; steps are taken one by one."""

    def __init__(self, model: str, port: int, stages: Stages | None = None, **options: Any) -> None:
        self.pids: dict[str, int] = {}
        nodes: dict[str, dict[str, Any]] = options.pop("nodes", {})
        others: dict[str, Any] = {}
        if stages is not None:
            layout = {
                "stages": [
                    {
                        "layers": layers,
                        "nodes": [
                            {"name": name, "throughput": weight, **nodes.get(name, {})} for name, weight in own.items()
                        ],
                    }
                    for layers, own in stages
                ],
                "listen": f"127.0.0.1:{port}",
                **options.pop("layout", {}),
            }
            for name in () if options.pop("no_nodes", False) else [name for _, own in stages for name in own]:
                self.pids[name] = fork_node(name, str(layout["listen"]), layout.get("key_file"))
            others = {
                "distributed_executor_backend": stage_executor.StageExecutor,
                "additional_config": {"coral_stages": layout},
            }
        blocks = options.pop("blocks_of_8_layers", 1000)
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": blocks * 8 * LAYER_BLOCK_BYTES,
            "disable_log_stats": False,
            "enable_prefix_caching": False,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64,
        }
        self.llm = LLM(model=model, **{**settings, **others, **options})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[str | None, Any]] = {}
        self.offers: dict[str, dict[str, Any]] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def steps(self) -> Iterator[int]:
        """Until all requests have ended; the number of the step."""
        number = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.prompt_logprobs[output.request_id] = [
                        None if at is None else {token: round(one.logprob, 3) for token, one in at.items()}
                        for at in output.prompt_logprobs or ()
                    ]
                    self.offers[output.request_id] = output.kv_transfer_params or {}
                    self.ends[output.request_id] = (output.outputs[0].finish_reason, output.outputs[0].stop_reason)
            number += 1
            yield number

    def run(self) -> None:
        for _ in self.steps():
            pass
        self.settle()

    def settle(self) -> None:
        """Let the nodes hear of the last requests' end."""
        for _ in range(3):
            self.core.step_fn()

    def metric(self, name: str) -> float:
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def left_behind(self) -> dict[str, float]:
        """KV blocks still held, by the scheduler and by each node; what is not 0."""
        held = {"scheduler": self.core.scheduler.get_kv_cache_usage(), **self.core.model_executor.blocks_in_use()}
        return {where: count for where, count in held.items() if count}


def fork_node(name: str, engine: str, key_file: str | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with_parent()
        stage_node.main(["--name", name, "--engine", engine, *(["--key-file", key_file] if key_file else [])])
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's code
        traceback.print_exc()
    os._exit(0)


def prompt_of(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(5, 1000) for _ in range(dice.randrange(5, 150))]


def params_of(number: int) -> SamplingParams:
    """Greedy, save a few that show what else must come out the same."""
    dice = random.Random(1000 + number)
    params = SamplingParams(temperature=0.0, max_tokens=dice.randrange(4, 60), ignore_eos=True)
    match number % 16:
        case 3:
            params.repetition_penalty = 1.3
        case 7:
            params.presence_penalty, params.stop_token_ids = 0.7, [11, 12, 13]
        case 11:
            params.logprobs = 2
    return params


def special(number: int) -> SamplingParams:
    """What else goes along with a request."""
    params = SamplingParams(temperature=0.0, max_tokens=16)
    if number % 2:
        params.prompt_logprobs = 1
    else:
        params.structured_outputs = StructuredOutputsParams(regex="[0-9]{3}-[a-f]{4}")
    return params


def add_special(engine: Engine) -> None:
    for number in range(8):
        engine.add(f"s{number}", prompt_of(200 + number), special(number))


def add_all(engine: Engine, count: int = REQUESTS) -> None:
    for number in range(count):
        engine.add(f"r{number}", prompt_of(number), params_of(number))
