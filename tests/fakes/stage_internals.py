"""What the stage driver stands on: the environment that it needs, and the parts of vLLM that the runtime is built on."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60",
}
"""Of the process that runs `stage_driver`, beside a PYTHONPATH that has this repository."""

INTERNALS = {
    "vllm.v1.engine.core:EngineCore.__init__": "a828c07af25a",
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches": "47b605622969",
    "vllm.v1.engine.core:EngineCore.step": "a02d17986fb7",
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": "a905a2e1c445",
    "vllm.v1.executor.abstract:Executor": "bfc8a1dd0f62",
    "vllm.config.vllm:VllmConfig.max_concurrent_batches": "134b00e18e9f",
    "vllm.v1.core.sched.output:SchedulerOutput": "97fb4463a2ed",
    "vllm.v1.core.sched.output:NewRequestData": "aa136aaeddfe",
    "vllm.v1.core.sched.output:CachedRequestData": "b0a215b04012",
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": "c02680245672",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "da4f2cf2fc39",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "85b29db96051",
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": "8963d2ab6518",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "4113f5de8a84",
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": "2b527eb8070d",
    "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data": "8aeb1dc3ba93",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "b7a4ef7b8aa5",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": "1b386dca84e6",
    "vllm.v1.core.sched.scheduler:Scheduler._request_blocks_can_be_freed": "d3dd6fc13e67",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks": "f967ef091154",
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": "98d49f74d399",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "8c60d937fd9e",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": "6ee26cbc5b6f",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.pop_blocks_for_free": "9d152d7c6b72",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "c97ea366f52b",
    "vllm.v1.core.block_pool:BlockPool.free_blocks": "f12f94bc787c",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_configs": "6154002c9d69",
    "vllm.v1.outputs:ModelRunnerOutput": "b936f7c6940f",
    "vllm.v1.worker.worker_base:WorkerWrapperBase": "3050ac6f4b4d",
    "vllm.v1.worker.gpu_worker:init_worker_distributed_environment": "b8ecedb6d9f6",
    "vllm.v1.worker.gpu_worker:Worker.execute_model": "782126ba48e7",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": "11721464aeb0",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "326599f31b27",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "e058bf791a29",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "047e6a4738de",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess": "c9dda92faeb3",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sync_and_gather_intermediate_tensors": "ab853c8015d4",
    "vllm.distributed.parallel_state:GroupCoordinator.is_first_rank": "1fa0960b2e7a",
    "vllm.distributed.parallel_state:GroupCoordinator.is_last_rank": "0cedd370b25f",
    "vllm.distributed.parallel_state:ensure_model_parallel_initialized": "b253677203db",
    "vllm.distributed.utils:get_pp_indices": "b019144ef4ec",
    "vllm.distributed.utils:sched_yield": "7cca12677ac7",
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait": "3c5dd220ba84",
    "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.__init__": "f2964a2a9f33",
}
"""Digests of the source of each, in vLLM 0.32.0."""


def digest(name: str) -> str:
    """Of `module:path.to.thing`, as it is installed; engine's interpreter only."""
    module, _, path = name.partition(":")
    thing: Any = importlib.import_module(module)
    for part in path.split("."):
        thing = inspect.getattr_static(thing, part)
    thing = inspect.unwrap(getattr(thing, "fget", None) or thing)
    return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()[:12]
