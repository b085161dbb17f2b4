"""vLLM's KV connector of the fleet: decode engines fetch KV caches from prefill engines of any split and block size.

`--kv-transfer-config '{"kv_connector": "CoralKVConnector", "kv_connector_module_path": "coral_core.engine.plugin.kv_connector",
"kv_role": "kv_producer"}'`, `kv_consumer` at the other end; `kv_connector_extra_config` is `kv_plan.Terms`.

A producer's finished request leaves an `Offer` in `kv_transfer_params`: the workers that hold its layers, and a lease. The
consumer's scheduler works out which of its workers fetches what from whom, and each of them does so beside the model's steps.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from coral_core.engine.plugin.kv_plan import PlanError
from coral_core.engine.plugin.kv_scheduler import SchedulerSide
from coral_core.engine.plugin.kv_stats import TransferCounts, TransferMetrics
from coral_core.engine.plugin.kv_worker import WorkerSide, total_heads


class CoralKVConnector(SchedulerSide, WorkerSide):
    """Both ends, in both kinds of process: vLLM makes one in its scheduler and one in each worker."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.begin_scheduler()
        else:
            self.begin_worker()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferCounts:
        """What workers counted, as it comes from the engine's process."""
        return TransferCounts(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> TransferMetrics:  # noqa: ANN401 - as vLLM's own
        """Its series at `/metrics`."""
        return TransferMetrics(*given)


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """PlanError for an engine whose KV cache this connector would not transfer whole."""
    parallel = vllm_config.parallel_config
    heads, ranks = total_heads(vllm_config), parallel.tensor_parallel_size
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise PlanError("CoralKVConnector needs one KV cache group: set --disable-hybrid-kv-cache-manager")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise PlanError("CoralKVConnector does not know context parallelism")
    if parallel.data_parallel_size > 1:
        raise PlanError("CoralKVConnector does not know data parallelism: run one instance for each rank")
    if vllm_config.speculative_config is not None:
        raise PlanError("CoralKVConnector does not transfer the KV cache of a draft model")
    if heads % ranks and ranks % heads:
        raise PlanError(f"{heads} KV heads cannot be shared out among {ranks} tensor-parallel ranks")
