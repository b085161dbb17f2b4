"""Both ends of a KV transfer without an engine: caches in numpy, with real sockets between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt

from coral_core.engine.plugin.kv_keys import FleetKeys, fleet_keys
from coral_core.engine.plugin.kv_lease import LeaseTable
from coral_core.engine.plugin.kv_plan import Chunk, Place, Shape, Source, Terms
from coral_core.engine.plugin.kv_puller import BlockPuller, Pull, Pulled
from coral_core.engine.plugin.kv_server import BlockServer
from tests.fakes.waiting import until

SHAPE = Shape(layers=6, heads=2, content=4, dtype="float32", element_bytes=4)
TOKENS = 100
TERMS = Terms(lease_s=300.0, stall_s=60.0, chunk_bytes=1024, window_bytes=8192)
"""Nothing ends because it lasted too long, however slow the machine is; a test about such an end says its own."""


def value(layer: int, head: int, token: int) -> float:
    """What a prompt's cache holds there: different everywhere."""
    return 1.0 + token + 1000.0 * (head + 10 * layer)


class Worker:
    """One worker of an engine: its layers, a cache of its own block size, and the blocks of the one request in it."""

    def __init__(self, place: Place, block_size: int, *, computed: bool) -> None:
        self.place, self.block_size = place, block_size
        blocks = -(-TOKENS // block_size)
        self.blocks = [int(block) for block in np.random.default_rng(block_size).permutation(blocks + 4)[:blocks]]
        self.cache = np.zeros((SHAPE.layers, (blocks + 4) * block_size, SHAPE.heads, SHAPE.content), dtype=np.float32)
        self.delay_s = 0.0
        self.before_read: Callable[[], object] = lambda: None
        for token in range(TOKENS if computed else 0):
            for layer in range(*place.layers):
                for head in range(*place.heads):
                    self.cache[layer, self.slot(token), head] = value(layer, head, token)

    def slot(self, token: int) -> int:
        return self.blocks[token // self.block_size] * self.block_size + token % self.block_size

    def read(self, chunk: Chunk, slots: npt.NDArray[np.int64]) -> memoryview:
        time.sleep(self.delay_s)
        self.before_read()
        found = self.cache[chunk.layer, slots, chunk.heads[0] : chunk.heads[1]]
        return memoryview(found.reshape(-1).view(np.uint8))

    def write(self, chunk: Chunk, slots: npt.NDArray[np.int64], payload: memoryview) -> None:
        time.sleep(self.delay_s)
        given = np.frombuffer(payload, dtype=np.float32).reshape(len(slots), -1, SHAPE.content)
        self.cache[chunk.layer, slots, chunk.heads[0] : chunk.heads[1]] = given

    def holds(self, first: int = 0, last: int = TOKENS) -> bool:
        """Whether exactly the tokens `[first, last)` of its layers and heads are there, each at its place."""
        right = np.zeros_like(self.cache)
        for token in range(first, last):
            for layer in range(*self.place.layers):
                for head in range(*self.place.heads):
                    right[layer, self.slot(token), head] = value(layer, head, token)
        return np.array_equal(self.cache, right)


@contextmanager
def held_after(worker: Worker, chunks: int) -> Iterator[Event]:
    """It gives so many chunks, and no more before the event is set or the context left."""
    go_on, given = Event(), count()

    def hold() -> None:
        if next(given) >= chunks:
            go_on.wait()

    worker.before_read = hold
    try:
        yield go_on
    finally:
        go_on.set()


def keys_of(folder: Path, name: str = "kv.key") -> FleetKeys:
    """The keys of a fleet of that name."""
    path = folder / name
    path.write_text(name * 8)
    return fleet_keys(str(path))


@contextmanager
def serving(
    keys: FleetKeys,
    worker: Worker,
    terms: Terms = TERMS,
    *,
    granted: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[BlockServer, LeaseTable]]:
    """A producer's worker; its request has the lease `lease`."""
    leases = LeaseTable(terms.lease_s, clock)
    if granted:
        leases.grant("lease", "request", worker.blocks, TOKENS)
    server = BlockServer(
        keys=keys,
        host="127.0.0.1",
        port=None,
        terms=terms,
        place=worker.place,
        shape=SHAPE,
        block_size=worker.block_size,
        leases=leases,
        read=worker.read,
    )
    try:
        yield server, leases
    finally:
        server.close()


@contextmanager
def fetching(
    keys: FleetKeys,
    worker: Worker,
    taker: str = "0.0",
    terms: Terms = TERMS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[BlockPuller]:
    """A consumer's worker."""
    puller = BlockPuller(
        keys=keys,
        taker=taker,
        terms=terms,
        block_size=worker.block_size,
        shape=SHAPE,
        write=worker.write,
        clock=clock,
    )
    try:
        yield puller
    finally:
        puller.close()


def pull_of(worker: Worker, sources: Sequence[Source], **changes: Any) -> Pull:
    """The order to fetch the whole prompt for `worker`."""
    order = {
        "request_id": "request",
        "lease": "lease",
        "sources": tuple(sources),
        "first": 0,
        "last": TOKENS,
        "block_ids": worker.blocks,
    }
    return Pull(**{**order, **changes})


def ended(puller: BlockPuller, fetches: int = 1) -> list[Pulled]:
    """The next fetches that end."""
    results: list[Pulled] = []
    until(
        lambda: results.extend(puller.take_ended()) or len(results) >= fetches, f"{fetches} fetches end", look_s=0.005
    )
    assert len(results) == fetches
    return results


def whole(address: str, takers: int = 1) -> list[Source]:
    """Everything from one address."""
    return [Source(address=address, layers=(0, SHAPE.layers), heads=(0, SHAPE.heads), takers=takers)]


ALL = Place(address="", layers=(0, SHAPE.layers), heads=(0, SHAPE.heads))
