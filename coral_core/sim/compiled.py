"""The compiled kernel: the very functions of the plain one, made known to numba, and nothing else.

The kernel allocates nothing, so numba's reference counting (`_nrt`) is off: with it, it is 16 times slower.

Numba's cache on disk only notices changes of this file, so the entry point carries a hash of the sources it compiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numba
from numba.extending import register_jitable

from coral_core.routing import admission, least_work, round_robin, scale_down
from coral_core.sim import (
    batches,
    blocks,
    columns,
    instances,
    journey,
    lifecycle,
    loop,
    network,
    pipeline,
    queues,
    steps,
    waiting,
)
from coral_core.sim.world import World

_MODULES: tuple[ModuleType, ...] = (
    *(admission, least_work, round_robin, scale_down),
    *(queues, instances, waiting, blocks, network, batches, journey, steps, pipeline, lifecycle, loop),
)

_OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
"""No reference counts and no checks for division by zero: the input's checks leave no zero to divide by."""


@cache
def compiled_run() -> Callable[[World, float], int]:
    """`loop.run`, compiled on its first call and cached on disk: the same results, event by event."""
    for module in _MODULES:
        for value in vars(module).values():
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                register_jitable(**_OPTIONS)(value)
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (*_MODULES, columns))
    stamp = int.from_bytes(hashlib.sha256(sources).digest()[:7], "big")

    def entry(w: World, end_s: float) -> int:
        # A free variable is part of the cache's key.
        return loop.run(w, end_s) if stamp >= 0 else -1

    compiled: Callable[[World, float], int] = numba.njit(cache=True, **_OPTIONS)(entry)
    return compiled
