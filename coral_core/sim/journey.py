"""A request's way: arrival, admission, routing, tokens, hand-over from prefill to decode, end, and loss."""

from __future__ import annotations

from coral_core.routing.admission import admits, max_wait_s, may_retry
from coral_core.routing.least_work import pick_least_work
from coral_core.routing.round_robin import pick_weighted
from coral_core.sim.blocks import blocks_for, detach, give_back_source, set_decoding, stage_count
from coral_core.sim.columns import (
    B_DONE,
    B_EMITTED,
    B_FIRST,
    B_LOST,
    C_ARRIVED,
    C_DISCARDED,
    C_EMITTED,
    C_EPOCH,
    D_ARRIVED,
    D_REJECTED,
    DONE,
    E_ARRIVAL,
    FAILED,
    G_RATE,
    I_FIRST_STAGE,
    I_NEXT_POOL,
    I_POOL,
    M_MAX_HANDOVER,
    M_MAX_WAIT,
    M_PROMPT,
    M_PROMPT_TOKEN,
    N_BLOCKS,
    P_END,
    P_FIRST,
    P_MODEL,
    P_WAITING,
    PREFILLING,
    Q_ARRIVAL,
    Q_DECODE,
    Q_FINISH,
    Q_FIRST,
    Q_SCHEDULED,
    Q_SECOND,
    QUEUED,
    R_BLOCKS,
    R_COMPUTED,
    R_ENTRY_INSTANCE,
    R_GENERATED,
    R_INPUT,
    R_INSTANCE,
    R_LAST_INSTANCE,
    R_MODEL,
    R_OUTPUT,
    R_RETRIES,
    R_SOURCE,
    R_SOURCE_BLOCKS,
    R_STATE,
    R_TARGET,
    R_WORK,
    REJECTED,
    ROUTE_CREDIT,
    ROUTE_OPEN,
    ROUTE_WEIGHT,
    ROUTE_WORK,
    S_END,
    S_FIRST,
    TOO_LONG,
    WAITING,
    Z_LEAST_WORK,
    Z_MAX_RETRIES,
    Z_MAX_STAGES,
    Z_REQUESTS,
)
from coral_core.sim.instances import occupy, vacate
from coral_core.sim.queues import append, arrived_list, mark_node, mark_pool, prepend, push, unlink, waiting_list
from coral_core.sim.waiting import start_waiting, stop_waiting
from coral_core.sim.world import Floats, World


def push_next_arrival(w: World) -> None:
    """Schedule the next request; they come in order of arrival."""
    r = w.counter[C_ARRIVED]
    if r < w.fixed[Z_REQUESTS]:
        push(w, w.reqf[r, Q_ARRIVAL], E_ARRIVAL, r, 0)


def arrive(w: World, r: int) -> None:
    """Admit a request to its model's queue, or reject it."""
    w.counter[C_ARRIVED] += 1
    push_next_arrival(w)
    pool = w.req[r, R_MODEL]
    w.pool_stat[w.counter[C_EPOCH], pool, D_ARRIVED] += 1
    own_s = w.model[pool, M_PROMPT] + w.req[r, R_INPUT] * w.model[pool, M_PROMPT_TOKEN]
    bound_s = max_wait_s(w.model[pool, M_MAX_WAIT], own_s)
    if not (admits(w.pool[pool, P_WAITING], w.poolf[pool, G_RATE], bound_s) and _decodes_in_time(w, pool)):
        _end(w, r, REJECTED)
        return
    w.req[r, R_STATE] = QUEUED
    start_waiting(w, r, pool)
    append(w, pool, r)
    mark_pool(w, pool)


def _decodes_in_time(w: World, m: int) -> bool:
    """Whether the model's decode instances take over what waits for them soon enough for one more; true without any."""
    waiting, rate_requests_per_s, pools = 0, 0.0, 0
    for pool in range(w.pool.shape[0]):
        if pool != m and w.pool[pool, P_MODEL] == m:
            pools += 1
            waiting += w.pool[pool, P_WAITING]
            rate_requests_per_s += w.poolf[pool, G_RATE]
    return pools == 0 or admits(waiting, rate_requests_per_s, w.model[m, M_MAX_HANDOVER])


def dispatch(w: World, pool: int) -> None:
    """Hand the pool's queue to its instances in turn, while any has room."""
    first, end = w.pool[pool, P_FIRST], w.pool[pool, P_END]
    r = w.lists[pool, 0]
    while r >= 0:
        chosen = _pick(w, w.route_inst, first, end, _work(w, r, pool))
        if chosen < 0:
            return
        unlink(w, r)
        _assign(w, r, first + chosen)
        r = w.lists[pool, 0]


def _assign(w: World, r: int, i: int) -> None:
    """Bind a request to an instance and to one node of each of its stages."""
    last_position = w.req[r, R_INPUT] if w.inst[i, I_NEXT_POOL] >= 0 else w.req[r, R_INPUT] + w.req[r, R_OUTPUT] - 1
    blocks = blocks_for(w, w.req[r, R_MODEL], last_position)
    w.req[r, R_INSTANCE] = i
    work = _work(w, r, w.inst[i, I_POOL])
    fits = True
    for s in range(stage_count(w, i)):
        stage = w.inst[i, I_FIRST_STAGE] + s
        first, end = w.stage[stage, S_FIRST], w.stage[stage, S_END]
        n = first + _pick(w, w.route_node, first, end, work)
        w.bound[r, s] = n
        fits = fits and blocks <= w.node[n, N_BLOCKS]
    occupy(w, i)
    if not fits:
        vacate(w, i)
        _forget_source(w, r)
        _end(w, r, TOO_LONG)
        return
    _book(w, r, work)
    w.req[r, R_STATE] = WAITING
    w.req[r, R_LAST_INSTANCE] = i
    if w.req[r, R_SOURCE_BLOCKS] == 0:
        w.req[r, R_ENTRY_INSTANCE] = i
        w.req[r, R_COMPUTED] = 0
    w.req[r, R_TARGET] = w.req[r, R_INPUT]
    append(w, waiting_list(w, w.bound[r, 0]), r)
    mark_node(w, w.bound[r, 0])


def _pick(w: World, route: Floats, first: int, end: int, work: int) -> int:
    """A member of route[:, first:end], from its start, or -1; `work` is what the request adds to its own."""
    if w.fixed[Z_LEAST_WORK]:
        return pick_least_work(
            route[ROUTE_WORK, first:end], route[ROUTE_WEIGHT, first:end], route[ROUTE_OPEN, first:end], float(work)
        )
    return pick_weighted(route[ROUTE_CREDIT, first:end], route[ROUTE_WEIGHT, first:end], route[ROUTE_OPEN, first:end])


def _work(w: World, r: int, pool: int) -> int:
    """What the router knows of a request's work in a pool: its prompt, or, handed over for decode, that it is one."""
    return 1 if pool != w.req[r, R_MODEL] else int(w.req[r, R_INPUT])


def _book(w: World, r: int, work: int) -> None:
    """Count the request for so much work where it is bound, and no longer for what it was."""
    i = w.req[r, R_INSTANCE]
    more = work - w.req[r, R_WORK]
    w.req[r, R_WORK] = work
    w.route_inst[ROUTE_WORK, i] += more
    for s in range(stage_count(w, i)):
        w.route_node[ROUTE_WORK, w.bound[r, s]] += more


def emit(w: World, r: int) -> None:
    """One more token of a request is there: it ends, moves on to decode, or goes on decoding."""
    i = w.req[r, R_INSTANCE]
    epoch = w.counter[C_EPOCH]
    w.req[r, R_GENERATED] += 1
    w.counter[C_EMITTED] += 1
    w.inst_stat[epoch, i, B_EMITTED] += 1
    if w.req[r, R_GENERATED] == 1:
        w.reqf[r, Q_FIRST] = w.now[0]
        w.inst_stat[epoch, i, B_FIRST] += 1
    elif w.req[r, R_GENERATED] == 2:
        w.reqf[r, Q_SECOND] = w.now[0]
    if w.req[r, R_GENERATED] == w.req[r, R_OUTPUT]:
        _book(w, r, 0)
        detach(w, r)
        w.inst_stat[epoch, i, B_DONE] += 1
        _end(w, r, DONE)
        vacate(w, i)
    elif w.inst[i, I_NEXT_POOL] >= 0:
        _hand_over(w, r)
    elif w.req[r, R_STATE] == PREFILLING:
        w.reqf[r, Q_DECODE] = w.now[0] if w.reqf[r, Q_DECODE] < 0 else w.reqf[r, Q_DECODE]
        set_decoding(w, r)


def _hand_over(w: World, r: int) -> None:
    """Queue for a decode instance; the KV stays with the prefill instance until it has been sent."""
    i = w.req[r, R_INSTANCE]
    _book(w, r, 0)
    w.req[r, R_SOURCE] = i
    w.req[r, R_SOURCE_BLOCKS] = w.req[r, R_BLOCKS]
    w.req[r, R_BLOCKS] = 0
    for s in range(stage_count(w, i)):
        w.bound[r, w.fixed[Z_MAX_STAGES] + s] = w.bound[r, s]
    detach(w, r)
    w.req[r, R_INSTANCE] = -1
    w.req[r, R_STATE] = QUEUED
    start_waiting(w, r, w.inst[i, I_NEXT_POOL])
    append(w, w.inst[i, I_NEXT_POOL], r)
    mark_pool(w, w.inst[i, I_NEXT_POOL])


def receive_kv(w: World, r: int) -> None:
    """The KV has arrived: the prefill instance lets go, the request may decode."""
    source = w.req[r, R_SOURCE]
    give_back_source(w, r)
    vacate(w, source)
    w.reqf[r, Q_DECODE] = w.now[0]
    append(w, arrived_list(w, w.bound[r, 0]), r)
    mark_node(w, w.bound[r, 0])


def lose(w: World, r: int) -> None:
    """An instance that holds something of this request is gone: try it elsewhere if still unheard, else it failed."""
    i = w.req[r, R_INSTANCE]
    blamed = i if i >= 0 else w.req[r, R_SOURCE]
    if i >= 0:
        _book(w, r, 0)
    detach(w, r)
    stop_waiting(w, r)
    _forget_source(w, r)
    if i >= 0:
        w.req[r, R_INSTANCE] = -1
        vacate(w, i)
    if may_retry(w.req[r, R_GENERATED], w.req[r, R_RETRIES], w.fixed[Z_MAX_RETRIES]):
        w.req[r, R_RETRIES] += 1
        w.req[r, R_STATE] = QUEUED
        w.reqf[r, Q_SCHEDULED] = -1.0
        start_waiting(w, r, w.req[r, R_MODEL])
        prepend(w, w.req[r, R_MODEL], r)
        mark_pool(w, w.req[r, R_MODEL])
    else:
        w.inst_stat[w.counter[C_EPOCH], blamed, B_LOST] += 1
        _end(w, r, FAILED)


def _forget_source(w: World, r: int) -> None:
    source = w.req[r, R_SOURCE]
    if source >= 0:
        give_back_source(w, r)
        vacate(w, source)


def _end(w: World, r: int, state: int) -> None:
    stop_waiting(w, r)
    w.req[r, R_STATE] = state
    w.req[r, R_INSTANCE] = -1
    w.reqf[r, Q_FINISH] = w.now[0]
    if state in (REJECTED, TOO_LONG):
        w.pool_stat[w.counter[C_EPOCH], w.req[r, R_MODEL], D_REJECTED] += 1
    if state != DONE:
        w.counter[C_DISCARDED] += w.req[r, R_GENERATED]
