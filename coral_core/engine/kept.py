"""The owner's side of a keeper (`keeper.py`): start an engine that cannot outlive its owner, end it, and find what was left.

Every process of an engine carries a mark in its environment, `CORAL_ENGINE_MARK=OWNER#RUN`. Should the keeper be killed
together with its owner, the mark is how the owner's successor finds what still runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coral_core.clock import ListeningClock
from coral_core.engine import keeper
from coral_core.errors import InputError, ServingError

MARK_VARIABLE = "CORAL_ENGINE_MARK"
LONGEST_END_S = 5.0


class Kept:
    """An engine's processes behind their keeper. `poll` brings `pid`, `exit_code`, `refused` and `gone` up to date.

    `orphaned`: the keeper was killed, and the engine ended for that reason.
    """

    def __init__(self, *, argv: Sequence[str], env: Mapping[str, str], log: Path, owner: str) -> None:
        """Start them. InputError for an owner that no mark can carry."""
        if not owner or {"#", "\0"} & set(owner):
            raise InputError(f"an owner of engines is a text without '#', not {owner!r}")
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.refused = ""
        self.gone = self.orphaned = False
        self._received = b""
        self._lock = threading.Lock()
        self._mark = f"{owner}#{uuid.uuid4().hex}"
        self._keeper = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-I", "-S", keeper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={MARK_VARIABLE: self._mark},
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        os.set_blocking(self._keeper.stdout.fileno(), False)
        marked = {**env, MARK_VARIABLE: self._mark, "SPT_NOENV": "1"}  # else vLLM's process titles wipe the mark out
        self._tell(json.dumps({"argv": list(argv), "env": marked, "log": str(log)}))

    def poll(self) -> None:
        """Take what the keeper has reported, without waiting."""
        with self._lock:
            if self.gone or self._keeper.stdout is None:
                return
            try:
                received = os.read(self._keeper.stdout.fileno(), 65536)
            except BlockingIOError:
                return
            self._received += received
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if not received:
                self._close()

    def stop(self, grace_s: float) -> None:
        """Ask for SIGTERM now and SIGKILL to everything after `grace_s`; of several requests the earliest counts."""
        self._tell(f"stop {grace_s}")

    def kill(self) -> None:
        """End keeper and engine at once, whatever the keeper does."""
        self._keeper.kill()
        end_marked(self._mark)

    def _tell(self, line: str) -> None:
        # A keeper that is gone has nobody left to end.
        with contextlib.suppress(OSError, ValueError):
            if self._keeper.stdin is not None:
                self._keeper.stdin.write(line.encode() + b"\n")

    def _take(self, report: dict[str, object]) -> None:
        match report:
            case {"pid": int(pid)}:
                self.pid = pid
            case {"exit": int(code)}:
                self.exit_code = code
            case {"error": str(text)}:
                self.refused = text

    def _close(self) -> None:
        self.gone = True
        self._keeper.wait()
        if self.exit_code is None and not self.refused:  # the keeper was killed: what it kept is left to us
            self.orphaned = True
            with contextlib.suppress(ServingError):
                end_marked(self._mark)
        for stream in (self._keeper.stdin, self._keeper.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def end_left_behind(owner: str) -> tuple[int, ...]:
    """Kill every engine process that `owner`, now dead, has left; the ids of those there were.

    For the start of whoever takes the owner's place, never while the owner lives: its engines would be killed too.
    ServingError where one of them does not end.
    """
    return end_marked(f"{owner}#")


def end_marked(mark: str) -> tuple[int, ...]:
    """Kill every process whose mark begins with `mark`, until none is there."""
    ended: dict[int, None] = {}
    waited_s = ListeningClock(time.monotonic)
    while left := list(_marked(mark)):
        ended |= dict.fromkeys(left)
        if waited_s() > LONGEST_END_S:
            raise ServingError(
                f"engine processes {left} do not end", fix="look at what they wait for, and end them by hand"
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return tuple(ended)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # A zombie has no environment any more.
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(variable.startswith(wanted) for variable in variables):
            yield int(entry.name)
