"""Keeps one engine: starts it, ends it with everything it started, and never lets it outlive the one who asked for it.

Run as a program of its own, by file, with the standard library alone. The owner holds the other end of standard input: when
that end closes, by the owner's wish or death, the engine is ended. The keeper adopts what the engine's processes leave
behind, so that "everything" is the tree below it, in whatever session or group.

In, one line each: first `{"argv": [...], "env": {...}, "log": path}`, later `stop SECONDS`.
Out, one JSON object each: `{"pid": n}`, then `{"exit": code}` (negative: a signal) once nothing is left; or `{"error": text}`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHAN_GRACE_S = 5.0
"""What an engine gets to end by itself after its owner has died."""
POLL_S = 0.1
MOST_S = 1.0
"""Of a longer gap between two looks only so much counts as grace: the machine stood still, and the engine with it."""


class Keeper:
    """The engine's root process and all below it."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot adopt the engine's orphans")
        with log.open("ab", buffering=0) as out:
            self._process = subprocess.Popen(  # noqa: S603 - the launch plan's command
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # This process has one thread, so running code between fork and exec is safe here.
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
            )
        self.root = self._process.pid
        self.exit: int | None = None
        self._alone = False

    def reap(self) -> bool:
        """Collect whoever has ended; whether nobody is left."""
        while not self._alone:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._alone = True
                break
            if pid == 0:
                break
            if pid == self.root:
                self.exit = os.waitstatus_to_exitcode(status)
        return self._alone

    def signal_root(self, number: int) -> None:
        """Send a signal to the root, if it still is there."""
        if self.exit is None:
            os.kill(self.root, number)

    def kill_all(self) -> None:
        """Kill everything below this process until nothing is left."""
        while not self.reap():
            for pid in list(descendants(os.getpid())):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)


def descendants(ancestor: int) -> Iterator[int]:
    """Process ids below `ancestor`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, ten times a second at worst
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            # The name in parentheses may itself hold blanks and parentheses.
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    below = children.get(ancestor, [])
    while below:
        pid = below.pop()
        yield pid
        below += children.get(pid, [])


def commands() -> Iterator[str]:
    """Each line of standard input as it comes, "" where none came within `POLL_S`; ends with the input."""
    waiting = b""
    while True:
        if not select.select([0], [], [], POLL_S)[0]:
            yield ""
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, waiting = (waiting + received).split(b"\n")
        yield from (line.decode() for line in lines)


def keep(keeper: Keeper) -> None:
    """Return once the engine and all it started are gone: by itself, by `stop`, or because the owner is gone."""
    left_s: float | None = None
    lines, looked_s = commands(), time.monotonic()
    while not keeper.reap():
        line = next(lines, None)
        if line is None:  # the owner's end is closed
            time.sleep(POLL_S)
        since_s, looked_s = looked_s, time.monotonic()
        if left_s is not None:
            left_s -= min(looked_s - since_s, MOST_S)
        if line is None or line.startswith("stop "):
            grace_s = ORPHAN_GRACE_S if line is None else float(line.removeprefix("stop "))
            if left_s is None:
                keeper.signal_root(signal.SIGTERM)
                # A stopped process gets no signal but these two.
                keeper.signal_root(signal.SIGCONT)
            left_s = grace_s if left_s is None else min(left_s, grace_s)
        # Without its root an engine is none: the rest goes at once.
        if keeper.exit is not None or (left_s is not None and left_s <= 0):
            keeper.kill_all()


def say(**event: object) -> None:
    """Tell the owner, if there still is one."""
    try:
        os.write(1, (json.dumps(event) + "\n").encode())
    except BrokenPipeError:
        return


def main() -> None:
    """Keep the engine that the first line of standard input describes."""
    # A terminal's Ctrl-C and a service manager's SIGTERM are for the owner, who drains first. Handlers, since what is ignored
    # would be ignored in the engine too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # Unbuffered, so that no later line is swallowed.
    with open(0, "rb", buffering=0, closefd=False) as first:
        order = json.loads(first.readline())
    try:
        keeper = Keeper(order["argv"], order["env"], Path(order["log"]))
    except OSError as error:
        say(error=str(error))
        return
    say(pid=keeper.root)
    keep(keeper)
    say(exit=keeper.exit)


if __name__ == "__main__":
    main()
