"""KV cache: blocks of a fixed number of tokens on every node a request is bound to; preemption by recompute.

A request that needs a block where none is free takes those of the latest admitted request on that node, which starts
over from its prompt and what it has generated so far. Layers with a sliding window keep at most the window: counts are
means over layers, as in `domain.model_math`.
"""

from __future__ import annotations

import math

from coral_core.sim.columns import (
    A_KV,
    B_PREEMPTED,
    C_EPOCH,
    DECODING,
    F_KV_SINCE,
    I_END_STAGE,
    I_FIRST_STAGE,
    I_RUN_TAIL,
    M_WINDOW,
    M_WINDOW_FRAC,
    N_BLOCKS,
    N_FREE,
    N_LIVE,
    N_PEAK,
    N_RUNNING,
    PREFILLING,
    R_BLOCKS,
    R_COMPUTED,
    R_GENERATED,
    R_INPUT,
    R_INSTANCE,
    R_MODEL,
    R_PREEMPTIONS,
    R_RUN_PREV,
    R_SOURCE,
    R_SOURCE_BLOCKS,
    R_STATE,
    R_TARGET,
    R_VERSION,
    WAITING,
    Z_BLOCK_TOKENS,
    Z_MAX_STAGES,
)
from coral_core.sim.queues import mark_entries, mark_node, prepend, stop_running, unlink, waiting_list
from coral_core.sim.world import World


def kept_tokens(w: World, m: int, tokens: int) -> float:
    """Tokens of a context that a mean layer keeps and reads."""
    frac = w.model[m, M_WINDOW_FRAC]
    return float((1.0 - frac) * tokens + frac * min(float(tokens), w.model[m, M_WINDOW]))


def attended_pairs(w: World, m: int, tokens: int) -> float:
    """(query, attended token) pairs of a prompt's first `tokens` in a mean layer: causal, windows cut."""
    x = float(tokens)
    full = 0.5 * x * x
    window = w.model[m, M_WINDOW]
    if x <= window:
        return full
    frac = w.model[m, M_WINDOW_FRAC]
    return float((1.0 - frac) * full + frac * (window * x - 0.5 * window * window))


def blocks_for(w: World, m: int, tokens: int) -> int:
    """Blocks that a context takes."""
    return math.ceil(kept_tokens(w, m, tokens) / float(w.fixed[Z_BLOCK_TOKENS]))


def stage_count(w: World, i: int) -> int:
    """Stages of an instance's pipeline."""
    return int(w.inst[i, I_END_STAGE] - w.inst[i, I_FIRST_STAGE])


def settle_kv(w: World, n: int) -> None:
    """Book the node's blocks in use since their number last changed."""
    used = w.node[n, N_BLOCKS] - w.node[n, N_FREE]
    w.node_stat[w.counter[C_EPOCH], n, A_KV] += used * (w.now[0] - w.nodef[n, F_KV_SINCE])
    w.nodef[n, F_KV_SINCE] = w.now[0]


def has_room(w: World, r: int, blocks: int) -> bool:
    """Whether every node the request is bound to has `blocks` free."""
    for s in range(stage_count(w, w.req[r, R_INSTANCE])):  # noqa: SIM110 - numba has no generator expressions
        if w.node[w.bound[r, s], N_FREE] < blocks:
            return False
    return True


def take(w: World, r: int, blocks: int) -> None:
    """Give a request `blocks` more on every node it is bound to."""
    for s in range(stage_count(w, w.req[r, R_INSTANCE])):
        _change_free(w, w.bound[r, s], -blocks)
    w.req[r, R_BLOCKS] += blocks


def give_back(w: World, r: int) -> None:
    """Free what a request holds where it runs."""
    if w.req[r, R_BLOCKS] > 0:
        i = w.req[r, R_INSTANCE]
        for s in range(stage_count(w, i)):
            _change_free(w, w.bound[r, s], w.req[r, R_BLOCKS])
        w.req[r, R_BLOCKS] = 0
        mark_entries(w, i)


def give_back_source(w: World, r: int) -> None:
    """Free what a request still holds on the instance that computed its prompt."""
    i = w.req[r, R_SOURCE]
    for s in range(stage_count(w, i)):
        _change_free(w, w.bound[r, w.fixed[Z_MAX_STAGES] + s], w.req[r, R_SOURCE_BLOCKS])
    w.req[r, R_SOURCE_BLOCKS] = 0
    w.req[r, R_SOURCE] = -1
    mark_entries(w, i)


def _change_free(w: World, n: int, blocks: int) -> None:
    settle_kv(w, n)
    w.node[n, N_FREE] += blocks
    w.node[n, N_PEAK] = max(w.node[n, N_PEAK], w.node[n, N_BLOCKS] - w.node[n, N_FREE])


def set_decoding(w: World, r: int) -> None:
    """From here on the request asks for one token at a time."""
    w.req[r, R_STATE] = DECODING
    for s in range(stage_count(w, w.req[r, R_INSTANCE])):
        w.node[w.bound[r, s], N_LIVE] += 1


def detach(w: World, r: int) -> None:
    """Take a request out of all queues and counts of its instance; its work in flight is void from now on."""
    unlink(w, r)
    state = w.req[r, R_STATE]
    if state in (PREFILLING, DECODING):
        stop_running(w, w.req[r, R_INSTANCE], r)
        w.node[w.bound[r, 0], N_RUNNING] -= 1
        mark_node(w, w.bound[r, 0])
    if state == DECODING:
        for s in range(stage_count(w, w.req[r, R_INSTANCE])):
            w.node[w.bound[r, s], N_LIVE] -= 1
    if w.req[r, R_INSTANCE] >= 0:
        give_back(w, r)
    w.req[r, R_VERSION] += 1


def preempt(w: World, r: int) -> None:
    """Send a running request back to the front of its entry node's queue, to be computed again."""
    detach(w, r)
    w.req[r, R_STATE] = WAITING
    w.req[r, R_COMPUTED] = 0
    w.req[r, R_TARGET] = w.req[r, R_INPUT] + w.req[r, R_GENERATED]
    w.req[r, R_PREEMPTIONS] += 1
    w.inst_stat[w.counter[C_EPOCH], w.req[r, R_INSTANCE], B_PREEMPTED] += 1
    prepend(w, waiting_list(w, w.bound[r, 0]), r)


def make_room(w: World, r: int, tokens: int) -> int:
    """Hold blocks for a context of `tokens`, at others' cost if need be; returns how many were preempted.

    If the request itself is the latest admitted one it is preempted (its state is then WAITING).
    """
    blocks = blocks_for(w, w.req[r, R_MODEL], tokens) - w.req[r, R_BLOCKS]
    preempted = 0
    if blocks <= 0:
        return preempted
    i = w.req[r, R_INSTANCE]
    for s in range(stage_count(w, i)):
        n = w.bound[r, s]
        while w.node[n, N_FREE] < blocks:
            victim = _latest_on(w, i, s, n)
            preempt(w, victim)
            preempted += 1
            if victim == r:
                return preempted
    take(w, r, blocks)
    return preempted


def _latest_on(w: World, i: int, s: int, n: int) -> int:
    """The latest admitted request on node `n`: there is one, since it is asked for on behalf of one."""
    r = w.inst[i, I_RUN_TAIL]
    while w.bound[r, s] != n:
        r = w.req[r, R_RUN_PREV]
    return int(r)
