"""What an agent needs of whatever runs its node's engine; `engine/process.py` does it, tests have a plain one."""

from __future__ import annotations

from typing import Protocol

import msgspec

from coral_core.domain.launch import NodeLaunch
from coral_core.serving.control.messages import EngineSample, NodeState


class RunnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as its runner sees it; `doing` says what a start is at, `alive` whether any process of it exists.

    `weight_frac` and `lost_nodes` as in `NodeReport`.
    """

    state: NodeState
    doing: str = ""
    reason: str = ""
    log: tuple[str, ...] = ()
    alive: bool = False
    sample: EngineSample | None = None
    weight_frac: float | None = None
    lost_nodes: dict[str, str] = {}


class NodeRunner(Protocol):
    """Runs one node's engine, once. `recover` and `stop` may take time and are called off the event loop."""

    def recover(self) -> None:
        """End what an earlier agent of this node has left behind."""
        ...

    def start(self, launch: NodeLaunch, url: str) -> None:
        """Start it and return at once; how that goes is seen in `report`. Raises CoralError where it cannot even be tried."""
        ...

    def report(self) -> RunnerReport:
        """How it is now; never waits."""
        ...

    def stop(self, grace_s: float) -> None:
        """End it, all of its processes, by force after `grace_s`; returns when nothing is left. Repeatable."""
        ...
