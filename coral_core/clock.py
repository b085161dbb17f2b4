"""Time handed in: nothing in the core reads the wall clock by itself. The standard library alone: the engine's plugin has this module too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """A source of wall time (UTC, aware) and of monotonic seconds."""

    def now(self) -> datetime:
        """The current time, timezone-aware UTC."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary origin, never going back."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """The current UTC time."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()


class ListeningClock:
    """Seconds in which its owner was there to listen: of each gap between two calls at most `most_s` count.

    The clock by which to judge a peer's silence. While the machine or this process stood still nobody could have been heard,
    so that time is nobody's silence; and the peer may have stood still just the same. Whoever listens calls it more often
    than every `most_s`. `clock` gives seconds that never go back. For one thread, or under its owner's lock.
    """

    def __init__(self, clock: Callable[[], float], *, most_s: float = 1.0) -> None:
        self._clock, self._most_s = clock, most_s
        self._seen_s, self._listened_s = clock(), 0.0

    def __call__(self) -> float:
        """Seconds listened since the clock was made."""
        now_s = self._clock()
        self._listened_s += min(max(now_s - self._seen_s, 0.0), self._most_s)
        self._seen_s = now_s
        return self._listened_s


@dataclass(slots=True, kw_only=True)
class ManualClock:
    """A clock that moves only when told: for tests and simulation."""

    start: datetime
    elapsed_s: float = 0.0

    def now(self) -> datetime:
        """Start plus what has elapsed."""
        return self.start + timedelta(seconds=self.elapsed_s)

    def monotonic_s(self) -> float:
        """Seconds elapsed since the start."""
        return self.elapsed_s

    def advance(self, duration_s: float) -> None:
        """Move the clock forward by `duration_s` (>= 0)."""
        if duration_s < 0:
            raise ValueError("time does not go back")
        self.elapsed_s += duration_s
