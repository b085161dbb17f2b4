"""The KV connector in a worker's process: it serves and fetches the KV of this worker's layers and heads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.network_utils import get_ip
from vllm.v1.attention.backend import AttentionMetadata

from coral_core.engine.plugin.kv_cache import PagedCache, packed_order
from coral_core.engine.plugin.kv_keys import fleet_keys
from coral_core.engine.plugin.kv_lease import LeaseTable
from coral_core.engine.plugin.kv_plan import Place, PlanError, Shape, head_range, terms
from coral_core.engine.plugin.kv_puller import BlockPuller, Pull
from coral_core.engine.plugin.kv_scheduler import Hello, StepMetadata
from coral_core.engine.plugin.kv_server import BlockServer
from coral_core.engine.plugin.kv_stats import TransferCounts


class WorkerSide(KVConnectorBase_V1):
    """The half of the connector that vLLM's model runners call. Nothing here waits for the network."""

    _hello: Hello | None = None
    _server: BlockServer | None = None
    _puller: BlockPuller | None = None
    _reported: Mapping[str, int] = {}

    def begin_worker(self) -> None:
        """Be ready for the model runner's calls."""
        self._limits = terms(self._kv_transfer_config.kv_connector_extra_config)
        self._keys = fleet_keys(self._limits.key_file)
        self._id = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        self._leases = LeaseTable(self._limits.lease_s, time.monotonic)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Begin to serve and to fetch. PlanError where the caches are not what this connector knows."""
        paged, place, shape = self._known(kv_caches)
        block_size = self._vllm_config.cache_config.block_size
        if self._kv_transfer_config.is_kv_producer:
            first_port, rank = self._limits.first_port, self._vllm_config.parallel_config.rank
            self._server = BlockServer(
                keys=self._keys,
                host=self._limits.host or get_ip(),
                port=None if first_port is None else first_port + rank,
                terms=self._limits,
                place=place,
                shape=shape,
                block_size=block_size,
                leases=self._leases,
                read=paged.read,
            )
            place = self._server.place
        if self._kv_transfer_config.is_kv_consumer:
            self._puller = BlockPuller(
                keys=self._keys,
                taker="{}.{}".format(*self._id),
                terms=self._limits,
                block_size=block_size,
                shape=shape,
                write=paged.write,
                clock=time.monotonic,
            )
        self._hello = Hello(place=place, shape=shape)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this engine's scheduler is to know of this worker."""
        return self._hello

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin what the scheduler says with this step.

        Not in `start_load_kv`: vLLM 0.32 calls that after the forward pass, which on a CPU is a step later, also for leases
        that others wait for. Beginning takes no time here: other threads do the work.
        """
        super().bind_connector_metadata(connector_metadata)
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        for request_id, grant in step.grants.items():
            self._leases.grant(grant.lease, request_id, grant.block_ids, grant.tokens)
        if self._puller is None:
            return
        for request_id, fetch in step.fetches.items():
            self._puller.start(
                Pull(
                    request_id=request_id,
                    lease=fetch.lease,
                    sources=fetch.sources.get(self._id, ()),
                    first=fetch.first,
                    last=fetch.last,
                    block_ids=fetch.block_ids,
                    error=fetch.error,
                )
            )
        for request_id in step.cancelled:
            self._puller.cancel(request_id)
        for address, message in step.tells if self._id == (0, 0) else ():
            self._puller.tell(address, message)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        """Nothing: it has begun."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002 - vLLM's
        """The requests whose blocks need not be kept any more, and those whose fetch has ended, well or not."""
        pulled = list(self._puller.take_ended()) if self._puller is not None else []
        return KVConnectorTransferResults(
            finished_sending=self._leases.take_ended(),
            finished_recving={one.request_id for one in pulled},
            failed_recving={one.request_id for one in pulled if one.error},
        )

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What the fetches counted since the last call, None if nothing."""
        if self._puller is None or (counts := dict(self._puller.counts)) == self._reported:
            return None
        before, self._reported = self._reported, counts
        return TransferCounts(data={name: count - before.get(name, 0) for name, count in counts.items()})

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request is scheduled before all of it is there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        """Nothing: consumers fetch from the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing, as above."""

    def shutdown(self) -> None:
        """Serve and fetch nothing any more."""
        for thread in (self._server, self._puller):
            if thread is not None:
                thread.close()

    def _known(self, kv_caches: dict[str, torch.Tensor]) -> tuple[PagedCache, Place, Shape]:
        caches: dict[int, torch.Tensor] = {}
        for name, cache in kv_caches.items():
            if caches.setdefault(extract_layer_index(name), cache) is not cache:
                raise PlanError(f"layer {name} has more than one KV cache")
        if len({(cache.shape, cache.dtype) for cache in caches.values()}) != 1:
            raise PlanError("the KV caches of the layers are not alike")
        name, cache = next(iter(kv_caches.items()))
        heads = total_heads(self._vllm_config)
        layers = (min(caches), max(caches) + 1)
        own = head_range(self._id[1], get_tp_group().world_size, heads)
        if cache.dim() != 4 or own[1] - own[0] != cache.shape[1] or len(caches) != layers[1] - layers[0]:
            raise PlanError(
                f"layers {sorted(caches)} with KV caches of shape {tuple(cache.shape)} are not {layers} with {own}"
            )
        shape = Shape(
            layers=self._vllm_config.model_config.get_total_num_hidden_layers(),
            heads=heads,
            content=cache.shape[3],
            dtype=str(cache.dtype),
            element_bytes=cache.element_size(),
        )
        order = None
        if cache.device.type == "cpu":
            attention = self._vllm_config.compilation_config.static_forward_context[name]
            order = packed_order(cache, attention.isa, attention.kv_cache_dtype)
        return PagedCache(caches, own, order), Place(address="", layers=layers, heads=own), shape


def total_heads(vllm_config: VllmConfig) -> int:
    """The KV heads of the model; latent attention has one, which all ranks hold."""
    model = vllm_config.model_config
    return 1 if model.use_mla else model.get_total_num_kv_heads()
