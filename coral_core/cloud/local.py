"""`Provisioner` whose nodes are processes on this machine: each is a folder with its record and an agent.

The folder is laid out in `local_records`. Whoever dies in the midst of a call leaves a state from which the next call goes
on. There is no daemon: a node that was told to end and does not is killed by whoever looks at it after `end_grace_s`.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, NoReturn

from coral_core.clock import Clock, ListeningClock
from coral_core.cloud.local_processes import Process, boot_id, end_all, leader, members, reap, see_process, send, spawn
from coral_core.cloud.local_records import (
    AGENT_FILE,
    AGENT_LOG,
    PROCESS,
    RECORD,
    STOPPED,
    LocalNode,
    own_account,
    read_document,
    read_record,
    record_document,
    write_whole,
)
from coral_core.cloud.provisioner import CloudBusyError, Listing, NodeOrder, Refusal, Refused, Started, StartOutcome
from coral_core.cloud.tags import FLEET_TAG, client_token, read_tags, write_tags
from coral_core.domain.fleet import FleetId, ForeignNode, Node, NodeState
from coral_core.errors import ProvisionError

_NODE_ID: Final = re.compile(r"local-[0-9a-f]{16}")
_LOCK_PAUSE_S: Final = 0.02
_FIX: Final = "look at this folder (CORAL_LOCAL): it must be writable, on a disk with room"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSize:
    """What a node of one configuration takes of the machine."""

    cpus: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMachine:
    """What nodes may use of this machine, all fleets of the folder together.

    Each CPU takes part in at most `nodes_per_cpu` nodes; `last_port` is included. `sizes` by node configuration.
    """

    cpus: tuple[int, ...]
    memory_bytes: int
    first_port: int
    last_port: int
    sizes: Mapping[str, NodeSize]
    nodes_per_cpu: int = 1
    ports_per_node: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLaunch:
    """How a node's agent is started: `argv` and the path of its file, in which `document(node)` stands (as JSON)."""

    argv: tuple[str, ...]
    document: Callable[[LocalNode], Mapping[str, object]]
    environment: Mapping[str, str] = field(default_factory=dict)


class LocalProvisioner:
    """Nodes as processes; `zones` names the zones of each region.

    A node is `pending` until its agent was started, `running` while that lives, `halted` where it is stopped (SIGSTOP) or
    dead with engines left behind, `ending` until its last process is gone. Spot is on demand here. Groups mean nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        machine: LocalMachine,
        launch: LocalLaunch,
        zones: Mapping[str, Sequence[str]],
        clock: Clock,
        end_grace_s: float = 20.0,
        keep: timedelta = timedelta(days=1),
        call_timeout_s: float = 20.0,
    ) -> None:
        """`keep`: for how long folders of nodes that are gone stay listed, with their logs."""
        self.folder = folder.absolute()
        self.call_timeout_s = call_timeout_s
        self._machine, self._launch, self._zones, self._clock = machine, launch, zones, clock
        self._end_grace, self._keep = timedelta(seconds=end_grace_s), keep

    def account(self) -> str:
        """The folder's own name, made when first asked for."""
        with self._errors():
            return own_account(self.folder)

    def describe(self, fleet: FleetId, region: str) -> Listing:
        """All nodes of the fleet; whoever was told to end and did not in time is killed."""
        self._check_region(region)
        nodes: list[Node] = []
        foreign: list[ForeignNode] = []
        with self._errors():
            for path in self._node_folders():
                record = read_record(path)
                if isinstance(record, str):
                    foreign.append(ForeignNode(node_id=path.name, region=region, reason=record))
                elif record.region == region and record.tags.get(FLEET_TAG) == fleet.name:
                    tags = read_tags(fleet, record.tags, account=record.account, token=record.token)
                    if isinstance(tags, str):
                        foreign.append(ForeignNode(node_id=path.name, region=region, reason=tags))
                    else:
                        nodes.append(self._node(fleet, record, self._looked_at(path)))
        return Listing(nodes=tuple(nodes), foreign=tuple(foreign))

    def start(self, fleet: FleetId, order: NodeOrder) -> StartOutcome:
        """Start one agent, or find the one that this order has started; goes on where an earlier call was cut off."""
        self._check_region(order.region)
        if order.zone not in self._zones[order.region]:
            return Refused(refusal=Refusal.NOT_OFFERED, code="NoSuchZone", message=f"{order.zone} is not there")
        token = client_token(fleet, order.tags.instance_id, order.tags.node)
        path = self.folder / "nodes" / f"local-{token.partition('-')[2][:16]}"
        try:
            with self._errors(), self._locked():
                record = read_record(path) if (path / RECORD).exists() else self._admit(fleet, order, token, path)
                if isinstance(record, Refused):
                    return record
                if isinstance(record, str):
                    raise ProvisionError(record, where=str(path), fix="end its processes and remove the folder")
                if record.token != token or not record.ordered_as(fleet, order):
                    return Refused(refusal=Refusal.CONFLICT, code="TokenInUse", message=f"{path.name} is another's")
                with _claimed(record.first_port, record.ports) as claim:
                    if not self._run(record, claim):
                        message = f"the ports of {path.name} are another's by now"
                        return Refused(refusal=Refusal.CONFLICT, code="PortsTaken", message=message)
                return Started(node=self._node(fleet, record, self._looked_at(path)))
        except CloudBusyError as error:
            return Refused(refusal=Refusal.THROTTLED, code="Locked", message=str(error))

    def stop(self, fleet: FleetId, region: str, nodes: Iterable[Node]) -> None:
        """Tell agents to end, with their engines; what is left after `end_grace_s` is killed at the next look."""
        self._check_region(region)
        with self._errors(), self._locked():
            for node in nodes:
                path = self.folder / "nodes" / node.node_id
                if _NODE_ID.fullmatch(node.node_id) and (path / RECORD).exists():
                    self._end(path, client_token(fleet, node.tags.instance_id, node.tags.node))

    def release_group(self, fleet: FleetId, region: str, instance_id: str) -> bool:  # noqa: ARG002  # the port's
        """There are none."""
        self._check_region(region)
        return True

    # Starting ------------------------------------------------------------------------------------------------------

    def _admit(self, fleet: FleetId, order: NodeOrder, token: str, path: Path) -> LocalNode | Refused:
        """The new node's record, with its share of the machine; a refusal where there is no room."""
        self._forget_old()
        size = self._machine.sizes.get(order.tags.config)
        if size is None:
            known = ", ".join(sorted(self._machine.sizes))
            message = f"{order.tags.config} is no configuration of this machine, known: {known}"
            return Refused(refusal=Refusal.NOT_OFFERED, code="NoSuchConfiguration", message=message)
        held = [record for record in self._records() if self._looked_at(record.folder) is not NodeState.GONE]
        cpus, port = self._free_cpus(held, size.cpus), self._free_ports(held)
        free_bytes = self._machine.memory_bytes - sum(record.memory_bytes for record in held)
        lacking = "CPUs" if cpus is None else "memory" if size.memory_bytes > free_bytes else "ports"
        if cpus is None or port is None or size.memory_bytes > free_bytes:
            message = f"this machine has no free {lacking} for a {order.tags.config} beside {len(held)} nodes"
            return Refused(refusal=Refusal.CAPACITY, code="MachineFull", message=message)
        record = LocalNode(
            node_id=path.name,
            account=own_account(self.folder),
            token=token,
            region=order.region,
            zone=order.zone,
            market=order.market,
            tags=write_tags(fleet, order.tags),
            cpus=cpus,
            memory_bytes=size.memory_bytes,
            first_port=port,
            ports=self._machine.ports_per_node,
            launched_at=self._clock.now(),
            folder=path,
        )
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / RECORD, record_document(record))
        return record

    def _run(self, record: LocalNode, claim: Sequence[int]) -> bool:
        """Start the agent of a node that was not told to end and has none yet; one whose start was not noted is found again.

        False where it would need the claim to its ports and there is none.
        """
        path = record.folder
        if (path / PROCESS).exists() or (path / STOPPED).exists():
            return True
        agent = leader(members(path))
        if agent is None:
            if not claim:
                return False
            write_whole(path / AGENT_FILE, self._launch.document(record))
            agent = spawn(
                (*self._launch.argv, str(path / AGENT_FILE)),
                folder=path,
                environment=self._launch.environment,
                cpus=record.cpus,
                log=path / AGENT_LOG,
                holding=claim,
            )
        write_whole(path / PROCESS, {"pid": agent.pid, "start_ticks": agent.start_ticks, "boot_id": boot_id()})
        return True

    def _free_cpus(self, held: Sequence[LocalNode], wanted: int) -> tuple[int, ...] | None:
        used = Counter(cpu for record in held for cpu in record.cpus)
        free = sorted((used[cpu], cpu) for cpu in self._machine.cpus if used[cpu] < self._machine.nodes_per_cpu)
        return tuple(sorted(cpu for _, cpu in free[:wanted])) if len(free) >= wanted else None

    def _free_ports(self, held: Sequence[LocalNode]) -> int | None:
        """The first port of a block that no node has, of whatever folder, and nobody listens on."""
        size, taken = self._machine.ports_per_node, {record.first_port for record in held}
        for first in range(self._machine.first_port, self._machine.last_port - size + 2, size):
            if first not in taken and all(_port_is_free(first + i) for i in range(size)):
                with _claimed(first, size) as claim:
                    if claim:
                        return first
        return None

    def _forget_old(self) -> None:
        for record in self._records():
            newest = max(path.stat().st_mtime for path in (record.folder, *record.folder.iterdir()))
            old = self._clock.now().timestamp() - newest > self._keep.total_seconds()
            if old and self._looked_at(record.folder) is NodeState.GONE:
                shutil.rmtree(record.folder)

    # Looking and ending --------------------------------------------------------------------------------------------

    def _looked_at(self, path: Path) -> NodeState:
        """The state of a node, after what is due of its end has been done."""
        agent = self._agent(path)
        if not (path / STOPPED).exists():
            if agent is not None and agent.alive:
                return NodeState.HALTED if agent.halted else NodeState.RUNNING
            if members(path):
                return NodeState.HALTED if (path / PROCESS).exists() else NodeState.PENDING
            return NodeState.GONE if (path / PROCESS).exists() else NodeState.PENDING
        left = members(path)
        told_at = datetime.fromisoformat(read_document(path / STOPPED)["at"])
        # A clock that was set back since would let it live on for as long.
        if left and not timedelta(0) <= self._clock.now() - told_at < self._end_grace:
            end_all(path)
            left = members(path)
        return NodeState.ENDING if left else NodeState.GONE

    def _end(self, path: Path, token: str) -> None:
        record = read_record(path)
        if isinstance(record, str) or record.token != token:
            raise ProvisionError(f"{path.name} is not the fleet's own", where=str(path), fix="end it by hand")
        if not (path / STOPPED).exists():
            write_whole(path / STOPPED, {"at": self._clock.now().isoformat()})
        agent = self._agent(path) or leader(members(path))
        alone = agent is not None and agent.alive  # an agent ends its own engines, orderly
        for process in [agent] if alone and agent is not None else members(path):
            send(process, signal.SIGTERM)

    def _agent(self, path: Path) -> Process | None:
        """The agent's process, unless it is gone; a pid in its second use is not taken for it."""
        if not (path / PROCESS).exists():
            return None
        noted = read_document(path / PROCESS)
        reap(noted["pid"])
        found = see_process(noted["pid"])
        same = found is not None and (found.start_ticks, boot_id()) == (noted["start_ticks"], noted["boot_id"])
        return found if same else None

    def _node(self, fleet: FleetId, record: LocalNode, state: NodeState) -> Node:
        tags = read_tags(fleet, record.tags, account=record.account, token=record.token)
        if isinstance(tags, str):
            raise ProvisionError(tags, where=str(record.folder), fix="give the fleet another name")
        return Node(
            node_id=record.node_id,
            region=record.region,
            zone=record.zone,
            market=record.market,
            state=state,
            launched_at=record.launched_at,
            tags=tags,
        )

    # The folder ----------------------------------------------------------------------------------------------------

    def _node_folders(self) -> list[Path]:
        """Folders of nodes; one without a record was cut off before anything was started. Unreadable is an error, not empty."""
        try:
            found = sorted((self.folder / "nodes").iterdir())
        except FileNotFoundError:
            return []
        return [path for path in found if (path / RECORD).exists()]

    def _records(self) -> list[LocalNode]:
        found = [read_record(path) for path in self._node_folders()]
        return [record for record in found if isinstance(record, LocalNode)]

    def _check_region(self, region: str) -> None:
        if region not in self._zones:
            raise ProvisionError(f"unknown region {region!r}", fix=f"known: {', '.join(sorted(self._zones))}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One caller at a time; CloudBusyError where another one takes too long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        waited_s = ListeningClock(time.monotonic)
        with (self.folder / "lock").open("w") as lock:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if waited_s() > self.call_timeout_s / 2:
                    raise CloudBusyError("another process is starting or stopping nodes", where=str(self.folder))
                time.sleep(_LOCK_PAUSE_S)
            yield

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            _raise_unusable(error, self.folder)


def _raise_unusable(error: Exception, folder: Path) -> NoReturn:
    where = str(getattr(error, "filename", None) or folder)
    raise ProvisionError(f"the local nodes cannot be kept: {error}", where=where, fix=_FIX) from error


@contextmanager
def _claimed(first_port: int, ports: int) -> Iterator[tuple[int, ...]]:
    """Handles on the claim to these ports, none where one of them is another's; whoever inherits them goes on holding it.

    A claim is a name in the kernel that only one can have: it is as wide as ports are, whatever folders and users there are,
    and is given up with the last process that holds it.
    """
    with ExitStack() as stack:
        claims = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(ports)]
        try:
            for number, claim in enumerate(claims, start=first_port):
                claim.bind(f"\0coral-local-port-{number}")
        except OSError:
            stack.close()
            claims = []
        yield tuple(claim.fileno() for claim in claims)


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # as an engine tries it: one that listens on another address is in its way
        except OSError:
            return False
    return True
