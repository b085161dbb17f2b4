"""The event loop. The same source runs as it is and compiled (`coral_core.sim.compiled`)."""

from __future__ import annotations

from coral_core.sim.columns import (
    C_FREE_ITEMS,
    C_HEAP,
    C_PENDING_NODES,
    C_PENDING_POOLS,
    E_ARRIVAL,
    E_DELIVER,
    E_EPOCH,
    E_ITERATION,
    E_LIFE,
    E_MESSAGE,
    E_READY,
    NEEDS_ROOM,
    R_VERSION,
    RAN_OUT,
    Z_HEAP_MARGIN,
    Z_ITEM_MARGIN,
)
from coral_core.sim.journey import arrive, dispatch, push_next_arrival, receive_kv
from coral_core.sim.lifecycle import become_ready, live_through, push_next_epoch, push_next_life, settle, turn_epoch
from coral_core.sim.pipeline import deliver, end_iteration, start_iteration
from coral_core.sim.queues import next_marked_node, next_marked_pool, pop
from coral_core.sim.steps import receive
from coral_core.sim.world import World


def begin(w: World) -> None:
    """Schedule the first arrival, lifecycle event and epoch."""
    push_next_arrival(w)
    push_next_life(w)
    push_next_epoch(w)


def run(w: World, end_s: float) -> int:
    """Handle events until `end_s` or until none is left; NEEDS_ROOM asks for larger arrays and another call."""
    while True:
        if w.counter[C_HEAP] == 0 or w.heap_s[0] > w.now[0]:
            start_what_can(w)
        if w.counter[C_HEAP] + w.fixed[Z_HEAP_MARGIN] > w.heap_s.shape[0]:
            return NEEDS_ROOM
        if w.counter[C_FREE_ITEMS] < w.fixed[Z_ITEM_MARGIN]:
            return NEEDS_ROOM
        if w.counter[C_HEAP] == 0 or w.heap_s[0] > end_s:
            w.now[0] = end_s
            settle(w)
            return RAN_OUT
        handle_next(w)


def handle_next(w: World) -> None:
    """Handle the first event."""
    time_s, rank, a, b = pop(w)
    w.now[0] = time_s
    if rank == E_ITERATION:
        end_iteration(w, a, b)
    elif rank == E_DELIVER:
        deliver(w, a, b)
    elif rank == E_MESSAGE:
        receive(w, a, b)
    elif rank == E_ARRIVAL:
        arrive(w, a)
    elif rank == E_READY:
        become_ready(w, a, b)
    elif rank == E_LIFE:
        live_through(w, a)
    elif rank == E_EPOCH:
        turn_epoch(w, a)
    elif w.req[a, R_VERSION] == b:
        receive_kv(w, a)


def start_what_can(w: World) -> None:
    """Once an instant's events are through: route what is queued, start what is idle; repeat while that frees room."""
    while w.counter[C_PENDING_POOLS] > 0 or w.counter[C_PENDING_NODES] > 0:
        if w.counter[C_PENDING_POOLS] > 0:
            dispatch(w, next_marked_pool(w))
        else:
            start_iteration(w, next_marked_node(w))
