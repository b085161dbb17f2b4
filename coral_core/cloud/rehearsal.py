"""A rehearsal: the fake cloud kept in a file, so that runs in different processes meet the same machines.

Nothing is rented and nothing serves. It is for trying flows and commands, and for tests that end a process anywhere.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from coral_core.clock import Clock
from coral_core.cloud.fake import FakeCloud, FakeMachine
from coral_core.cloud.provisioner import Listing, NodeOrder, StartOutcome
from coral_core.domain.fleet import FleetId, Node, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import ProvisionError

_STATE: Final = "cloud.json"
_LOCK: Final = "lock"


class RehearsalCloud:
    """Implements `Provisioner` over `folder`; one process at a time is inside a call.

    `capacity` (nodes by zone and configuration, in the file) may be edited to rehearse scarcity.
    """

    call_timeout_s: float = 1.0

    def __init__(self, folder: Path, *, clock: Clock, zones: Mapping[str, Sequence[str]]) -> None:
        self._folder, self._clock, self._zones = folder, clock, zones

    def account(self) -> str:
        """The one account of the rehearsal."""
        with self._opened() as cloud:
            return cloud.account()

    def describe(self, fleet: FleetId, region: str) -> Listing:
        """All machines with the fleet's tag."""
        with self._opened() as cloud:
            return cloud.describe(fleet, region)

    def start(self, fleet: FleetId, order: NodeOrder) -> StartOutcome:
        """Start one machine."""
        with self._opened() as cloud:
            return cloud.start(fleet, order)

    def stop(self, fleet: FleetId, region: str, nodes: Iterable[Node]) -> None:
        """End machines."""
        with self._opened() as cloud:
            cloud.stop(fleet, region, nodes)

    def release_group(self, fleet: FleetId, region: str, instance_id: str) -> bool:
        """Remove a group without machines."""
        with self._opened() as cloud:
            return cloud.release_group(fleet, region, instance_id)

    @contextmanager
    def _opened(self) -> Iterator[FakeCloud]:
        """The cloud as it is in the file, written back whole afterwards."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                cloud = self._load()
                try:
                    yield cloud
                finally:
                    self._save(cloud)
        except OSError as error:
            raise ProvisionError(
                f"the rehearsal cannot be kept: {error}", where=str(self._folder), fix="set CORAL_REHEARSAL"
            ) from error

    def _load(self) -> FakeCloud:
        cloud = FakeCloud(clock=self._clock, zones=self._zones, boot_s=0.0, end_s=0.0, call_timeout_s=1.0)
        path = self._folder / _STATE
        if not path.exists():
            return cloud
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            cloud.machines = {item["node_id"]: _machine(item) for item in state["machines"]}
            cloud.groups = {(fleet, region, name) for fleet, region, name in state["groups"]}
            cloud.capacity = {(zone, config): nodes for zone, config, nodes in state["capacity"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ProvisionError(
                f"the rehearsal's file is damaged: {error!r}", where=str(path), fix="remove it: nothing in it is real"
            ) from error
        return cloud

    def _save(self, cloud: FakeCloud) -> None:
        state = {
            "machines": [asdict(machine) for machine in cloud.machines.values()],
            "groups": sorted(cloud.groups),
            "capacity": [[zone, config, nodes] for (zone, config), nodes in sorted(cloud.capacity.items())],
        }
        new = self._folder / f"{_STATE}.new"
        new.write_text(json.dumps(state, default=datetime.isoformat), encoding="utf-8")
        new.replace(self._folder / _STATE)


def _machine(item: Mapping[str, Any]) -> FakeMachine:
    order = item["order"]
    stopped_at = item["stopped_at"]
    times = {
        "born_at": datetime.fromisoformat(item["born_at"]),
        "stopped_at": None if stopped_at is None else datetime.fromisoformat(stopped_at),
    }
    return FakeMachine(**{**item, **times, "market": Market(item["market"]), "order": _order(order) if order else None})


def _order(item: Mapping[str, Any]) -> NodeOrder:
    tags = NodeTags(**{**item["tags"], "phase": Phase(item["tags"]["phase"])})
    return NodeOrder(region=item["region"], zone=item["zone"], market=Market(item["market"]), tags=tags)
