"""Local nodes whose agents are shells that sleep: a provisioner with handles on its machine, every process ended after."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from coral_core.clock import SystemClock
from coral_core.cloud.local import LocalLaunch, LocalMachine, LocalProvisioner, NodeSize
from coral_core.cloud.local_processes import members
from coral_core.cloud.provisioner import StartOutcome
from coral_core.units import MIB
from tests.fakes.waiting import until

ZONES = {"here": ("here-a", "here-b"), "there": ("there-a",)}
SLEEPER = ("/bin/sh", "-c", "exec sleep 600")
WITH_ENGINE = ("/bin/sh", "-c", "sleep 600 & exec sleep 600")
"""An agent with an engine that nobody ends with it."""

PORTS = 250
_MINE = socket.socket(socket.AF_UNIX)


def _own_ports() -> int:
    """The first of `PORTS` ports that no other process has which runs such tests now."""
    for first in range(10000, 20000, PORTS):
        try:
            _MINE.bind(f"\0coral-tests-ports-{first}")
        except OSError:
            continue
        return first
    raise AssertionError("too many tests run on this machine")


FIRST_PORT = _own_ports()


def machine(**changes: object) -> LocalMachine:
    values = {
        "cpus": tuple(sorted(os.sched_getaffinity(0))),
        "memory_bytes": 1000 * MIB,
        "first_port": FIRST_PORT,
        "last_port": FIRST_PORT + PORTS - 1,
        "sizes": {"one": NodeSize(cpus=1, memory_bytes=100 * MIB), "big": NodeSize(cpus=2, memory_bytes=600 * MIB)},
        "nodes_per_cpu": 8,
        **changes,
    }
    return LocalMachine(**values)


class LocalNodes(LocalProvisioner):
    """The provisioner, with what a test does to its machine; `with` ends all processes of the folder."""

    def __init__(self, folder: Path, *, argv: tuple[str, ...] = SLEEPER, **changes) -> None:
        super().__init__(
            folder / "local",
            **{
                "machine": machine(),
                "launch": LocalLaunch(argv=argv, document=lambda node: {"node": node.node_id}),
                "zones": ZONES,
                "clock": SystemClock(),
                "end_grace_s": 0.5,
                "call_timeout_s": 1.0,
                **changes,
            },
        )
        self._next: tuple[str, Callable[[], Callable[[], None]]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for path in (self.folder / "nodes").glob("*"):
            for process in members(path):
                os.kill(process.pid, signal.SIGKILL)

    def fail(self, operation: str, trouble: str) -> None:
        begin = {"capacity": self._full, "throttled": self._busy, "denied": self._shut}[trouble]
        self._next = (operation, begin)

    def start(self, fleet, order) -> StartOutcome:
        return self._meeting("start", lambda: super(LocalNodes, self).start(fleet, order))

    def describe(self, fleet, region):
        return self._meeting("describe", lambda: super(LocalNodes, self).describe(fleet, region))

    def stop(self, fleet, region, nodes):
        return self._meeting("stop", lambda: super(LocalNodes, self).stop(fleet, region, nodes))

    def plant(self, name: str, tags: Mapping[str, str]) -> str:
        path = self.folder / "nodes" / name
        path.mkdir(parents=True)
        item = {
            "node_id": name,
            "account": self.account(),
            "token": "by hand",
            "region": "here",
            "zone": "here-a",
            "market": "on_demand",
            "tags": dict(tags),
            "cpus": [],
            "memory_bytes": 0,
            "first_port": 0,
            "ports": 0,
            "launched_at": datetime.now(UTC).isoformat(),
        }
        (path / "node.json").write_text(json.dumps(item))
        return name

    def alive(self) -> list[str]:
        """Nodes that have processes or soon will; those that were told to end are waited for."""
        paths = [path for path in sorted((self.folder / "nodes").glob("local-*")) if (path / "node.json").exists()]
        for path in paths:
            if (path / "stopped.json").exists():
                until(lambda path=path: not members(path))
        return [path.name for path in paths if members(path)]

    def agents(self) -> list[int]:
        return [json.loads(path.read_text())["pid"] for path in (self.folder / "nodes").glob("*/process.json")]

    def halt(self, node_id: str) -> None:
        pid = json.loads((self.folder / "nodes" / node_id / "process.json").read_text())["pid"]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: "T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])

    def settle(self) -> None:
        self.alive()

    # Troubles: each begins one and gives what ends it --------------------------------------------------------------

    def _meeting(self, operation: str, call):
        if self._next is None or self._next[0] != operation:
            return call()
        end = self._next[1]()
        self._next = None
        try:
            return call()
        finally:
            end()

    def _full(self):
        roomy, self._machine = self._machine, replace(self._machine, memory_bytes=1)
        return lambda: setattr(self, "_machine", roomy)

    def _busy(self):
        import fcntl

        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock.close

    def _shut(self):
        """The folder is a file."""
        aside = self.folder.with_name("aside")
        self.folder.rename(aside)
        self.folder.write_text("")

        def again() -> None:
            self.folder.unlink()
            aside.rename(self.folder)

        return again
