"""A device whose time is known, the same for stock vLLM's pipeline and for the stage runtime (`worker_cls` of either).

A step takes layers x (layer_ms x ceil(requests / batch) + token_ms x tokens) from when its input is there, the real computing
included; a node does one step after another. `SLOW_DEVICE` holds the `Device`s of each stage.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import msgspec
from vllm.distributed.parallel_state import get_pp_group

from coral_core.engine.plugin.cpu_worker import StageWorker

VARIABLE = "SLOW_DEVICE"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """`batch`: requests that a step serves in one go."""

    layer_ms: float
    token_ms: float = 0.0
    batch: int = 1_000_000

    def step_s(self, layers: int, requests: float, tokens: float) -> float:
        """How long a step of so many requests and tokens takes."""
        return layers * (self.layer_ms * math.ceil(requests / self.batch) + self.token_ms * tokens) / 1000.0


def set_devices(stages: list[list[Device]]) -> None:
    """For the nodes that this process will start."""
    os.environ[VARIABLE] = msgspec.json.encode(stages).decode()


class SlowWorker(StageWorker):
    """The node that `set_devices` says for its place."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        stage, runner = get_pp_group(), self.model_runner
        stages = msgspec.json.decode(os.environ[VARIABLE], type=list[list[Device]])
        device = stages[stage.rank_in_group][self.vllm_config.parallel_config.rank // stage.world_size]
        layers = self.model_config.get_num_layers(self.parallel_config)
        execute = runner.execute_model

        def slowed(output: Any, inputs: Any = None) -> Any:
            if not output.total_num_scheduled_tokens:
                return execute(output, inputs)
            if hasattr(inputs, "wait_for_comm"):
                inputs.wait_for_comm()
            requests = len(output.num_scheduled_tokens)
            until = time.monotonic() + device.step_s(layers, requests, output.total_num_scheduled_tokens)
            result = execute(output, inputs)
            time.sleep(max(0.0, until - time.monotonic()))
            return result

        runner.execute_model = slowed
        return times
