"""How a test waits for what threads and processes do: on a machine that may be slow, overloaded, or stand still for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from coral_core.clock import ListeningClock

PATIENT_S: Final = 120.0
"""For what must come, however slow the machine is; nobody waits so long for what comes."""


def until(true: Callable[[], Any], what: str = "it", *, within_s: float = PATIENT_S, look_s: float = 0.02) -> Any:
    """What `true` gives once it is true; fails after `within_s`, of which a pause of the machine is no part."""
    waited_s = ListeningClock(time.monotonic, most_s=5.0)  # what is asked may take a while
    while not (found := true()):
        assert waited_s() < within_s, f"did not come about in {within_s:g} s: {what}"
        time.sleep(look_s)
    return found


async def coming(true: Callable[[], Any], what: str = "it", *, within_s: float = PATIENT_S) -> Any:
    """As `until`, and others run meanwhile."""
    waited_s = ListeningClock(time.monotonic, most_s=5.0)
    while not (found := true()):
        assert waited_s() < within_s, f"did not come about in {within_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return found
