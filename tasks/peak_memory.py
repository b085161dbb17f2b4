"""What a process and all that it starts use: peak memory, CPU time."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Iterator
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
    pages = sum(int(text.split()[1]) for text in _tree_files(pid, "statm"))
    return pages * resource.getpagesize()


def tree_cpu_s(pid: int) -> float:
    """CPU time that a process and its living descendants have used, in user and system mode. Linux only."""
    ticks = 0
    for text in _tree_files(pid, "stat"):
        user, system = text.rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


def _tree_files(pid: int, name: str) -> Iterator[str]:
    """The file of this name of a process and of each descendant."""
    waiting = [pid]
    while waiting:
        folder = _PROC / str(waiting.pop())
        try:
            text = (folder / name).read_text()
            children = [task.read_text() for task in folder.glob("task/*/children")]
        except OSError:
            continue  # it ended while we looked
        if text.strip():
            yield text
        waiting += [int(child) for line in children for child in line.split()]
