"""Time handed in: nothing in the core reads the wall clock by itself."""

from __future__ import annotations

import time
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
