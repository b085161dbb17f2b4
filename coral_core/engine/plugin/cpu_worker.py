"""vLLM's CPU worker, mended for pipelines, patient (see `on_cpu`), and able to act as a slower device.

Used as `--worker-cls coral_core.engine.plugin.cpu_worker.StageWorker`.

* With `--enforce-eager` and a stated KV size vLLM 0.32 skips the warm-up that would make the buffer into which a later
  pipeline stage receives; its first request then kills the engine. Here the buffer is made in any case.
* `CORAL_STAGE_DELAY_MS`, milliseconds per step of each pipeline stage (`5,30`; one figure is for all), makes stages unequal
  on a machine whose cores are equal. A step without tokens is not delayed.
* `CORAL_LAYER_DELAY_MS`, milliseconds per layer that the stage holds, and after a comma per layer and token of the step
  (`2,0.01`), makes a device whose time is known and does not hang on what else the machine does: it sleeps.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from coral_core.engine.plugin.on_cpu import end_with_parent, let_nixl_sleep, wait_patiently
from coral_core.engine.plugin.stage_rank import make_receiving_buffer

DELAY_VARIABLE = "CORAL_STAGE_DELAY_MS"
LAYER_DELAY_VARIABLE = "CORAL_LAYER_DELAY_MS"


class StageWorker(CPUWorker):
    """One stage of a pipeline on the CPU."""

    _delay_s = 0.0
    _token_delay_s = 0.0

    def init_device(self) -> None:
        """As vLLM's. A worker process ends with its engine however that ends: vLLM's own watch on it fails where engines are forks."""
        if multiprocessing.parent_process() is not None:
            end_with_parent()
        wait_patiently()
        transfer = self.vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == "NixlConnector":
            let_nixl_sleep()
        super().init_device()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up as vLLM does; afterwards a later stage has its receiving buffer and every stage knows its delay."""
        times = super().compile_or_warm_up_model()
        stage = get_pp_group()
        runner = self.model_runner
        if not stage.is_first_rank:
            make_receiving_buffer(runner)
        self._delay_s = stage_delay_s(os.environ.get(DELAY_VARIABLE, ""), stage.rank_in_group, stage.world_size)
        # Not `get_num_layers`: on the second of two nodes it takes the rank inside the node for that in the pipeline.
        first, end = get_pp_indices(
            runner.model_config.get_total_num_hidden_layers(), stage.rank_in_group, stage.world_size
        )
        per_layer_s, per_token_s = layer_delay_s(os.environ.get(LAYER_DELAY_VARIABLE, ""))
        self._delay_s += (end - first) * per_layer_s
        self._token_delay_s = (end - first) * per_token_s
        if self._delay_s or self._token_delay_s:
            self._slow_down()
        return times

    def _slow_down(self) -> None:
        """Sleep where the layers compute: a stage's input is there by then, and KV transfers of the step have begun."""
        runner = self.model_runner
        execute, forward = runner.execute_model, runner._model_forward  # noqa: SLF001 - vLLM made it to be overridden
        tokens = 0

        def executed(scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:  # noqa: ANN401 - vLLM's
            nonlocal tokens
            tokens = scheduler_output.total_num_scheduled_tokens
            return execute(scheduler_output, intermediate_tensors)

        def slowed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            time.sleep(self._delay_s + tokens * self._token_delay_s)
            return forward(*args, **kwargs)

        runner.execute_model, runner._model_forward = executed, slowed  # noqa: SLF001


def stage_delay_s(text: str, stage: int, stages: int) -> float:
    """The delay in seconds of `stage` (from 0) by the text of `CORAL_STAGE_DELAY_MS`; ValueError where it fits no pipeline of `stages`."""
    if not text.strip():
        return 0.0
    try:
        delays_ms = [float(part) for part in text.split(",")]
    except ValueError:
        delays_ms = []
    if len(delays_ms) not in {1, stages} or not all(0.0 <= delay_ms < 60_000.0 for delay_ms in delays_ms):
        raise ValueError(
            f"{DELAY_VARIABLE}={text!r}: give one figure, or one for each of {stages} stages, in milliseconds from 0 to 60000"
        )
    return (delays_ms * stages)[stage] / 1000.0


def layer_delay_s(text: str) -> tuple[float, float]:
    """Seconds per layer, and per layer and token, by the text of `CORAL_LAYER_DELAY_MS`; ValueError where it is none."""
    if not text.strip():
        return 0.0, 0.0
    try:
        delays_ms = [float(part) for part in text.split(",")]
    except ValueError:
        delays_ms = []
    if len(delays_ms) not in {1, 2} or not all(0.0 <= delay_ms < 60_000.0 for delay_ms in delays_ms):
        raise ValueError(
            f"{LAYER_DELAY_VARIABLE}={text!r}: give milliseconds per layer, and perhaps per layer and token, from 0 to 60000"
        )
    return delays_ms[0] / 1000.0, sum(delays_ms[1:]) / 1000.0
