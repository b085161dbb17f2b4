"""The simulator's whole state: one tuple of arrays that the kernel, plain or compiled, changes in place.

Columns are named in `coral_core.sim.columns`. Times are seconds since the start of the run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class World(NamedTuple):
    """All arrays; `now` has one entry. Only `heap_s`, `heap_key` and `item` ever need more room (see `grown`)."""

    now: Floats
    fixed: Ints
    counter: Ints
    heap_s: Floats
    heap_key: Ints
    req: Ints
    reqf: Floats
    bound: Ints
    item: Ints
    step: Ints
    part: Ints
    lists: Ints
    inst: Ints
    instf: Floats
    stage: Ints
    node: Ints
    nodef: Floats
    nic: Floats
    pool: Ints
    poolf: Floats
    route_inst: Floats
    route_node: Floats
    model: Floats
    grid: Floats
    table: Floats
    coef: Floats
    life_s: Floats
    life: Ints
    epoch_s: Floats
    pending_nodes: Ints
    pending_pools: Ints
    group: Ints
    candidate: Ints
    outstanding: Ints
    node_stat: Floats
    inst_stat: Floats
    pool_stat: Floats
