"""Limits on the time that others may take, of which what this process itself stood still for uses up nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

LOOK_S = 1.0
"""How often it is looked whether time has passed unseen."""


@dataclass(slots=True)
class Patience:
    """Of one event loop; until `begin` its limits are plain ones."""

    _limits: set[asyncio.Timeout] = field(default_factory=set)
    _look: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Look from now on, until `end`."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + LOOK_S
        self._look = loop.call_at(due_s, self._looked, due_s)

    def end(self) -> None:
        """Look no more."""
        if self._look is not None:
            self._look.cancel()

    @asynccontextmanager
    async def limit(self, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout`."""
        async with asyncio.timeout(limit_s) as found:
            self._limits.add(found)
            try:
                yield found
            finally:
                self._limits.discard(found)

    def _looked(self, due_s: float) -> None:
        """A timer, not a task: of timers that are late together the one due first is called first, before any limit is over."""
        late_s = asyncio.get_running_loop().time() - due_s
        for limit in self._limits if late_s > LOOK_S else ():
            if not limit.expired() and (when_s := limit.when()) is not None:
                limit.reschedule(when_s + late_s)
        self.begin()
