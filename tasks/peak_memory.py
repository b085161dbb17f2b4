"""Peak memory of this process and all that it starts."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_PROC: Final = Path("/proc")
_INTERVAL_S: Final = 0.05


class PeakMemory:
    """Within its block, watches the resident memory of the process tree; `peak_bytes` is the most seen at a time.

    Pages that processes share count once for each, so the sum is an upper bound of what is in use at a sample; peaks
    shorter than 50 ms may be missed. Where there is no /proc, the largest process' own peak stands in for the children.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants now."""
    if not _PROC.is_dir():
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total, waiting = 0, [pid]
    while waiting:
        folder = _PROC / str(waiting.pop())
        try:
            resident = int((folder / "statm").read_text().split()[1])
            children = [task.read_text() for task in folder.glob("task/*/children")]
        except (OSError, IndexError):
            continue  # it ended while we looked
        total += resident * resource.getpagesize()
        waiting += [int(child) for text in children for child in text.split()]
    return total
