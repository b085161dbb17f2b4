"""vLLM's scheduler over stages with several nodes: it schedules path by path, and counts each node's own blocks.

Requests of one path share all their nodes, so a step for them is an ordinary step of a pipeline, and whom it preempts frees
blocks where they are short. Admission: a request gets blocks only if every node of its path has them; nobody's blocks are
free while a step that writes them is in flight, so out-of-order steps cannot overwrite each other.
Prefix caching is off: a prefix in the cache of one node is of no use to a request bound to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from coral_core.engine.plugin.kv_connector import CoralKVConnector
from coral_core.engine.plugin.stage_kv import workers_of
from coral_core.engine.plugin.stage_layout import Path
from coral_core.engine.plugin.stage_pipeline import Outcome, Pipeline
from coral_core.engine.plugin.stage_steps import outcome_of, united


class StageScheduler(Scheduler):
    """Made by `StageExecutor` for its `pipeline`."""

    pipeline: ClassVar[Pipeline]
    running: list[Request]
    waiting: RequestQueue
    kv_holding_waiting: RequestQueue
    max_num_active_reqs: int

    def __init__(self, *, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **others: Any) -> None:  # noqa: ANN401 - the engine core's
        kv_cache_config.num_blocks = self.pipeline.pools.scheduler_blocks(self.pipeline.layout)
        vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **others)
        self.defer_block_free = False  # blocks wait here for their request's steps, not for the steps before them
        self._late_blocks: dict[str, list[KVCacheBlock]] = {}
        self._turn = 0
        self._tells = True
        self._count_on_nodes()
        if isinstance(self.connector, CoralKVConnector):
            pipeline = self.pipeline
            self.connector.bound = lambda request_id: workers_of(pipeline.layout, pipeline.bindings.paths[request_id])

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002 - vLLM's own signature
        """A step for every path that has something to do."""
        self.pipeline.notice()
        paths = self._ready_paths()
        self._turn += 1
        first = self._turn % max(1, len(paths))
        steps = [
            (path, self._schedule_path(path, throttle_prefills=throttle_prefills))
            for path in paths[first:] + paths[:first]
        ]
        return united(steps or [((), self._schedule_path((), throttle_prefills=throttle_prefills))])

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,  # noqa: ARG002 - vLLM's own signature
        model_runner_output: ModelRunnerOutput,
    ) -> dict[int, EngineCoreOutputs]:
        """Take whatever came back; `scheduler_output`, the step that the engine core waited for, does not matter."""
        assert isinstance(model_runner_output, Outcome)
        self._free_late_blocks()
        whole: dict[int, EngineCoreOutputs] = {}
        transfers = ModelRunnerOutput.with_kv_conn_output_only(model_runner_output.kv_connector_output)
        parts = [*model_runner_output.parts, ({}, transfers)]
        for number, (tokens, result) in enumerate(parts, 1):
            self._tells = number == len(parts)
            _add(whole, super().update_from_output(outcome_of(tokens), result))
        if model_runner_output.lost:
            _add(whole, self._fail(model_runner_output.lost))
        return whole

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:  # noqa: ANN401 - vLLM's own
        """Once per outcome: what is counted since the last time is told, and forgotten."""
        return super().make_stats(*args, **kwargs) if self._tells else None

    def _ready_paths(self) -> list[Path]:
        bind = self.pipeline.bindings.bind
        ready = {
            bind(request.request_id)
            for request in self.running
            if request.num_tokens_with_spec > request.num_computed_tokens
        }
        for waiting in (self.kv_holding_waiting, self.waiting):
            ready |= {bind(request.request_id) for request in waiting}
        return sorted(ready)

    def _schedule_path(self, path: Path, *, throttle_prefills: bool) -> SchedulerOutput:
        """As vLLM schedules, with the other paths' requests out of its sight."""
        everyone, limit = self.running, self.max_num_active_reqs
        self.running, others = self._split(everyone, path)
        self.waiting, waiting = self._queues(self.waiting, path)
        self.kv_holding_waiting, holding = self._queues(self.kv_holding_waiting, path)
        self.max_num_active_reqs = max(0, limit - len(others))
        # vLLM copies the tokens of whoever was not in the step before, for connectors that ask for them.
        self.prev_step_scheduled_req_ids = {request.request_id for request in self.running}
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = limit
            self.running = others + self.running
            for request in waiting:
                self.waiting.add_request(request)
            for request in holding:
                self.kv_holding_waiting.add_request(request)

    def _split(self, requests: Iterable[Request], path: Path) -> tuple[list[Request], list[Request]]:
        own: list[Request] = []
        others: list[Request] = []
        for request in requests:
            mine = self.pipeline.bindings.bind(request.request_id) == path
            (own if mine else others).append(request)
        return own, others

    def _queues(self, requests: RequestQueue, path: Path) -> tuple[RequestQueue, list[Request]]:
        """The path's requests that may start, as a queue; the rest. A preempted one waits for its steps in flight."""
        own, others = self._split(requests, path)
        mine = create_request_queue(self.policy)
        for request in own:
            if self.pipeline.flying(request.request_id):
                others.append(request)
            else:
                mine.add_request(request)
        return mine, others

    def _fail(self, lost: dict[str, str]) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = {}
        for request in self.finish_requests(lost, RequestStatus.FINISHED_ERROR):
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=lost[request.request_id],
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            _add(outputs, {request.client_index: EngineCoreOutputs(outputs=[output])})
        return outputs

    def _count_on_nodes(self) -> None:
        """Let the KV cache manager ask for, and give back, blocks on the nodes of a request's path as well."""
        manager, pipeline = self.kv_cache_manager, self.pipeline
        pool = manager.block_pool
        allocate, free, free_blocks = manager.allocate_slots, manager.free, pool.get_num_free_blocks

        def allocate_on_path(request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:  # noqa: ANN401 - vLLM's own
            path = pipeline.bindings.bind(request.request_id)
            pool.get_num_free_blocks = lambda: min(free_blocks(), pipeline.pools.free_blocks(path))
            try:
                blocks = allocate(request, *args, **kwargs)
            finally:
                pool.get_num_free_blocks = free_blocks
            if blocks is not None:
                held = manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
                pipeline.pools.grow(request.request_id, path, len(held))
            return blocks

        def free_on_path(request: Request) -> None:
            free(request)
            pipeline.release(request.request_id)

        manager.allocate_slots = allocate_on_path
        manager.free = free_on_path

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        return not self.pipeline.flying(request.request_id)

    def _free_request_blocks(self, request: Request) -> None:
        if self._request_blocks_can_be_freed(request):
            self.kv_cache_manager.free(request)
        else:
            self._late_blocks[request.request_id] = self.kv_cache_manager.pop_blocks_for_free(request)

    def _free_late_blocks(self) -> None:
        landed = [request_id for request_id in self._late_blocks if not self.pipeline.flying(request_id)]
        for request_id in landed:
            self.kv_cache_manager.block_pool.free_blocks(reversed(self._late_blocks.pop(request_id)))
            self.pipeline.release(request_id)


def _add(whole: dict[int, EngineCoreOutputs], more: dict[int, EngineCoreOutputs]) -> None:
    for client, outputs in more.items():
        if client not in whole:
            whole[client] = outputs
            continue
        own = whole[client]
        own.outputs = own.outputs + outputs.outputs
        own.scheduler_stats = outputs.scheduler_stats or own.scheduler_stats
        if outputs.finished_requests:
            own.finished_requests = (own.finished_requests or set()) | outputs.finished_requests
