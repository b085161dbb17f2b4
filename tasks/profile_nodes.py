"""Nodes to measure on: rented one at a time, brought up by a coordinator of the run's own, released whatever happens.

The fleet is one of its own, `<fleet>-profile`, under a lease: who has it may end every node that carries its name, which is
how what a killed run has left is released by the next one. The engines answer whoever profiles, and no gateway.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from artifacts.leases import Lease
from coral_core.catalog import load_catalog
from coral_core.clock import Clock, SystemClock
from coral_core.cloud.provisioner import CloudBusyError, NodeOrder, Provisioner, Refusal, Started, StartOutcome
from coral_core.config.coordinator import load_coordinator_file
from coral_core.config.settings import Settings
from coral_core.domain.fleet import FleetId, Node, NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.launch import LaunchPlan, NodePlace
from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError, InputError, ProvisionError, ServingError, StoreError
from coral_core.serving.control.coordinator import CoordinatorPlan, coordinate
from coral_core.serving.control.curve import AllowedKeys, KeyPair, write_allowed, write_private
from coral_core.serving.control.held import AskPlan, ControlTerms, Stage
from coral_core.serving.control.wire import new_pair, read_matching
from tasks.local_nodes import LOCAL_ZONES, local_provisioner
from tasks.providers import Provider, open_provider

LaunchOf = Callable[[NodePlace, str], LaunchPlan]
"""(place, instance id) -> what the node shall run."""

_LOG: Final = logging.getLogger(__name__)
_LOOK_S: Final = 0.5
_RELEASE_LOOKS: Final = 240
_START_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node of a configuration can be had, and what it costs there."""

    region: str
    zones: tuple[str, ...]
    price_usd_per_h: float


PlacesOf = Callable[[str], list[Place]]
"""Where a configuration can be had, cheapest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A cloud to measure on: `places(config)` where a configuration can be had, cheapest first."""

    provisioner: Provisioner
    clock: Clock
    sleep: Callable[[float], None]
    settle_s: float
    regions: tuple[str, ...]
    places: PlacesOf


class NodeLateError(ServingError):
    """A node that has not failed, but was not ready in time."""


class Meeting:
    """A coordinator in a thread of this process, for instances of one node each; `with` starts and ends it."""

    def __init__(self, *, host: str, port: int, pair: KeyPair, allowed: Path, folder: Path) -> None:
        self._changed = threading.Condition()
        self._launches: dict[str, LaunchOf] = {}
        self._urls: dict[str, str] = {}
        self._stages: dict[str, tuple[Stage, str]] = {}
        self._fault: BaseException | None = None
        self._endpoint = ""
        self._stop: Callable[[], object] = lambda: None
        self._plan = CoordinatorPlan(
            host=host,
            port=port,
            pair=pair,
            allowed=AllowedKeys(allowed),
            gateway_url="",
            gateway_token="",
            folder=folder,
            terms=ControlTerms(),
            launch=self._launch,
        )
        self._thread = threading.Thread(target=self._run, name="meeting of profiled nodes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._endpoint or self._fault, timeout=30.0)
        if not self._endpoint:
            raise ServingError(f"no coordinator for profiled nodes: {self._fault}", fix="is its port taken?")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._thread.join(timeout=30.0)

    @property
    def endpoint(self) -> str:
        """Where agents register."""
        return self._endpoint

    def expect(self, instance_id: str, launch: LaunchOf) -> None:
        """From now on an instance of this name is launched so."""
        self._launches[instance_id] = launch

    def await_ready(self, instance_id: str, *, within_s: float, meanwhile: Callable[[], object]) -> str:
        """The instance's URL, once its node has it ready. Raises ServingError where it fails, NodeLateError where it does not come.

        `meanwhile` is called every half second.
        """
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            meanwhile()
            with self._changed:
                stage, detail = self._stages.get(instance_id, (Stage.GATHERING, "its agent has not registered"))
                if stage is Stage.READY:
                    return self._urls[instance_id]
                if stage.over:
                    raise ServingError(f"{stage.value}: {detail}", where=f"node of {instance_id}")
                self._changed.wait(timeout=_LOOK_S)
        raise NodeLateError(
            f"not ready after {within_s:.0f} s ({stage.value}: {detail})",
            where=f"node of {instance_id}",
            fix="is the coordinator's address that of the nodes' agent files, and the key one that is let in?",
        )

    def _launch(self, question: AskPlan) -> LaunchPlan:
        launch = self._launches.get(question.instance_id)
        if launch is None:
            raise InputError("this run expects no such node", where=question.instance_id)
        plan = launch(question.places[0], question.instance_id)
        self._urls[question.instance_id] = plan.url
        return plan

    def _say(self, event: str, text: str, **facts: object) -> None:
        _LOG.debug("%s", text)
        with suppress(ValueError), self._changed:
            self._stages[str(facts.get("instance"))] = (Stage(event), str(facts.get("detail", "")))
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            asyncio.run(self._coordinate())
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._fault = error
            with self._changed:
                self._changed.notify_all()

    async def _coordinate(self) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)

        def started(endpoint: str) -> None:
            with self._changed:
                self._endpoint = endpoint
                self._changed.notify_all()

        await coordinate(self._plan, SystemClock(), stop=stop, say=self._say, started=started)


@contextmanager
def local_ground(settings: Settings, folder: Path) -> Iterator[tuple[Ground, Meeting]]:
    """This machine: keys and a coordinator of the run's own."""
    coordinator, agent = new_pair(), new_pair()
    keys, allowed = folder / "agent.keys", folder / "allowed.keys"
    pair = KeyPair(public=coordinator[0], secret=coordinator[1])
    write_private(keys, KeyPair(public=agent[0], secret=agent[1], server=coordinator[0]))
    write_allowed(allowed, {agent[0]: "local"})
    with Meeting(host="127.0.0.1", port=0, pair=pair, allowed=allowed, folder=folder / "coordinator") as meeting:
        clock = SystemClock()
        mine = settings.model_copy(update={"local_coordinator": meeting.endpoint, "local_agent_keys": keys})
        ground = Ground(
            provisioner=local_provisioner(mine, clock),
            clock=clock,
            sleep=time.sleep,
            settle_s=0.0,
            regions=tuple(LOCAL_ZONES),
            places=local_places,
        )
        yield ground, meeting


@contextmanager
def aws_ground(
    settings: Settings, coordinator_file: Path, regions: tuple[str, ...]
) -> Iterator[tuple[Ground, Meeting]]:
    """EC2; nodes register at the address and with the keys of a coordinator's file, whose own program must not run meanwhile."""
    provider = open_provider(settings, "aws")
    places = aws_places(provider, regions)
    spec = load_coordinator_file(coordinator_file)
    meeting = Meeting(
        host=spec.listen.host,
        port=spec.listen.port,
        pair=read_matching(spec.keys_file),
        allowed=spec.agents_file,
        folder=spec.folder / "profile",
    )
    with meeting:
        ground = Ground(
            provisioner=provider.provisioner,
            clock=provider.clock,
            sleep=provider.sleep,
            settle_s=provider.settle_s,
            regions=regions,
            places=places,
        )
        yield ground, meeting


def aws_places(provider: Provider, regions: tuple[str, ...]) -> PlacesOf:
    """Where EC2 offers a configuration among `regions`, by its own prices. Raises InputError without a region."""
    sources = provider.sources
    assert sources is not None
    if not regions:
        raise InputError("no region to rent in", where="regions", fix="name at least one, such as us-east-1")

    def places(config: str) -> list[Place]:
        found: list[Place] = []
        for region in regions:
            prices = provider.patiently(partial(sources.prices.on_demand_usd_per_h, region, [config]))
            zones = provider.patiently(partial(sources.offerings.zones, region, [config])).value
            if config in prices and zones.get(config):
                found.append(Place(region=region, zones=zones[config], price_usd_per_h=prices[config].value))
        return sorted(found, key=lambda place: place.price_usd_per_h)

    return places


def local_places(config: str) -> list[Place]:
    """This machine, at the price that the catalogue states."""
    price = load_catalog("local").prices.get((next(iter(LOCAL_ZONES)), config, Market.ON_DEMAND))
    if price is None:
        raise DataGapError(f"no price of {config}", where="catalogue local")
    region, zones = next(iter(LOCAL_ZONES.items()))
    return [Place(region=region, zones=zones, price_usd_per_h=price.price_usd_per_h)]


@dataclass(slots=True, kw_only=True)
class Rental:
    """Rents nodes of one fleet under a lease, which is looked at before every change of the cloud."""

    ground: Ground
    meeting: Meeting
    lease: Lease
    fleet: FleetId
    on_step: Callable[[str], object]

    @contextmanager
    def node(
        self, *, name: str, model: str, config: str, place: Place, launch: LaunchOf, within_s: float
    ) -> Iterator[str]:
        """The URL of one node's program; the node is released at the end of the block, whatever happens in it."""
        instance_id = f"{name}-{self.lease.epoch}-{int(self.ground.clock.now().timestamp())}"
        self.meeting.expect(instance_id, launch)
        tags = NodeTags(
            instance_id=instance_id,
            template_id=name,
            model=model,
            phase=Phase.AGGREGATED,
            config=config,
            stage=0,
            node=0,
            nodes=1,
            epoch=self.lease.epoch,
        )
        try:
            node = self._started(place, tags)
            self.on_step(f"{config} in {place.region}: node {node.node_id} started")
            yield self.meeting.await_ready(instance_id, within_s=within_s, meanwhile=self.lease.guard)
        finally:
            self.release(place.region)

    def release_all(self) -> int:
        """End what earlier runs of this fleet have left, in every region that is looked at; how many nodes."""
        return sum(self.release(region) for region in self.ground.regions)

    def release(self, region: str) -> int:
        """End every node of the fleet in the region, and see that none is left. Raises ProvisionError where one will not end."""
        ended: set[str] = set()
        unseen_until_s = time.monotonic() + self.ground.settle_s
        for _ in range(_RELEASE_LOOKS):
            with suppress(CloudBusyError):
                nodes = self._nodes(region)
                ended |= {node.node_id for node in nodes}
                stoppable = [node for node in nodes if node.state is not NodeState.ENDING]
                if stoppable:
                    self._guard_end()
                    self.ground.provisioner.stop(self.fleet, region, stoppable)
                if not nodes and time.monotonic() >= unseen_until_s:
                    return len(ended)
            self.ground.sleep(_LOOK_S)
        raise ProvisionError(
            f"nodes are left: {', '.join(node.node_id for node in self._nodes(region))}",
            where=f"fleet {self.fleet.name} in {region}",
            fix=f"end them by hand, or run `coral teardown {self.fleet.name}`",
        )

    def _guard_end(self) -> None:
        """As `Lease.guard`, but a store that fails, often what has ended the run, keeps no node: until the lease is over it is nobody else's."""
        try:
            self.lease.guard()
        except StoreError:
            if self.lease.left_s <= self.ground.provisioner.call_timeout_s:
                raise

    def _nodes(self, region: str) -> list[Node]:
        listed = self.ground.provisioner.describe(self.fleet, region).nodes
        return [node for node in listed if node.state is not NodeState.GONE]

    def _started(self, place: Place, tags: NodeTags) -> Node:
        """One node, in the first zone that has it. Raises ProvisionError with what each zone said."""
        refused: list[str] = []
        for zone in place.zones:
            order = NodeOrder(region=place.region, zone=zone, market=Market.ON_DEMAND, tags=tags)
            outcome = self._asked(order)
            if isinstance(outcome, Started):
                return outcome.node
            if outcome.refusal is Refusal.UNKNOWN:
                # It may run: another zone would start a second one.
                raise ProvisionError(f"{outcome.code}: {outcome.message}", where=zone, fix="run again")
            refused.append(f"{zone}: {outcome.code}")
        raise ProvisionError(
            f"no node of {tags.config} can be had: {'; '.join(refused) or 'no zone offers it'}",
            where=place.region,
            fix="try later, or another region",
        )

    def _asked(self, order: NodeOrder) -> StartOutcome:
        """The answer to an order, asked again a few times while the refusal may pass."""
        for attempt in range(_START_ATTEMPTS):
            if attempt:
                self.ground.sleep(_LOOK_S)
            self.lease.guard()
            outcome = self.ground.provisioner.start(self.fleet, order)
            if isinstance(outcome, Started) or not outcome.refusal.passing:
                break
        return outcome
