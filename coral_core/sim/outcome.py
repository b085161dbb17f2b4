"""What a run yields, and the proof that it lost nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from coral_core.sim import columns as c
from coral_core.sim.pack import Packed
from coral_core.sim.world import Floats, Ints


class ConservationError(RuntimeError):
    """The simulator lost or counted something twice: a bug in it, never a result."""


class RequestStatus(IntEnum):
    """How a request ended.

    `rejected` on arrival, `too_long` for the KV of the node it was bound to, `failed` with its instance; `unfinished`:
    the run ended first.
    """

    DONE = 0
    FAILED = 1
    REJECTED = 2
    TOO_LONG = 3
    UNFINISHED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """Per request, (n,), in the order given. Instants are NaN where they never came, instances -1.

    `first_token_s` is the end of the prompt's last chunk, `second_token_s` of the first step that only decodes, `finish_s` the last token's instant (or that of rejection or
    failure); `scheduled_s` the first computation, `decode_s` when its KV was where it decodes. `prefill_instance` and `instance` (the last one) index the outcome's
    `instances`.
    """

    status: NDArray[np.int8]
    scheduled_s: Floats
    first_token_s: Floats
    second_token_s: Floats
    decode_s: Floats
    finish_s: Floats
    generated_tokens: Ints
    preemptions: Ints
    retries: Ints
    prefill_instance: Ints
    instance: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """Sums per epoch: (E, N) of nodes, (E, I) of instances, (E, P) of the router's queues.

    `paid_s` counts from the start of booting to the stop, `up_s` without booting. `waiting_request_s` integrates the
    number of requests that arrived and were not scheduled yet. `kv_block_s` integrates blocks in use.
    """

    busy_s: Floats
    kv_block_s: Floats
    iterations: Floats
    batched_tokens: Floats
    paid_s: Floats
    up_s: Floats
    emitted_tokens: Floats
    first_tokens: Floats
    done_requests: Floats
    lost_requests: Floats
    preempted_requests: Floats
    waiting_request_s: Floats
    max_waiting_requests: Floats
    arrived_requests: Floats
    rejected_requests: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOutcome:
    """One run. `digest` covers every event to the last bit of its time and every request's end."""

    requests: RequestOutcome
    fleet: FleetOutcome
    instances: tuple[str, ...]
    nodes: tuple[str, ...]
    node_instance: Ints
    kv_blocks: Ints
    peak_kv_blocks: Ints
    queues: tuple[str, ...]
    epoch_starts_s: Floats
    end_s: float
    events: int
    digest: str


_STATUS = {
    c.DONE: RequestStatus.DONE,
    c.FAILED: RequestStatus.FAILED,
    c.REJECTED: RequestStatus.REJECTED,
    c.TOO_LONG: RequestStatus.TOO_LONG,
}


def outcome_of(packed: Packed, end_s: float) -> SimOutcome:
    """Read a finished world. Raises ConservationError if it does not add up."""
    w = packed.world
    check_conservation(packed)
    status = np.full(len(w.req), RequestStatus.UNFINISHED, dtype=np.int8)
    for state, value in _STATUS.items():
        status[w.req[:, c.R_STATE] == state] = value
    instants = np.where(w.reqf < 0, np.nan, w.reqf)
    requests = RequestOutcome(
        status=status,
        scheduled_s=instants[:, c.Q_SCHEDULED],
        first_token_s=instants[:, c.Q_FIRST],
        second_token_s=instants[:, c.Q_SECOND],
        decode_s=instants[:, c.Q_DECODE],
        finish_s=instants[:, c.Q_FINISH],
        generated_tokens=w.req[:, c.R_GENERATED].copy(),
        preemptions=w.req[:, c.R_PREEMPTIONS].copy(),
        retries=w.req[:, c.R_RETRIES].copy(),
        prefill_instance=w.req[:, c.R_ENTRY_INSTANCE].copy(),
        instance=w.req[:, c.R_LAST_INSTANCE].copy(),
    )
    return SimOutcome(
        requests=requests,
        fleet=FleetOutcome(
            busy_s=w.node_stat[:, :, c.A_BUSY],
            kv_block_s=w.node_stat[:, :, c.A_KV],
            iterations=w.node_stat[:, :, c.A_ITERATIONS],
            batched_tokens=w.node_stat[:, :, c.A_TOKENS],
            paid_s=w.inst_stat[:, :, c.B_PAID],
            up_s=w.inst_stat[:, :, c.B_UP],
            emitted_tokens=w.inst_stat[:, :, c.B_EMITTED],
            first_tokens=w.inst_stat[:, :, c.B_FIRST],
            done_requests=w.inst_stat[:, :, c.B_DONE],
            lost_requests=w.inst_stat[:, :, c.B_LOST],
            preempted_requests=w.inst_stat[:, :, c.B_PREEMPTED],
            waiting_request_s=w.pool_stat[:, :, c.D_WAITING],
            max_waiting_requests=w.pool_stat[:, :, c.D_MAX_WAITING],
            arrived_requests=w.pool_stat[:, :, c.D_ARRIVED],
            rejected_requests=w.pool_stat[:, :, c.D_REJECTED],
        ),
        instances=tuple(instance.name for instance in packed.instances),
        nodes=packed.node_names,
        node_instance=packed.node_instance,
        kv_blocks=w.node[:, c.N_BLOCKS].copy(),
        peak_kv_blocks=w.node[:, c.N_PEAK].copy(),
        queues=packed.pools,
        epoch_starts_s=w.epoch_s.copy(),
        end_s=end_s,
        events=int(w.counter[c.C_EVENTS]),
        digest=_digest(packed),
    )


def check_conservation(packed: Packed) -> None:
    """Every request in exactly one place, every token and block counted once.

    Queues are walked, not trusted; blocks are summed from the requests that hold them; tokens are compared between
    requests, instances and the total.
    """
    w = packed.world
    state = w.req[:, c.R_STATE]
    ended = np.isin(state, (c.DONE, c.FAILED, c.REJECTED, c.TOO_LONG))
    _expect_equal("requests that arrived", int(w.counter[c.C_ARRIVED]), int((state != c.FUTURE).sum()))
    standing = _standing_in_queues(packed)
    _expect_equal("requests that ended but stand in a queue", 0, int((standing & ended).sum()))
    queued = np.isin(state, (c.QUEUED, c.WAITING))
    _expect_equal("requests that wait but stand in no queue", 0, int((queued & ~standing).sum()))
    done = state == c.DONE
    _expect_equal(
        "tokens of requests that are done", int(w.req[done, c.R_OUTPUT].sum()), int(w.req[done, c.R_GENERATED].sum())
    )
    _expect_equal("tokens emitted", int(w.counter[c.C_EMITTED]), int(w.req[:, c.R_GENERATED].sum()))
    _expect_equal("tokens by instance", int(w.counter[c.C_EMITTED]), int(w.inst_stat[:, :, c.B_EMITTED].sum()))
    held = np.zeros(len(w.node), dtype=np.int64)
    outstanding = np.zeros(len(w.inst), dtype=np.int64)
    for owner, blocks, offset in (
        (c.R_INSTANCE, c.R_BLOCKS, 0),
        (c.R_SOURCE, c.R_SOURCE_BLOCKS, int(w.fixed[c.Z_MAX_STAGES])),
    ):
        mine = np.flatnonzero(w.req[:, owner] >= 0)
        np.add.at(outstanding, w.req[mine, owner], 1)
        _expect_equal("requests that ended but hold an instance", 0, int(ended[mine].sum()))
        for r in mine:
            stages = int(w.inst[w.req[r, owner], c.I_END_STAGE] - w.inst[w.req[r, owner], c.I_FIRST_STAGE])
            held[w.bound[r, offset : offset + stages]] += w.req[r, blocks]
    if not np.array_equal(held, w.node[:, c.N_BLOCKS] - w.node[:, c.N_FREE]):
        raise ConservationError("KV blocks in use are not those that live requests hold")
    if not np.array_equal(outstanding, w.inst[:, c.I_OUTSTANDING]):
        raise ConservationError("outstanding requests of instances are not those bound to them")
    if (w.node[:, c.N_FREE] < 0).any():
        raise ConservationError("more KV blocks in use than there are")
    _expect_equal("work booked", int(w.route_inst[c.ROUTE_WORK].sum()), int(w.req[:, c.R_WORK].sum()))
    _expect_equal("requests that wait", int(w.pool[:, c.P_WAITING].sum()), int((w.req[:, c.R_COUNTED] > 0).sum()))


def _standing_in_queues(packed: Packed) -> NDArray[np.bool_]:
    w = packed.world
    standing = np.zeros(len(w.req), dtype=np.bool_)
    for queue, (head, _) in enumerate(w.lists):
        r = int(head)
        while r >= 0:
            if standing[r] or w.req[r, c.R_LIST] != queue:
                raise ConservationError(f"request {r} stands in two queues")
            standing[r] = True
            r = int(w.req[r, c.R_NEXT])
    return standing


def _expect_equal(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise ConservationError(f"{what}: {found} instead of {expected}")


def _digest(packed: Packed) -> str:
    w = packed.world
    state = hashlib.sha256(w.counter[[c.C_EVENTS, c.C_HASH_A, c.C_HASH_B]].tobytes())
    for array in (w.req[:, [c.R_STATE, c.R_GENERATED, c.R_LAST_INSTANCE]], w.reqf):
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()
