"""What an entry node computes next: continuous batching with chunked prefill, by the rules of vLLM's scheduler.

Within a budget of tokens per iteration: running requests first, one token for each that decodes and then chunks of prompts
under way; then new requests, first come first served, while there is room for their KV and none had to be preempted. So
that `micro_batches` are in flight in a pipeline, a batch takes at most a share 1/micro_batches of the decoding requests
bound to the node; and so that there are no more of them (each costs every request a step), decoding waits until more than
1/(micro_batches + 1) of the instance's (one stage: the node's) are back from their round. Instances without balanced steps
take all that can run.
"""

from __future__ import annotations

from coral_core.sim.blocks import attended_pairs, blocks_for, has_room, kept_tokens, make_room, set_decoding, take
from coral_core.sim.columns import (
    F_KEPT,
    F_PAIRS,
    I_BALANCED,
    I_MICRO_BATCHES,
    MOVING,
    N_BATCH_DECODES,
    N_BATCH_HEAD,
    N_BATCH_ROWS,
    N_BATCH_TAIL,
    N_BATCH_TOKENS,
    N_INSTANCE,
    N_LIVE,
    N_MAX_SEQS,
    N_MAX_TOKENS,
    N_RUNNING,
    PREFILLING,
    Q_SCHEDULED,
    R_COMPUTED,
    R_MODEL,
    R_NEXT,
    R_SOURCE_BLOCKS,
    R_STATE,
    R_TARGET,
    T_DECODE,
    T_EMITS,
    T_REQUEST,
    T_START,
    T_TOKENS,
    WAITING,
    Z_RESERVE_FULL,
)
from coral_core.sim.network import send_kv
from coral_core.sim.queues import (
    append,
    append_item,
    arrived_list,
    decode_list,
    new_item,
    prefill_list,
    start_running,
    unlink,
    waiting_list,
)
from coral_core.sim.waiting import stop_waiting
from coral_core.sim.world import World


def form_entry_batch(w: World, n: int, decodes: int) -> None:
    """Fill the batch of an entry node, with decoding requests if `decodes` is 1; it stays empty where nothing can run."""
    i = w.node[n, N_INSTANCE]
    clear_batch(w, n)
    budget = w.node[n, N_MAX_TOKENS]
    preempted = 0
    most = _share(w.node[n, N_LIVE], w.inst[i, I_MICRO_BATCHES] if w.inst[i, I_BALANCED] else 1)
    r = w.lists[decode_list(w, n), 0] if decodes == 1 else -1
    while r >= 0 and w.node[n, N_BATCH_DECODES] < most and w.node[n, N_BATCH_TOKENS] < budget:
        preempted += make_room(w, r, w.req[r, R_COMPUTED] + 1)
        if w.req[r, R_STATE] == WAITING:
            break
        _schedule(w, n, r, 1, 1)
        r = w.lists[decode_list(w, n), 0]
    r = w.lists[prefill_list(w, n), 0]
    while r >= 0 and w.node[n, N_BATCH_TOKENS] < budget:
        chunk = min(w.req[r, R_TARGET] - w.req[r, R_COMPUTED], budget - w.node[n, N_BATCH_TOKENS])
        preempted += make_room(w, r, w.req[r, R_COMPUTED] + chunk)
        if w.req[r, R_STATE] == WAITING:
            break
        _schedule(w, n, r, chunk, 0)
        r = w.lists[prefill_list(w, n), 0]
    if preempted == 0:
        _admit(w, n, budget)


def has_batch(w: World, first: int, end: int, micro_batches: int) -> bool:
    """Whether enough decoding requests of these entry nodes are back for a batch, or go along with a prompt's next chunk."""
    live = 0
    for n in range(first, end):
        if w.lists[prefill_list(w, n), 0] >= 0:
            return True
        live += w.node[n, N_LIVE]
    back = 0
    for n in range(first, end):
        r = w.lists[decode_list(w, n), 0]
        while r >= 0 and back * (micro_batches + 1) <= live:
            back += 1
            r = w.req[r, R_NEXT]
    return bool(back * (micro_batches + 1) > live)


def admit_arrived(w: World, n: int) -> None:
    """Let requests decode whose KV is there; before every batch."""
    i = w.node[n, N_INSTANCE]
    r = w.lists[arrived_list(w, n), 0]
    while r >= 0 and w.node[n, N_RUNNING] < w.node[n, N_MAX_SEQS]:
        unlink(w, r)
        stop_waiting(w, r)
        start_running(w, i, r)
        w.node[n, N_RUNNING] += 1
        set_decoding(w, r)
        append(w, decode_list(w, n), r)
        r = w.lists[arrived_list(w, n), 0]


def send_for_kv(w: World, n: int) -> None:
    """Give room to the requests at the head of the queue whose KV was computed elsewhere, and have it sent."""
    r = w.lists[waiting_list(w, n), 0]
    while r >= 0 and w.req[r, R_SOURCE_BLOCKS] > 0 and w.node[n, N_RUNNING] < w.node[n, N_MAX_SEQS]:
        blocks = blocks_for(w, w.req[r, R_MODEL], w.req[r, R_TARGET])
        if not has_room(w, r, blocks):
            break
        _move(w, r, blocks)
        r = w.lists[waiting_list(w, n), 0]


def _move(w: World, r: int, blocks: int) -> None:
    unlink(w, r)
    take(w, r, blocks)
    w.req[r, R_STATE] = MOVING
    send_kv(w, r)


def _admit(w: World, n: int, budget: int) -> None:
    """Let waiting requests run, in order, until one does not fit.

    KV computed elsewhere is sent for, not computed; a request holds its blocks from then on, and runs once it is there.
    """
    i = w.node[n, N_INSTANCE]
    r = w.lists[waiting_list(w, n), 0]
    while r >= 0 and w.node[n, N_BATCH_TOKENS] < budget and w.node[n, N_RUNNING] < w.node[n, N_MAX_SEQS]:
        m, target = w.req[r, R_MODEL], w.req[r, R_TARGET]
        moves = w.req[r, R_SOURCE_BLOCKS] > 0
        chunk = target if moves else min(target, budget - w.node[n, N_BATCH_TOKENS])
        blocks = blocks_for(w, m, chunk)
        if not has_room(w, r, blocks_for(w, m, target) if w.fixed[Z_RESERVE_FULL] else blocks):
            break
        if moves:
            _move(w, r, blocks)
        else:
            unlink(w, r)
            take(w, r, blocks)
            start_running(w, i, r)
            w.node[n, N_RUNNING] += 1
            w.req[r, R_STATE] = PREFILLING
            stop_waiting(w, r)
            w.reqf[r, Q_SCHEDULED] = w.now[0] if w.reqf[r, Q_SCHEDULED] < 0 else w.reqf[r, Q_SCHEDULED]
            _schedule(w, n, r, chunk, 0)
        r = w.lists[waiting_list(w, n), 0]


def _schedule(w: World, n: int, r: int, tokens: int, decode: int) -> None:
    """Put the request's next tokens into the batch of its entry node."""
    unlink(w, r)
    emits = 1 if decode == 1 or w.req[r, R_COMPUTED] + tokens == w.req[r, R_TARGET] else 0
    add_item(w, n, new_item(w, r, tokens, decode, emits))
    w.req[r, R_COMPUTED] += tokens


def _share(live: int, micro_batches: int) -> int:
    return max((live + micro_batches - 1) // micro_batches, 1)


def clear_batch(w: World, n: int) -> None:
    """Begin a batch."""
    w.node[n, N_BATCH_HEAD] = -1
    w.node[n, N_BATCH_TAIL] = -1
    w.node[n, N_BATCH_TOKENS] = 0
    w.node[n, N_BATCH_DECODES] = 0
    w.node[n, N_BATCH_ROWS] = 0
    w.nodef[n, F_KEPT] = 0.0
    w.nodef[n, F_PAIRS] = 0.0


def add_item(w: World, n: int, item: int) -> None:
    """Append an item to the node's batch and to what its time depends on."""
    append_item(w, n, N_BATCH_HEAD, N_BATCH_TAIL, item)
    m = w.req[w.item[item, T_REQUEST], R_MODEL]
    start, tokens = w.item[item, T_START], w.item[item, T_TOKENS]
    w.node[n, N_BATCH_TOKENS] += tokens
    w.node[n, N_BATCH_ROWS] += w.item[item, T_EMITS]
    if w.item[item, T_DECODE] == 1:
        w.node[n, N_BATCH_DECODES] += 1
        w.nodef[n, F_KEPT] += kept_tokens(w, m, start + 1)
    else:
        w.nodef[n, F_PAIRS] += attended_pairs(w, m, start + tokens) - attended_pairs(w, m, start)
