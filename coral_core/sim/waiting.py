"""How many requests a pool has not scheduled (or, handed over, taken in) yet: what admission decides by."""

from __future__ import annotations

from coral_core.sim.columns import C_EPOCH, D_MAX_WAITING, P_WAITING, R_COUNTED
from coral_core.sim.instances import settle_pool
from coral_core.sim.world import World


def start_waiting(w: World, r: int, pool: int) -> None:
    """Count a request among the pool's waiting ones, unless it is counted already."""
    if w.req[r, R_COUNTED] == 0:
        settle_pool(w, pool)
        w.req[r, R_COUNTED] = pool + 1
        w.pool[pool, P_WAITING] += 1
        epoch = w.counter[C_EPOCH]
        w.pool_stat[epoch, pool, D_MAX_WAITING] = max(w.pool_stat[epoch, pool, D_MAX_WAITING], w.pool[pool, P_WAITING])


def stop_waiting(w: World, r: int) -> None:
    """Count it there no longer."""
    pool = w.req[r, R_COUNTED] - 1
    if pool >= 0:
        settle_pool(w, pool)
        w.req[r, R_COUNTED] = 0
        w.pool[pool, P_WAITING] -= 1
