"""Iterations: start them on nodes, end them, and have their results go on (`steps`, where there are several stages)."""

from __future__ import annotations

from coral_core.sim.batches import admit_arrived, form_entry_batch, has_batch, send_for_kv
from coral_core.sim.blocks import stage_count
from coral_core.sim.columns import (
    A_BUSY,
    A_ITERATIONS,
    A_TOKENS,
    C_EPOCH,
    DECODING,
    DRAINING,
    E_DELIVER,
    E_ITERATION,
    F_BUSY_SINCE,
    F_DELAY,
    F_DELIVERED,
    F_KEPT,
    F_PAIRS,
    I_INCARNATION,
    I_MICRO_BATCHES,
    I_STATE,
    K_EXTRA_DEPTH,
    K_FIXED,
    K_INNER,
    K_INNER_TOKEN,
    K_KEPT,
    K_PAIR,
    N_BATCH_HEAD,
    N_BATCH_ROWS,
    N_BATCH_TAIL,
    N_BATCH_TOKENS,
    N_BUSY,
    N_INSTANCE,
    N_STAGE,
    N_TABLE,
    R_STATE,
    R_VERSION,
    READY,
    T_EMITS,
    T_NEXT,
    T_REQUEST,
    T_VERSION,
    TABLE_ROWS,
    TABLE_TOKENS,
    Z_STREAM_KV,
)
from coral_core.sim.journey import emit
from coral_core.sim.queues import append, decode_list, free_item, mark_node, prefill_list, push
from coral_core.sim.steps import fill_from_step, form_steps, pass_on
from coral_core.sim.world import Floats, World


def start_iteration(w: World, n: int) -> None:
    """Start an idle node of a live instance on the next batch, if there is one."""
    i = w.node[n, N_INSTANCE]
    if not (w.inst[i, I_STATE] == READY or w.inst[i, I_STATE] == DRAINING):
        return
    if w.fixed[Z_STREAM_KV] and w.node[n, N_STAGE] == 0:
        send_for_kv(w, n)
    is_pipeline = stage_count(w, i) > 1
    if is_pipeline and w.node[n, N_STAGE] == 0:
        form_steps(w, i)
    if w.node[n, N_BUSY] == 1:
        return
    if is_pipeline:
        fill_from_step(w, n)
    else:
        admit_arrived(w, n)
        form_entry_batch(w, n, int(has_batch(w, n, n + 1, w.inst[i, I_MICRO_BATCHES])))
    if w.node[n, N_BATCH_HEAD] < 0:
        return
    tokens = w.node[n, N_BATCH_TOKENS]
    duration_s = iteration_s(w, n)
    coef = w.coef[w.node[n, N_TABLE]]
    w.nodef[n, F_DELAY] = coef[K_EXTRA_DEPTH] * (duration_s + coef[K_INNER] + tokens * coef[K_INNER_TOKEN])
    w.node[n, N_BUSY] = 1
    w.nodef[n, F_BUSY_SINCE] = w.now[0]
    epoch = w.counter[C_EPOCH]
    w.node_stat[epoch, n, A_ITERATIONS] += 1
    w.node_stat[epoch, n, A_TOKENS] += tokens
    push(w, w.now[0] + duration_s, E_ITERATION, n, w.inst[i, I_INCARNATION])


def iteration_s(w: World, n: int) -> float:
    """Time of the node's batch: tables over its tokens and its sampled rows, terms for KV read and prompt attention."""
    row = w.node[n, N_TABLE]
    time_s = w.coef[row, K_FIXED] + w.coef[row, K_KEPT] * w.nodef[n, F_KEPT] + w.coef[row, K_PAIR] * w.nodef[n, F_PAIRS]
    time_s += interpolate(w.grid, w.table[row, TABLE_TOKENS], float(w.node[n, N_BATCH_TOKENS]))
    time_s += interpolate(w.grid, w.table[row, TABLE_ROWS], float(w.node[n, N_BATCH_ROWS]))
    return float(time_s)


def interpolate(grid: Floats, values: Floats, x: float) -> float:
    """Piecewise linear between the grid's points, the outer pieces prolonged; the grid rises, two points at least."""
    low, high = 0, grid.shape[0] - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if grid[middle] <= x:
            low = middle
        else:
            high = middle
    frac = (x - grid[low]) / (grid[high] - grid[low])
    return float(values[low] + frac * (values[high] - values[low]))


def settle_busy(w: World, n: int) -> None:
    """Book a busy node's time so far."""
    if w.node[n, N_BUSY] == 1:
        w.node_stat[w.counter[C_EPOCH], n, A_BUSY] += w.now[0] - w.nodef[n, F_BUSY_SINCE]
        w.nodef[n, F_BUSY_SINCE] = w.now[0]


def end_iteration(w: World, n: int, incarnation: int) -> None:
    """Free the node, let prompts go on with their next chunk, pass the results on (later if the node is a pipeline)."""
    if w.inst[w.node[n, N_INSTANCE], I_INCARNATION] != incarnation:
        return
    settle_busy(w, n)
    w.node[n, N_BUSY] = 0
    mark_node(w, n)
    head = w.node[n, N_BATCH_HEAD]
    w.node[n, N_BATCH_HEAD] = -1
    w.node[n, N_BATCH_TAIL] = -1
    if stage_count(w, w.node[n, N_INSTANCE]) == 1:
        _continue_prompts(w, n, head)
    # A short batch does not overtake a long one inside the node.
    delivered_s = max(w.now[0] + w.nodef[n, F_DELAY], w.nodef[n, F_DELIVERED])
    w.nodef[n, F_DELIVERED] = delivered_s
    if delivered_s > w.now[0]:
        push(w, delivered_s, E_DELIVER, head, n)
    else:
        deliver(w, head, n)


def _continue_prompts(w: World, n: int, head: int) -> None:
    item = head
    while item >= 0:
        r = w.item[item, T_REQUEST]
        if w.item[item, T_EMITS] == 0 and w.item[item, T_VERSION] == w.req[r, R_VERSION]:
            append(w, prefill_list(w, n), r)
        item = w.item[item, T_NEXT]


def deliver(w: World, head: int, n: int) -> None:
    """A batch's results leave the node: for the next stage, or as tokens."""
    if stage_count(w, w.node[n, N_INSTANCE]) > 1:
        pass_on(w, head, n)
        return
    item = head
    while item >= 0:
        after = w.item[item, T_NEXT]
        r = w.item[item, T_REQUEST]
        if w.item[item, T_VERSION] == w.req[r, R_VERSION] and w.item[item, T_EMITS] == 1:
            emit(w, r)
            if w.req[r, R_STATE] == DECODING:
                append(w, decode_list(w, n), r)
                mark_node(w, n)
        free_item(w, item)
        item = after
