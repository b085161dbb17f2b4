"""Processes of this machine: started detached and marked, found again by their mark, and ended without mistaking another.

A node's processes carry `CORAL_LOCAL_NODE=<its folder>` in their environment, which children inherit. A process is one
of the node's where it carries the mark, descends from one that does, or is in a session that such a one leads. A process
is known by pid, start time and boot, so that a pid in its second use is somebody else. Linux only (/proc, pidfd).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "CORAL_LOCAL_NODE"
_PROC: Final = Path("/proc")
_DEATH_S: Final = 0.05
_ROUNDS: Final = 10
_AFFINITY: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as it was seen. `start_ticks` since boot; `state` is the kernel's letter."""

    pid: int
    start_ticks: int
    parent: int
    session: int
    state: str

    @property
    def alive(self) -> bool:
        """Whether it still is more than an entry that nobody has read."""
        return self.state not in {"Z", "X", "x"}

    @property
    def halted(self) -> bool:
        """Whether somebody stopped it (SIGSTOP)."""
        return self.state in {"T", "t"}


def boot_id() -> str:
    """What differs after each start of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def see_process(pid: int) -> Process | None:
    """The process with this pid now."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Process(pid=pid, state=fields[0], parent=int(fields[1]), session=int(fields[3]), start_ticks=int(fields[19]))


def reap(pid: int) -> None:
    """Take note of the end of a process that this one has spawned, so that it does not linger."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def spawn(
    argv: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    cpus: Collection[int],
    log: Path,
    holding: Iterable[int] = (),
) -> Process:
    """Start `argv` in a session of its own, on `cpus`, marked as `folder`'s, its output appended to `log`.

    It inherits the file descriptors `holding`.

    The new process holds whatever lock its maker holds until it carries the mark: who gets the lock next finds it.
    Raises OSError.
    """
    marked = {**os.environ, **environment, MARK: str(folder), "SPT_NOENV": "1"}  # else a new title wipes the mark out
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        *((os.POSIX_SPAWN_DUP2, held, held) for held in holding),  # onto itself: it stays open there, and only there
    ]
    with _running_on(cpus):
        pid = os.posix_spawn(argv[0], list(argv), marked, file_actions=actions, setsid=True)
    return see_process(pid) or Process(pid=pid, start_ticks=0, parent=0, session=pid, state="X")


def members(folder: Path, *, mark_name: str = MARK) -> tuple[Process, ...]:
    """All live processes of the node whose folder this is, this process left out."""
    everything = {process.pid: process for process in _all_processes() if process.pid != os.getpid()}
    mark = f"{mark_name}={folder}".encode()
    found = {pid for pid in everything if mark in _environment(pid)}
    while True:
        sessions = {pid for pid in found if everything[pid].session == pid}  # led by one of them: no user's shell
        grown = found | {p.pid for p in everything.values() if p.parent in found or p.session in sessions}
        if grown == found:
            return tuple(everything[pid] for pid in sorted(found))
        found = grown


def leader(processes: Iterable[Process]) -> Process | None:
    """The oldest of them that leads a session: what `spawn` has started."""
    leaders = [process for process in processes if process.session == process.pid]
    return min(leaders, key=lambda process: (process.start_ticks, process.pid), default=None)


def send(process: Process, number: signal.Signals) -> None:
    """Signal this very process; nothing happens where it is gone, also where its pid is another's by now."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = see_process(process.pid)
        if now is not None and now.start_ticks == process.start_ticks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def end_all(folder: Path, *, mark_name: str = MARK) -> int:
    """Kill all processes of the node whose folder this is; how many there were. Again while one has started another."""
    ended: set[tuple[int, int]] = set()
    for _ in range(_ROUNDS):
        left = members(folder, mark_name=mark_name)
        if not left:
            break
        for process in left:
            send(process, signal.SIGKILL)
            ended.add((process.pid, process.start_ticks))
        time.sleep(_DEATH_S)
    return len(ended)


def _all_processes() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (process := see_process(int(entry.name))) is not None and process.alive:
            yield process


def _environment(pid: int) -> tuple[bytes, ...]:
    try:
        return tuple((_PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except OSError:  # gone, or somebody else's
        return ()


@contextlib.contextmanager
def _running_on(cpus: Collection[int]) -> Iterator[None]:
    """This thread on `cpus` for a moment: what it starts then stays there, from its first instruction on."""
    with _AFFINITY:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
