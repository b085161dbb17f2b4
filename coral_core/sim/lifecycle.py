"""Instances come and go: boot, drain, fail; and the books are closed at the end of an epoch."""

from __future__ import annotations

from coral_core.routing.scale_down import least_loaded
from coral_core.sim.blocks import settle_kv, stage_count
from coral_core.sim.columns import (
    BOOTING,
    BROKEN,
    C_ARRIVED,
    C_EPOCH,
    C_LIFE,
    DRAIN,
    DRAIN_ONE,
    DRAINING,
    E_EPOCH,
    E_LIFE,
    E_READY,
    F_DELIVERED,
    FAIL,
    I_END_STAGE,
    I_FIRST_STAGE,
    I_GROUP,
    I_INCARNATION,
    I_OUTSTANDING,
    I_STATE,
    J_BOOT,
    L_KIND,
    L_SUBJECT,
    N_BATCH_HEAD,
    N_BATCH_TAIL,
    N_BUSY,
    OFF,
    R_INSTANCE,
    R_SOURCE,
    READY,
    ROUTE_WEIGHT,
    S_END,
    S_FIRST,
    START,
    Z_EPOCHS,
    Z_LIFE,
)
from coral_core.sim.instances import set_state, settle_instance, settle_pool
from coral_core.sim.journey import lose
from coral_core.sim.pipeline import settle_busy
from coral_core.sim.queues import free_items, mark_entries, push
from coral_core.sim.steps import forget_steps
from coral_core.sim.world import World


def push_next_life(w: World) -> None:
    """Schedule the next lifecycle event; they are sorted by time."""
    at = w.counter[C_LIFE]
    if at < w.fixed[Z_LIFE]:
        push(w, w.life_s[at], E_LIFE, at, 0)


def live_through(w: World, at: int) -> None:
    """Carry out a lifecycle event."""
    w.counter[C_LIFE] += 1
    push_next_life(w)
    kind, subject = w.life[at, L_KIND], w.life[at, L_SUBJECT]
    if kind == START:
        start(w, subject)
    elif kind == DRAIN:
        drain(w, subject)
    elif kind == FAIL:
        fail(w, subject)
    elif kind == DRAIN_ONE:
        chosen = _choose(w, subject)
        if chosen >= 0:
            drain(w, chosen)


def start(w: World, i: int) -> None:
    """Boot an instance that is off or broken; one that drains simply goes on."""
    state = w.inst[i, I_STATE]
    if state == DRAINING:
        set_state(w, i, READY)
    elif state in (OFF, BROKEN):
        set_state(w, i, BOOTING)
        push(w, w.now[0] + w.instf[i, J_BOOT], E_READY, i, w.inst[i, I_INCARNATION])


def become_ready(w: World, i: int, incarnation: int) -> None:
    """Booting is over, unless the instance was given up meanwhile."""
    if w.inst[i, I_INCARNATION] == incarnation and w.inst[i, I_STATE] == BOOTING:
        set_state(w, i, READY)
        mark_entries(w, i)


def drain(w: World, i: int) -> None:
    """Take no new requests, finish those there are, then stop."""
    if w.inst[i, I_STATE] == BOOTING or (w.inst[i, I_STATE] == READY and w.inst[i, I_OUTSTANDING] == 0):
        set_state(w, i, OFF)
    elif w.inst[i, I_STATE] == READY:
        set_state(w, i, DRAINING)


def _choose(w: World, group: int) -> int:
    """The instance of a group to drain: one that boots if there is one, else the least loaded that is ready."""
    for wanted in (BOOTING, READY):
        for i in range(w.inst.shape[0]):
            w.candidate[i] = 1 if w.inst[i, I_GROUP] == group and w.inst[i, I_STATE] == wanted else 0
            w.outstanding[i] = w.inst[i, I_OUTSTANDING]
        chosen = least_loaded(w.outstanding, w.route_inst[ROUTE_WEIGHT], w.candidate)
        if chosen >= 0:
            return chosen
    return -1


def fail(w: World, i: int) -> None:
    """The instance is gone at once, with all it computes and holds."""
    if w.inst[i, I_STATE] in (OFF, BROKEN):
        return
    set_state(w, i, BROKEN)
    # From the latest to the first, so that retried ones stand in order at the front of their queue.
    for r in range(w.counter[C_ARRIVED] - 1, -1, -1):
        if w.req[r, R_INSTANCE] == i or w.req[r, R_SOURCE] == i:
            lose(w, r)
    for stage in range(w.inst[i, I_FIRST_STAGE], w.inst[i, I_END_STAGE]):
        for n in range(w.stage[stage, S_FIRST], w.stage[stage, S_END]):
            settle_busy(w, n)
            w.node[n, N_BUSY] = 0
            w.nodef[n, F_DELIVERED] = w.now[0]
            free_items(w, w.node[n, N_BATCH_HEAD])
            w.node[n, N_BATCH_HEAD] = -1
            w.node[n, N_BATCH_TAIL] = -1
    if stage_count(w, i) > 1:
        forget_steps(w, i)


def settle(w: World) -> None:
    """Book all that runs up to now."""
    for n in range(w.node.shape[0]):
        settle_busy(w, n)
        settle_kv(w, n)
    for i in range(w.inst.shape[0]):
        settle_instance(w, i)
    for pool in range(w.pool.shape[0]):
        settle_pool(w, pool)


def push_next_epoch(w: World) -> None:
    """Schedule the start of the next epoch."""
    following = w.counter[C_EPOCH] + 1
    if following < w.fixed[Z_EPOCHS]:
        push(w, w.epoch_s[following], E_EPOCH, following, 0)


def turn_epoch(w: World, epoch: int) -> None:
    """Close the books of the last epoch."""
    settle(w)
    w.counter[C_EPOCH] = epoch
    push_next_epoch(w)
