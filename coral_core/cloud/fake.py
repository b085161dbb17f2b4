"""A cloud in memory, on any clock: for rehearsals and tests. It lags, runs out, throttles and loses answers when told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from coral_core.clock import Clock
from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.fleet_view import Instance
from coral_core.cloud.provisioner import (
    CloudBusyError,
    Listing,
    NodeOrder,
    Refusal,
    Refused,
    Started,
    StartOutcome,
)
from coral_core.cloud.tags import FLEET_TAG, client_token, read_tags, write_tags
from coral_core.domain.fleet import FleetId, ForeignNode, Node, NodeState, Offer
from coral_core.domain.hardware import Market
from coral_core.errors import ProvisionError


class Trouble(StrEnum):
    """What a scripted fault does to one call.

    `lost`: the call works, its answer does not come; `unavailable`: neither.
    """

    CAPACITY = "capacity"
    QUOTA = "quota"
    THROTTLED = "throttled"
    LOST = "lost"
    UNAVAILABLE = "unavailable"
    DENIED = "denied"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The next `times` calls of `operation` that match meet `trouble`; None matches every zone or configuration."""

    operation: str
    trouble: Trouble
    times: int = 1
    zone: str | None = None
    config: str | None = None


@dataclass(slots=True, kw_only=True)
class FakeMachine:
    """A machine as it truly is; `order` is None for somebody else's."""

    node_id: str
    region: str
    zone: str
    market: Market
    account: str
    token: str
    tags: Mapping[str, str]
    born_at: datetime
    order: NodeOrder | None = None
    stopped_at: datetime | None = None
    halted: bool = False
    interrupted: bool = False


_DENIALS = {
    Trouble.DENIED: ("UnauthorizedOperation: not allowed", "grant the flow's role this action"),
    Trouble.EXPIRED: ("ExpiredToken: the token has expired", "renew the credentials"),
}


@dataclass(slots=True, kw_only=True)
class FakeCloud:
    """Implements `Provisioner`. Listings show the fleet as it was `lag_s` ago.

    `zones` names the zones of each region. `capacity` bounds nodes by (zone, config), `quota` by offer; what is absent
    is unbounded. A machine is pending for `boot_s`, ending for `end_s`, and listed as gone for `forget_s` more.
    `before_call` and `after_call` are told the operation and may raise, as a crash would; `watch` sees every start.
    """

    clock: Clock
    zones: Mapping[str, Sequence[str]]
    owner: str = "111111111111"
    call_timeout_s: float = 20.0
    lag_s: float = 0.0
    boot_s: float = 30.0
    end_s: float = 30.0
    forget_s: float = 3600.0
    capacity: dict[tuple[str, str], int] = field(default_factory=dict)
    quota: dict[Offer, int] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    before_call: Callable[[str], None] | None = None
    after_call: Callable[[str], None] | None = None
    machines: dict[str, FakeMachine] = field(default_factory=dict)
    groups: set[tuple[str, str, str]] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    watch: Callable[[FakeCloud], None] | None = None

    def account(self) -> str:
        """The owner of everything here."""
        self._enter("account")
        self._leave("account", None)
        return self.owner

    def describe(self, fleet: FleetId, region: str) -> Listing:
        """What was there `lag_s` ago."""
        trouble = self._enter("describe", region=region)
        nodes: list[Node] = []
        foreign: list[ForeignNode] = []
        for machine in self.machines.values():
            state = self._state(machine, self.lag_s)
            if state is None or machine.region != region or machine.tags.get(FLEET_TAG) != fleet.name:
                continue
            tags = read_tags(fleet, machine.tags, account=machine.account, token=machine.token)
            if isinstance(tags, str):
                foreign.append(ForeignNode(node_id=machine.node_id, region=region, reason=tags))
                continue
            nodes.append(self._node(fleet, machine, state))
        groups = tuple(sorted(name for owner, place, name in self.groups if (owner, place) == (fleet.name, region)))
        self._leave("describe", trouble)
        return Listing(nodes=tuple(nodes), foreign=tuple(foreign), groups=groups)

    def start(self, fleet: FleetId, order: NodeOrder) -> StartOutcome:
        """Start a machine, or refuse."""
        trouble = self._enter("start", region=order.region, zone=order.zone, config=order.tags.config)
        refusals = {
            Trouble.CAPACITY: Refusal.CAPACITY,
            Trouble.QUOTA: Refusal.QUOTA,
            Trouble.THROTTLED: Refusal.THROTTLED,
            Trouble.UNAVAILABLE: Refusal.UNKNOWN,
        }
        if trouble in refusals:
            return Refused(refusal=refusals[trouble], code=trouble.value, message="as scripted")
        outcome = self._start(fleet, order)
        if self.watch:
            self.watch(self)
        if self.after_call:
            self.after_call("start")
        if trouble is Trouble.LOST:
            return Refused(refusal=Refusal.UNKNOWN, code=trouble.value, message="as scripted")
        return outcome

    def stop(self, fleet: FleetId, region: str, nodes: Iterable[Node]) -> None:
        """End machines of the fleet."""
        trouble = self._enter("stop", region=region)
        for node in nodes:
            machine = self.machines.get(node.node_id)
            if machine is None:
                continue
            if machine.token != client_token(fleet, node.tags.instance_id, node.tags.node):
                raise AssertionError(f"{node.node_id} is not the fleet's")
            machine.stopped_at = machine.stopped_at or self.clock.now()
        self._leave("stop", trouble)

    def release_group(self, fleet: FleetId, region: str, instance_id: str) -> bool:
        """Remove the group unless machines are in it."""
        trouble = self._enter("release_group", region=region)
        used = any(
            m.order is not None and m.order.tags.instance_id == instance_id and self._state(m) is not NodeState.GONE
            for m in self.machines.values()
            if self._state(m) is not None
        )
        if not used:
            self.groups.discard((fleet.name, region, instance_id))
        self._leave("release_group", trouble)
        return not used

    def plant(self, node_id: str, *, region: str, tags: Mapping[str, str], account: str = "", token: str = "") -> None:
        """Put somebody else's machine beside ours."""
        self.machines[node_id] = FakeMachine(
            node_id=node_id,
            region=region,
            zone=self.zones[region][0],
            market=Market.ON_DEMAND,
            account=account or self.owner,
            token=token,
            tags=tags,
            born_at=self.clock.now(),
        )

    def kill(self, node_id: str) -> None:
        """A machine dies."""
        self.machines[node_id].stopped_at = self.machines[node_id].stopped_at or self.clock.now()

    def halt(self, node_id: str) -> None:
        """Somebody stops a machine without ending it."""
        self.machines[node_id].halted = True

    def interrupt(self, node_id: str) -> None:
        """The cloud announces that it takes a spot machine back."""
        self.machines[node_id].interrupted = True

    def held(self, *, also_ending: bool = True) -> list[FakeMachine]:
        """Machines that truly exist now, whatever the listing shows."""
        dead = {None, NodeState.GONE} | (set() if also_ending else {NodeState.ENDING})
        return [m for m in self.machines.values() if self._state(m) not in dead]

    def _start(self, fleet: FleetId, order: NodeOrder) -> StartOutcome:
        token = client_token(fleet, order.tags.instance_id, order.tags.node)
        known = next((m for m in self.machines.values() if m.token == token and m.order is not None), None)
        if known is not None:
            if known.order != order:
                return Refused(
                    refusal=Refusal.CONFLICT, code="IdempotentParameterMismatch", message="the token is in use"
                )
            return Started(node=self._node(fleet, known, self._state(known) or NodeState.GONE))
        if order.grouped:
            self.groups.add((fleet.name, order.region, order.tags.instance_id))
        held = [m.order for m in self.held() if m.order is not None]
        config, offer = order.tags.config, (order.region, order.tags.config, order.market)
        in_zone = sum((o.zone, o.tags.config) == (order.zone, config) for o in held)
        if in_zone >= self.capacity.get((order.zone, config), in_zone + 1):
            return Refused(
                refusal=Refusal.CAPACITY, code="InsufficientInstanceCapacity", message=f"none in {order.zone}"
            )
        of_offer = sum((o.region, o.tags.config, o.market) == offer for o in held)
        if of_offer >= self.quota.get(offer, of_offer + 1):
            return Refused(refusal=Refusal.QUOTA, code="VcpuLimitExceeded", message=f"{of_offer} are allowed")
        machine = FakeMachine(
            node_id=f"i-{len(self.machines):06d}",
            region=order.region,
            zone=order.zone,
            market=order.market,
            account=self.owner,
            token=token,
            tags=write_tags(fleet, order.tags),
            born_at=self.clock.now(),
            order=order,
        )
        self.machines[machine.node_id] = machine
        return Started(node=self._node(fleet, machine, NodeState.PENDING))

    def _state(self, machine: FakeMachine, lag_s: float = 0.0) -> NodeState | None:
        """The state `lag_s` ago; None before birth and when forgotten."""
        age_s = (self.clock.now() - machine.born_at).total_seconds() - lag_s
        over_s = -1.0 if machine.stopped_at is None else (self.clock.now() - machine.stopped_at).total_seconds() - lag_s
        if age_s < 0 or over_s >= self.end_s + self.forget_s:
            return None
        if over_s >= 0:
            return NodeState.ENDING if over_s < self.end_s else NodeState.GONE
        if machine.halted:
            return NodeState.HALTED
        return NodeState.PENDING if age_s < self.boot_s else NodeState.RUNNING

    def _node(self, fleet: FleetId, machine: FakeMachine, state: NodeState) -> Node:
        tags = read_tags(fleet, machine.tags, account=machine.account, token=machine.token)
        assert not isinstance(tags, str), tags
        return Node(
            node_id=machine.node_id,
            region=machine.region,
            zone=machine.zone,
            market=machine.market,
            state=state,
            launched_at=machine.born_at,
            tags=tags,
            interrupted=machine.interrupted,
        )

    def _enter(
        self, operation: str, *, region: str | None = None, zone: str | None = None, config: str | None = None
    ) -> Trouble | None:
        """Begin a call: refuse bad regions, meet the first fault that matches."""
        self.calls.append(operation)
        if self.before_call:
            self.before_call(operation)
        if region is not None and region not in self.zones:
            raise ProvisionError(f"unknown region {region!r}", fix=f"known: {', '.join(sorted(self.zones))}")
        trouble = self._next_trouble(operation, zone, config)
        if trouble in _DENIALS:
            what, fix = _DENIALS[trouble]
            raise ProvisionError(what, where=operation, fix=fix)
        if trouble is not None and operation != "start" and trouble is not Trouble.LOST:
            raise CloudBusyError(f"{trouble}: as scripted", where=operation)
        return trouble

    def _next_trouble(self, operation: str, zone: str | None, config: str | None) -> Trouble | None:
        for index, fault in enumerate(self.faults):
            if fault.operation == operation and fault.zone in {None, zone} and fault.config in {None, config}:
                del self.faults[index]
                if fault.times > 1:
                    self.faults.insert(
                        index,
                        Fault(
                            operation=fault.operation,
                            trouble=fault.trouble,
                            times=fault.times - 1,
                            zone=fault.zone,
                            config=fault.config,
                        ),
                    )
                return fault.trouble
        return None

    def _leave(self, operation: str, trouble: Trouble | None) -> None:
        if self.after_call:
            self.after_call(operation)
        if trouble is Trouble.LOST:
            raise CloudBusyError("the answer was lost: as scripted", where=operation)


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """Implements `Engine` over a fake cloud: an engine answers `boot_s` after its youngest node runs.

    Templates in `broken` never answer. An instance is drained `drain_s` after it was told to, at once where it did not
    answer; ids in `condemned` have failed for good. Instances of templates in `wide` go on without nodes, as long as the first
    and one of every stage are left. `weight` is what the gateway routes by; `unreachable` makes the gateway's side unknown;
    `starting`: it says of who does not answer yet that it starts.
    """

    cloud: FakeCloud
    boot_s: float = 60.0
    drain_s: float = 20.0
    broken: set[str] = field(default_factory=set)
    wide: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    unreachable: bool = False
    starting: bool = False
    weight: dict[str, float] = field(default_factory=dict)
    draining_since: dict[str, datetime] = field(default_factory=dict)

    def ready(self, instance: Instance) -> Readiness:
        """Whether it answers."""
        if self.unreachable:
            return Readiness.UNKNOWN
        if instance.instance_id in self.condemned:
            return Readiness.FAILED
        if self._answers(instance):
            self.answered.add(instance.instance_id)
            return Readiness.READY
        if self._goes_on(instance):
            return Readiness.DEGRADED
        return Readiness.STARTING if self.starting else Readiness.NOT_READY

    def set_weight(self, instance: Instance, weight: float) -> None:
        """Route by this weight."""
        self.weight[instance.instance_id] = weight
        if weight > 0:
            self.draining_since.pop(instance.instance_id, None)

    def drain(self, instance: Instance) -> bool:
        """Whether its requests have ended."""
        begun = self.draining_since.setdefault(instance.instance_id, self.cloud.clock.now())
        if not self._answers(instance) and not self._goes_on(instance):
            return True
        return (self.cloud.clock.now() - begun).total_seconds() >= self.drain_s

    def _answers(self, instance: Instance) -> bool:
        return (
            instance.template_id not in self.broken
            and not instance.missing
            and len(self._alive(instance)) == len(instance.nodes)
            and (self.cloud.clock.now() - instance.launched_at).total_seconds() >= self.cloud.boot_s + self.boot_s
        )

    def _goes_on(self, instance: Instance) -> bool:
        """Whether it has answered, and of the nodes that are left the first one and one of each stage are."""
        wide = instance.template_id in self.wide and instance.instance_id in self.answered
        left = self._alive(instance)
        stages = {node.tags.stage for node in instance.nodes}
        return wide and 0 in {node.tags.node for node in left} and stages == {node.tags.stage for node in left}

    def _alive(self, instance: Instance) -> list[Node]:
        alive = {machine.node_id for machine in self.cloud.held(also_ending=False) if not machine.halted}
        return [node for node in instance.nodes if node.node_id in alive]
