"""The KV connector in the scheduler's process: what to offer, what to fetch, and which blocks to keep for others."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from coral_core.engine.plugin.kv_frames import Done, Renew
from coral_core.engine.plugin.kv_plan import (
    VERSION,
    Offer,
    Place,
    PlanError,
    Shape,
    Source,
    offered,
    prompt_digest,
    sources,
    terms,
)

WorkerId = tuple[Any, ...]
"""Pipeline rank and tensor-parallel rank; then what tells apart the nodes of a stage, where it has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(KVConnectorHandshakeMetadata):
    """What a worker tells its engine's scheduler."""

    place: Place
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A producer's request that has finished: its blocks are kept under `lease`."""

    lease: str
    block_ids: list[int]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A consumer's request: its tokens `[first, last)` go to its blocks; `sources` by pipeline and tensor-parallel rank."""

    first: int
    last: int
    block_ids: list[int]
    lease: str = ""
    sources: dict[tuple[int, int], tuple[Source, ...]] = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True, kw_only=True)
class StepMetadata(KVConnectorMetadata):
    """What all workers hear with a step; `tells` are messages that one of them sends: (address, message)."""

    grants: dict[str, Grant] = field(default_factory=dict)
    fetches: dict[str, Fetch] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    tells: list[tuple[str, Done | Renew]] = field(default_factory=list)


class SchedulerSide(KVConnectorBase_V1):
    """The half of the connector that vLLM's scheduler calls.

    `bound`: the workers that serve a request, where an executor gives a stage's requests to several nodes; all by default.
    """

    bound: Callable[[str], Iterable[WorkerId]]

    def begin_scheduler(self) -> None:
        """Be ready for the scheduler's calls."""
        self._terms = terms(self._kv_transfer_config.kv_connector_extra_config)
        self._places: dict[WorkerId, Place] = {}
        self._shape: Shape | None = None
        self.bound = lambda _: self._places
        self._step = StepMetadata()
        self._wanted: dict[str, tuple[Offer, float]] = {}

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[WorkerId, KVConnectorHandshakeMetadata]) -> None:
        """Learn of this engine's workers; PlanError where their caches are not alike."""
        hellos = {worker: hello for worker, hello in metadata.items() if isinstance(hello, Hello)}
        self._places = {worker: hello.place for worker, hello in hellos.items()}
        shapes = {hello.shape for hello in hellos.values()}
        if len(shapes) != 1:
            raise PlanError(f"the KV caches of this engine's workers are not alike: {shapes}")
        self._shape = shapes.pop()

    def on_new_request(self, request: Request) -> None:
        """It may wait long for blocks of its own: until it has fetched, its lease is renewed."""
        if self._is_to_fetch(request):
            with suppress(PlanError):  # told when it is scheduled
                self._want(request.request_id, offered(request.kv_transfer_params))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All of the prompt that is not here. A broken offer counts too: its fetch fails, and the policy says what then."""
        missing = request.num_prompt_tokens - num_computed_tokens if self._is_to_fetch(request) else 0
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Order the fetch into these blocks, once; if there is nothing to fetch, the producer may have its own back."""
        if not self._is_to_fetch(request):
            return
        assert request.kv_transfer_params is not None
        request.kv_transfer_params["do_remote_prefill"] = False
        if num_external_tokens == 0:
            self._give_back(request)
            return
        last = request.num_prompt_tokens
        fetch = Fetch(first=last - num_external_tokens, last=last, block_ids=list(blocks.get_block_ids()[0]))
        try:
            fetch = self._planned(request, fetch)
        except PlanError as error:
            fetch = replace(fetch, error=str(error))
            self._give_back(request)
        self._step.fetches[request.request_id] = fetch

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:  # noqa: ARG002 - vLLM's
        """What the workers are to hear with this step."""
        for request_id, (offer, due_s) in self._wanted.items():
            if time.monotonic() > due_s:
                self._want(request_id, offer)
                self._step.tells += [(place.address, Renew(lease=offer.lease)) for place in offer.places]
        step, self._step = self._step, StepMetadata()
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """All workers have ended the fetches of some requests."""
        for request_id in connector_output.finished_recving or ():
            self._wanted.pop(request_id, None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether to keep its blocks, and what to tell whoever asked for it."""
        params = request.kv_transfer_params or {}
        if self._is_to_fetch(request):  # it ended before it was scheduled
            params["do_remote_prefill"] = False
            self._give_back(request)
        if self._wanted.pop(request.request_id, None) is not None:
            self._step.cancelled.add(request.request_id)
        whole = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not (self._kv_transfer_config.is_kv_producer and params.get("do_remote_decode") and whole and block_ids):
            return False, None
        lease = f"{self._kv_transfer_config.engine_id}/{uuid.uuid4().hex}"
        tokens = request.num_prompt_tokens
        self._step.grants[request.request_id] = Grant(lease=lease, block_ids=list(block_ids), tokens=tokens)
        assert self._shape is not None
        offer = Offer(
            version=VERSION,
            lease=lease,
            lease_s=self._terms.lease_s,
            tokens=tokens,
            prompt=digest_of(request),
            shape=self._shape,
            places=tuple(self._places[worker] for worker in self.bound(request.request_id)),
        )
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._kv_transfer_config.engine_id,
            "remote_request_id": request.request_id,
            "coral": msgspec.to_builtins(offer),
        }

    def _want(self, request_id: str, offer: Offer) -> None:
        self._wanted[request_id] = (offer, time.monotonic() + offer.lease_s / 4)

    def _is_to_fetch(self, request: Request) -> bool:
        params = request.kv_transfer_params
        return bool(self._kv_transfer_config.is_kv_consumer and params and params.get("do_remote_prefill"))

    def _planned(self, request: Request, fetch: Fetch) -> Fetch:
        offer = offered(request.kv_transfer_params)
        if offer.shape != self._shape:
            raise PlanError(f"the prefill engine's KV cache is {offer.shape}, this engine's {self._shape}")
        if offer.tokens != request.num_prompt_tokens or offer.prompt != digest_of(request):
            raise PlanError(
                f"the offer is for another prompt ({offer.tokens} tokens, here {request.num_prompt_tokens})"
            )
        bound = list(self.bound(request.request_id))
        fetches, unneeded = sources(offer.places, tuple(self._places[worker] for worker in bound))
        self._step.tells += [(address, Done(lease=offer.lease, taker="", takers=0)) for address in unneeded]
        return replace(
            fetch,
            lease=offer.lease,
            sources={(worker[0], worker[1]): own for worker, own in zip(bound, fetches, strict=True)},
        )

    def _give_back(self, request: Request) -> None:
        self._wanted.pop(request.request_id, None)
        try:
            offer = offered(request.kv_transfer_params)
        except PlanError:
            return
        done = Done(lease=offer.lease, taker="", takers=0)
        self._step.tells += [(place.address, done) for place in offer.places]


def digest_of(request: Request) -> str:
    """Of all that the KV cache of a prompt depends on."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    return prompt_digest(request.prompt_token_ids or (), adapter, *(part.identifier for part in request.mm_features))
