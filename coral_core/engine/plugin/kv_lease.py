"""Leases: for how long a producer keeps the KV blocks of a finished request for somebody to fetch.

A lease ends when all who fetch said they are done, or when it was not used for `lease_s`, and never while a chunk is being
read under it: only then may the engine give its blocks to others. Safe for threads. Time in which nobody could have asked,
because the producer stood still, does not count (`ListeningClock`): `tick` is called while it listens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Literal

from coral_core.clock import ListeningClock

_REMEMBERED: Final = 4096


class NoLeaseError(Exception):
    """There is none: `unknown` (perhaps not granted yet) or `ended`."""

    def __init__(self, reason: Literal["unknown", "ended"]) -> None:
        super().__init__(reason)
        self.reason: Final = reason


@dataclass(slots=True, kw_only=True)
class Lease:
    """The blocks that hold the first `tokens` tokens of a finished request."""

    request_id: str
    block_ids: Sequence[int]
    tokens: int
    ends_at_s: float
    readers: int = 0
    done: set[str] = field(default_factory=set)
    over: bool = False


class LeaseTable:
    """The leases of one worker."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = ListeningClock(clock)
        self._lock = Lock()
        self._leases: dict[str, Lease] = {}
        self._early: OrderedDict[str, Lease] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def tick(self) -> None:
        """Whoever asks is heard now: time goes on."""
        with self._lock:
            self._clock()

    def grant(self, lease: str, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """Keep the blocks of a request from now on."""
        with self._lock:
            early = self._early.pop(lease, None)
            self._leases[lease] = Lease(
                request_id=request_id,
                block_ids=block_ids,
                tokens=tokens,
                ends_at_s=self._clock() + self._lease_s,
                done=early.done if early else set(),
                over=early is not None and early.over,
            )

    @contextmanager
    def reading(self, lease: str) -> Iterator[Lease]:
        """The lease, renewed and held as long as the context lasts; NoLeaseError."""
        with self._lock:
            found = self._open(lease)
            found.readers += 1
        try:
            yield found
        finally:
            with self._lock:
                found.readers -= 1
                found.ends_at_s = self._clock() + self._lease_s

    def renew(self, lease: str) -> None:
        """As long again from now; nothing if there is no such lease."""
        with self._lock:
            if lease in self._leases and not self._leases[lease].over:
                self._leases[lease].ends_at_s = self._clock() + self._lease_s

    def done(self, lease: str, taker: str, takers: int) -> None:
        """One of those who fetch needs no more; saying it twice counts once, and before it is granted as well."""
        with self._lock:
            found = self._leases.get(lease)
            if found is None:
                if lease in self._ended:
                    return
                # The offer may be quicker than the step that grants it, and whoever needs nothing does not ask first.
                found = self._early.setdefault(lease, Lease(request_id="", block_ids=(), tokens=0, ends_at_s=0.0))
                _forget_old(self._early)
            found.done.add(taker)
            found.over = found.over or len(found.done) >= takers

    def take_ended(self) -> set[str]:
        """The requests whose leases have ended since the last call: their blocks may be given to others."""
        with self._lock:
            now_s = self._clock()
            ended = {
                name: lease
                for name, lease in self._leases.items()
                if not lease.readers and (lease.over or lease.ends_at_s <= now_s)
            }
            for name in ended:
                del self._leases[name]
                self._ended[name] = None
            _forget_old(self._ended)
            return {lease.request_id for lease in ended.values()}

    def _open(self, lease: str) -> Lease:
        found = self._leases.get(lease)
        if found is None:
            raise NoLeaseError("ended" if lease in self._ended else "unknown")
        if found.over:
            raise NoLeaseError("ended")
        return found


def _forget_old(names: OrderedDict[str, Any]) -> None:
    while len(names) > _REMEMBERED:
        names.popitem(last=False)
