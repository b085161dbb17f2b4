"""Instances: what state they are in, how many requests they hold, and what that means for routing and for the bill."""

from __future__ import annotations

from coral_core.sim.columns import (
    B_PAID,
    B_UP,
    BOOTING,
    BROKEN,
    C_EPOCH,
    D_WAITING,
    DRAINING,
    G_RATE,
    G_SINCE,
    I_INCARNATION,
    I_MAX_OUTSTANDING,
    I_OUTSTANDING,
    I_POOL,
    I_STATE,
    J_SINCE,
    OFF,
    P_END,
    P_FIRST,
    P_WAITING,
    READY,
    ROUTE_OPEN,
    ROUTE_WEIGHT,
)
from coral_core.sim.queues import mark_pool
from coral_core.sim.world import World


def settle_instance(w: World, i: int) -> None:
    """Book the time since the last change of state: paid for while booting, ready or draining; up without booting."""
    passed_s = w.now[0] - w.instf[i, J_SINCE]
    state = w.inst[i, I_STATE]
    epoch = w.counter[C_EPOCH]
    if state in (BOOTING, READY, DRAINING):
        w.inst_stat[epoch, i, B_PAID] += passed_s
    if state in (READY, DRAINING):
        w.inst_stat[epoch, i, B_UP] += passed_s
    w.instf[i, J_SINCE] = w.now[0]


def settle_pool(w: World, pool: int) -> None:
    """Book the waiting requests since their number last changed."""
    w.pool_stat[w.counter[C_EPOCH], pool, D_WAITING] += w.pool[pool, P_WAITING] * (w.now[0] - w.poolf[pool, G_SINCE])
    w.poolf[pool, G_SINCE] = w.now[0]


def set_state(w: World, i: int, state: int) -> None:
    """Move an instance to `state`; leaving for good outdates what was scheduled for this life of it."""
    settle_instance(w, i)
    w.inst[i, I_STATE] = state
    if state in (OFF, BROKEN):
        w.inst[i, I_INCARNATION] += 1
    refresh(w, i)
    pool = w.inst[i, I_POOL]
    rate_requests_per_s = 0.0
    for other in range(w.pool[pool, P_FIRST], w.pool[pool, P_END]):
        if w.inst[other, I_STATE] == READY:
            rate_requests_per_s += w.route_inst[ROUTE_WEIGHT, other]
    w.poolf[pool, G_RATE] = rate_requests_per_s
    mark_pool(w, pool)


def refresh(w: World, i: int) -> None:
    """Let the router see an instance if it is ready and has room."""
    has_room = w.inst[i, I_OUTSTANDING] < w.inst[i, I_MAX_OUTSTANDING]
    w.route_inst[ROUTE_OPEN, i] = 1.0 if w.inst[i, I_STATE] == READY and has_room else 0.0


def occupy(w: World, i: int) -> None:
    """One more request is this instance's."""
    w.inst[i, I_OUTSTANDING] += 1
    refresh(w, i)


def vacate(w: World, i: int) -> None:
    """One request less; a draining instance without any stops."""
    w.inst[i, I_OUTSTANDING] -= 1
    refresh(w, i)
    mark_pool(w, w.inst[i, I_POOL])
    if w.inst[i, I_STATE] == DRAINING and w.inst[i, I_OUTSTANDING] == 0:
        set_state(w, i, OFF)
