"""What one API key may ask for: requests/s from a token bucket, and how many at the same time. Pure: time is handed in.

A request for several answers (prompts times answers each) counts as so many requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coral_core.errors import InputError
from coral_core.serving.refusals import bad_request, too_many


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTerms:
    """The limits of a key; infinite where there is none. `burst_requests` (>= 1) may come at once after a pause."""

    requests_per_s: float = math.inf
    burst_requests: float = 1.0
    concurrent_requests: float = math.inf

    def __post_init__(self) -> None:
        for name, least in (("requests_per_s", 0.0), ("burst_requests", 1.0), ("concurrent_requests", 1.0)):
            value = getattr(self, name)
            if not value >= least or value == 0:
                raise InputError(
                    f"is {value!r}, must be {'above 0' if least == 0 else f'at least {least:g}'}", where=name
                )


@dataclass(slots=True, kw_only=True)
class TokenBucket:
    """In any stretch of t seconds at most burst + rate * t are taken, and what is owed in advance; time that goes back stands still."""

    rate_per_s: float
    burst: float
    level: float = field(init=False)
    at_s: float = -math.inf

    def __post_init__(self) -> None:
        self.level = self.burst

    def wait_s(self, now_s: float) -> float:
        """Seconds until one may be taken; 0: now."""
        if math.isinf(self.rate_per_s):
            return 0.0
        if now_s > self.at_s:
            self.level = min(self.burst, self.level + (now_s - self.at_s) * self.rate_per_s)
            self.at_s = now_s
        # A request that comes when it was told to must not fail by a rounding.
        return max(0.0, 1.0 - self.level) / self.rate_per_s if self.level < 1.0 - 1e-9 else 0.0

    def owe(self, count: int) -> None:
        """Take so many more, also such as are still to come: the next one waits for them."""
        self.level -= count

    def take(self, now_s: float) -> bool:
        """Take one if there is one."""
        if self.wait_s(now_s) > 0:
            return False
        self.level -= 1.0
        return True


class KeyLimiter:
    """The limits of one key at work; every `enter` that succeeded needs its `leave`."""

    __slots__ = ("bucket", "running", "terms")

    def __init__(self, terms: KeyTerms) -> None:
        self.terms = terms
        self.bucket = TokenBucket(rate_per_s=terms.requests_per_s, burst=terms.burst_requests)
        self.running = 0

    def enter(self, now_s: float) -> None:
        """Count one request in; RefusedError (429) where it is one too many."""
        if self.running >= self.terms.concurrent_requests:
            most = self.terms.concurrent_requests
            raise too_many(
                f"this API key has {most:g} requests running, as many as it may", 1.0, code="concurrency_limit"
            )
        if not self.bucket.take(now_s):
            rate = self.terms.requests_per_s
            raise too_many(
                f"this API key may ask {rate:g} requests/s", self.bucket.wait_s(now_s), code="rate_limit_exceeded"
            )
        self.running += 1

    def widen(self, count: int) -> None:
        """Let a request that has entered count as `count`; RefusedError where so many may not run (400), or not now (429)."""
        most = self.terms.concurrent_requests
        if count > most:
            raise bad_request(f"the request is for {count} answers, this API key may have {most:g} running", param="n")
        others = self.running - 1
        if others + count > most:
            what = f"this API key has {others} requests running and may have {most:g}, this one counts as {count}"
            raise too_many(what, 1.0, code="concurrency_limit")
        self.running += count - 1
        self.bucket.owe(count - 1)

    def leave(self, count: int = 1) -> None:
        """Count a request out, as what it counted last."""
        self.running -= count
