"""How many requests of a model wait, seen from outside the engines, and whether one more would be too late.

A request waits from its admission until its first token is heard. Each instance has one prompt at work, the others queue
behind it. The first token of an answer that comes whole is not heard: such a request counts until its TTFT bound is
over, so that it bounds what arrives within that time. A request for several answers is as many to those behind it.
"""

from __future__ import annotations

import math
from collections import deque

from coral_core.domain.workload import Phase
from coral_core.routing import admits, retry_after_s
from coral_core.serving.refusals import not_ready, too_many
from coral_core.serving.table import ModelPool, by_region


class Ticket:
    """One admitted request's place in its model's counts, as `count`. Every call may come again, and in any order."""

    __slots__ = ("_at", "_count", "_pool")

    def __init__(self, pool: ModelPool, count: int) -> None:
        self._pool = pool
        self._count = count
        self._at = "begin"
        pool.unheard += count

    def hand_over(self) -> None:
        """The prompt is done; now it waits for decode."""
        if self._at == "begin":
            self._pool.unheard -= self._count
            self._pool.handing += self._count
            self._at = "decode"

    def heard(self) -> None:
        """The first token has come, or none will."""
        if self._at == "begin":
            self._pool.unheard -= self._count
        elif self._at == "decode":
            self._pool.handing -= self._count
        self._at = "heard"


class Waiting:
    """Admission of one model's requests. `unknown_s`: when to come back where nothing serves."""

    __slots__ = ("_pool", "_unknown_s", "_unseen")

    def __init__(self, pool: ModelPool, *, unknown_s: float) -> None:
        self._pool = pool
        self._unknown_s = unknown_s
        self._unseen: deque[tuple[float, Ticket]] = deque()

    def admit(self, now_s: float, *, heard_by_s: float = math.inf, count: int = 1) -> Ticket:
        """A place in the queue; RefusedError (503) where nothing serves, (429) where it would wait beyond the SLO.

        `heard_by_s`: from when on the first token is presumed to have come (answers that come whole). `count`: as how many it counts.
        """
        while self._unseen and self._unseen[0][0] <= now_s:
            self._unseen.popleft()[1].heard()
        self._check()
        ticket = Ticket(self._pool, count)
        if math.isfinite(heard_by_s):
            self._unseen.append((heard_by_s, ticket))
        return ticket

    def _check(self) -> None:
        pool = self._pool
        decoding, whole = pool.in_phase(Phase.DECODE), pool.in_phase(Phase.AGGREGATED)
        regions = by_region(decoding)
        begin = [*whole, *(one for one in pool.in_phase(Phase.PREFILL) if one.spec.region in regions)]
        first = begin or decoding  # without any prefill instance, decode ones compute prompts themselves
        if not first:
            raise not_ready(_why_nobody(pool), self._unknown_s)
        self._bound(pool.unheard - len(first), pool.rate(first), pool.terms.max_wait_s, "the first token")
        if not whole and begin:
            self._bound(pool.handing - len(decoding), pool.rate(decoding), pool.terms.max_handover_s, "decode")

    def _bound(self, waiting: int, rate: float, bound_s: float, what: str) -> None:
        waiting = max(waiting, 0)
        if not admits(waiting, rate, bound_s):
            raise too_many(
                f"{waiting} requests of {self._pool.terms.name} wait for {what}, more than its latency bound allows",
                retry_after_s(waiting, rate, bound_s, self._unknown_s),
                code="model_overloaded",
            )


def _why_nobody(pool: ModelPool) -> str:
    name, ready = pool.terms.name, [one for one in pool.members.values() if one.ready]
    if not ready:
        return f"no instance of {name} is ready"
    if any(one.takes_requests for one in ready):
        return f"no instance of {name} that decodes takes requests"
    why = "drain" if all(one.draining for one in ready) else "drain or have weight 0"
    return f"no instance of {name} takes requests: those that are ready {why}"
