"""One worker process of a stage node: vLLM's own worker, told that it is stage s of S although its world is its node only.

Tensor parallelism is inside the node: the leader (rank 0) hands every command on to its followers, which run this module.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.sequence import IntermediateTensors
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import CompilationTimes, WorkerWrapperBase

from coral_core.engine.plugin.on_cpu import end_with_parent, wait_patiently
from coral_core.engine.plugin.stage_layout import Node
from coral_core.engine.plugin.stage_wire import Tensors

logger = logging.getLogger("vllm.coral.stage")
_LAST_WORDS_S: Final = 2.0
"""For a leader that fails of the same, and can say of what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a worker sits: `stage` of `layers` (one count per stage), `rank` inside its node; `index` counts all nodes, `replica` those of its stage."""

    node: Node
    index: int
    replica: int
    stage: int
    layers: Sequence[int]
    rank: int
    init_method: str


class StagePosition(parallel_state.GroupCoordinator):
    """The pipeline group of a process that is alone in it: it knows its place, and has nobody to talk to."""

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:  # noqa: ANN401, ARG002 - vLLM's own signature
        """What every rank of the group has: its own."""
        return obj


def take_position(stage: int, stages: int) -> None:
    """Make vLLM build its groups for this node only and afterwards take the process for stage `stage` of `stages`."""
    build = parallel_state.ensure_model_parallel_initialized

    def build_for_node(tp: int, _pp: int, *others: int) -> None:
        build(tp, 1, *others)
        group = parallel_state.get_pp_group()
        group.__class__ = StagePosition
        group.rank, group.rank_in_group, group.world_size, group.ranks = stage, stage, stages, list(range(stages))

    gpu_worker.ensure_model_parallel_initialized = build_for_node


class Rank:
    """A worker process's part; `step` is one forward pass of the stage's layers."""

    def __init__(self, config: VllmConfig, seat: Seat) -> None:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, seat.layers))
        self._config, self._seat = config, seat
        stages = len(seat.layers)
        parallel = config.parallel_config
        parallel.tensor_parallel_size = parallel.world_size = seat.node.tp
        parallel.pipeline_parallel_size = stages
        if seat.node.kv_cache_memory_bytes is not None:
            config.cache_config.kv_cache_memory_bytes = seat.node.kv_cache_memory_bytes
        take_position(seat.stage, stages)
        wait_patiently()
        self._wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=0)
        self._wrapper.init_worker(
            [
                {
                    "vllm_config": config,
                    "local_rank": seat.rank,
                    "rank": seat.rank,
                    "distributed_init_method": seat.init_method,
                    "is_driver_worker": seat.rank == 0,
                }
            ]
        )
        # By it the configuration tells the stage, and the KV connector its port.
        parallel.rank = (seat.replica * stages + seat.stage) * seat.node.tp + seat.rank
        self._wrapper.init_device()
        self._wrapper.load_model()
        self.runner = self._wrapper.worker.model_runner

    def call(self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the method gives
        """A method of vLLM's worker, by name, or a function of it."""
        return run_method(self._wrapper, method, args, kwargs)

    def cache_config(self, engine: KVCacheConfig) -> KVCacheConfig:
        """The node's own KV cache: as the engine's, with as many blocks as the memory of each of its ranks holds."""
        specs = [self.call("get_kv_cache_spec", (), {})]
        # vLLM measures in a forward pass: ranks exchange tensors in it.
        available = min(self._gathered(self.call("determine_available_memory", (), {})))
        (own,) = get_kv_cache_configs(self._config, specs, [available])
        for name in ("kv_cache_layout", "hash_block_size", "cache_hit_alignment_tokens"):
            setattr(own, name, getattr(engine, name))
        return own

    def make_cache(self, own: KVCacheConfig) -> None:
        """Allocate it."""
        self._wrapper.initialize_from_config([own])

    def warm_up(self) -> CompilationTimes:
        """Ready for steps."""
        times: CompilationTimes = self._wrapper.compile_or_warm_up_model()
        if self._seat.stage:
            make_receiving_buffer(self.runner)
        # Last stages draw from streams of their own.
        torch.manual_seed((self._config.model_config.seed or 0) + self._seat.index)
        return times

    def step(
        self, output: SchedulerOutput, rows: dict[str, Tensors], grammar: GrammarOutput | None
    ) -> tuple[ModelRunnerOutput | Tensors | None, list[KVConnectorOutput]]:
        """Results of the last stage, activations of others (rows in the order of `order`), None without tokens; what ranks say of KV transfers."""
        inputs = _Inputs(self.runner, output, rows) if self._seat.stage else None
        result = self.runner.execute_model(output, inputs)
        if isinstance(result, IntermediateTensors):
            return result.tensors, self._said(self.runner.sample_tokens(None))
        if result is None:
            result = self.runner.sample_tokens(grammar)
        assert isinstance(result, ModelRunnerOutput)
        said = self._said(result)
        return (
            dataclasses.replace(result, kv_connector_output=None) if output.total_num_scheduled_tokens else None
        ), said

    def handshakes(self) -> list[Any]:
        """What each rank's KV connector tells the scheduler."""
        return self._gathered(self.call("get_kv_connector_handshake_metadata", (), {}))

    def _said(self, result: ModelRunnerOutput) -> list[KVConnectorOutput]:
        if self._config.kv_transfer_config is None:
            return []
        said = self._gathered(result.kv_connector_output)
        return [output for output in said if output is not None and not output.is_empty()]

    def _gathered(self, own: Any) -> list[Any]:  # noqa: ANN401 - whatever ranks have to say
        if self._seat.node.tp == 1:
            return [own]
        everyone: list[Any] = [None] * self._seat.node.tp
        torch.distributed.all_gather_object(everyone, own, group=parallel_state.get_tp_group().cpu_group)
        return everyone

    @property
    def order(self) -> list[str]:
        """The requests of the last step, in the order of its rows."""
        return list(self.runner.input_batch.req_ids)


class _Inputs(IntermediateTensors):
    """What the stage before computed, by request; laid out when the model runner, having ordered its batch, asks for it."""

    def __init__(self, runner: GPUModelRunner, output: SchedulerOutput, rows: dict[str, Tensors]) -> None:
        self._runner, self._output, self._rows = runner, output, rows

    @property
    def tensors(self) -> Tensors:
        buffers: Tensors = self._runner.intermediate_tensors.tensors
        first = 0
        for request_id in self._runner.input_batch.req_ids:
            count = self._output.num_scheduled_tokens[request_id]
            for name, rows in self._rows[request_id].items():
                buffers[name][first : first + count].copy_(rows)
            first += count
        return buffers


class Ranks:
    """All worker processes of a node, seen from the leader."""

    def __init__(self, config: VllmConfig, seat: Seat) -> None:
        self._followers = [_follower(config, seat, rank) for rank in range(1, seat.node.tp)]
        self.lead = Rank(config, seat)
        self.size = seat.node.tp

    def run(self, command: str, *payload: object) -> Any:  # noqa: ANN401 - whatever the command gives
        """Rank 0's result of a command that every rank runs."""
        if self._followers:
            parallel_state.get_tp_group().broadcast_object((command, payload), src=0)
        return getattr(self.lead, command)(*payload)


def _follower(config: VllmConfig, seat: Seat, rank: int) -> subprocess.Popen[bytes]:
    own = dataclasses.replace(seat, rank=rank)
    process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE)  # noqa: S603 - this interpreter
    assert process.stdin is not None
    pickle.dump((config, own), process.stdin)
    process.stdin.close()
    threading.Thread(target=end_after, args=(process, rank), name=f"coral-stage-rank-{rank}", daemon=True).start()
    return process


def end_after(process: subprocess.Popen[bytes], rank: int) -> None:
    """End this process soon after that of another rank: nothing else tells a leader that waits for it inside a collective."""
    code = process.wait()
    time.sleep(_LAST_WORDS_S)
    logger.error("rank %d of this node ended with code %d: so does the node", rank, code)
    os._exit(1)


def make_receiving_buffer(runner: GPUModelRunner) -> None:
    """Where a later stage's inputs go: vLLM 0.32 makes it in a warm-up, and skips that where eager and told its KV cache's size."""
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def main() -> None:
    """A follower: run what the leader hands on."""
    end_with_parent()
    config, seat = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the leader, this process's parent
    rank = Rank(config, seat)
    with set_current_vllm_config(config):
        while True:
            command, payload = parallel_state.get_tp_group().broadcast_object(None, src=0)
            getattr(rank, command)(*payload)


if __name__ == "__main__":
    main()
