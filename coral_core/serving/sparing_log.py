"""Logs that whoever sends nonsense cannot fill a disk with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

MOST: Final = 10
PERIOD_S: Final = 60.0


class Sparing(logging.Filter):
    """Of each place in the code at most `MOST` records in `PERIOD_S`; the first one after that says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._of: dict[tuple[str, int], tuple[float, int]] = {}  # begin of the period, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be told."""
        place, now_s = (record.pathname, record.lineno), self._clock()
        begun_s, count = self._of.get(place, (now_s, 0))
        if now_s - begun_s >= PERIOD_S:
            if count > MOST:
                record.msg, record.args = f"{record.getMessage()} ({count - MOST} more like it were not told)", None
            begun_s, count = now_s, 0
        self._of[place] = begun_s, count + 1
        return count < MOST


def spare(*names: str) -> None:
    """Make these loggers sparing, once in the life of the process."""
    for logger in map(logging.getLogger, names):
        if not any(isinstance(one, Sparing) for one in logger.filters):
            logger.addFilter(Sparing())
