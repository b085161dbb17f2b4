"""The observed fleet: nodes gathered into serving instances, and the condition each instance is in. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from coral_core.domain.fleet import Node, NodeState, Offer
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A serving instance as found: every node that carries its id, in the order of node numbers (at least one).

    The identity comes from its first node; where another node contradicts it, `consistent` is False.
    """

    instance_id: str
    nodes: tuple[Node, ...]

    @property
    def template_id(self) -> str:
        """The template it runs."""
        return self.nodes[0].tags.template_id

    @property
    def model(self) -> str:
        """The model it serves."""
        return self.nodes[0].tags.model

    @property
    def phase(self) -> Phase:
        """The phase it serves."""
        return self.nodes[0].tags.phase

    @property
    def region(self) -> str:
        """Where it is."""
        return self.nodes[0].region

    @property
    def zone(self) -> str:
        """The zone of its nodes."""
        return self.nodes[0].zone

    @property
    def market(self) -> Market:
        """How its nodes are paid for."""
        return self.nodes[0].market

    @property
    def launched_at(self) -> datetime:
        """When its youngest node was launched."""
        return max(node.launched_at for node in self.nodes)

    @property
    def key(self) -> tuple[str, str, Market]:
        """(template, region, market): what a plan counts."""
        return (self.template_id, self.region, self.market)

    @property
    def consistent(self) -> bool:
        """Whether its nodes agree on what they form, and no node number is there twice."""
        first = self.nodes[0]
        said = {(n.tags.template_id, n.tags.nodes, n.region, n.zone, n.market) for n in self.nodes}
        numbers = [node.tags.node for node in self.nodes if node.state is not NodeState.GONE]
        return said == {(first.tags.template_id, first.tags.nodes, first.region, first.zone, first.market)} and len(
            set(numbers)
        ) == len(numbers)

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of the nodes that are not there in any state."""
        present = {node.tags.node for node in self.nodes}
        return tuple(number for number in range(self.nodes[0].tags.nodes) if number not in present)

    @property
    def running(self) -> bool:
        """Whether all its nodes are there and run."""
        return not self.missing and all(node.state is NodeState.RUNNING for node in self.nodes)

    @property
    def may_serve(self) -> bool:
        """Whether the nodes that run may serve: the first, which runs the engine, and at least one of every stage.

        Stages of nodes that are not listed at all are not seen here.
        """
        run = [node.tags for node in self.nodes if node.state is NodeState.RUNNING]
        return any(tags.node == 0 for tags in run) and {tags.stage for tags in run} == {
            node.tags.stage for node in self.nodes
        }

    @property
    def standing(self) -> tuple[Node, ...]:
        """Nodes that a stop would end: all but those ending or gone."""
        return tuple(n for n in self.nodes if n.state not in {NodeState.ENDING, NodeState.GONE})


def gather(nodes: Iterable[Node]) -> tuple[Instance, ...]:
    """Nodes as serving instances, by age (oldest first), then id."""
    by_id: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        by_id[node.tags.instance_id].append(node)
    found = [
        Instance(instance_id=name, nodes=tuple(sorted(members, key=lambda n: (n.tags.node, n.node_id))))
        for name, members in by_id.items()
    ]
    return tuple(sorted(found, key=lambda instance: (instance.launched_at, instance.instance_id)))


def holdings(nodes: Iterable[Node]) -> dict[Offer, int]:
    """Nodes held per offer: all that are not gone (an ending node still uses capacity and quota)."""
    held: dict[Offer, int] = defaultdict(int)
    for node in nodes:
        if node.state is not NodeState.GONE:
            held[node.region, node.tags.config, node.market] += 1
    return dict(held)


class Condition(StrEnum):
    """What an instance is in.

    `ended`: nothing to stop any more; `failed`: to be stopped whole; `leaving`: serves, and the cloud takes it back soon;
    `degraded`: serves without some of its nodes, until another takes its place; `starting`: on its way, or shortly not
    answering; `up`: all nodes run and the engine answers.
    """

    ENDED = "ended"
    FAILED = "failed"
    LEAVING = "leaving"
    DEGRADED = "degraded"
    STARTING = "starting"
    UP = "up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """An offer that refused in this run: in one zone (no capacity), or in the whole region (zone None: quota)."""

    region: str
    zone: str | None
    config: str
    market: Market


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What a run knows besides the listing, by instance id.

    `ready`: instances whose engine answers; `degraded`: those of which it answers and goes on without a node; `unready_s`: for how long an engine has been seen not to answer (absent: it
    answers or cannot be asked); `failed`: given up by the serving side; `weight`: routing weights set in this run; `draining`: told to drain in this run;
    `drained`: nothing in flight any more, or given up waiting; `burnt`: ids that must not be used again; `given_up`:
    (template, region, market) whose instances fail to come up.
    """

    ready: frozenset[str] = frozenset()
    degraded: frozenset[str] = frozenset()
    unready_s: Mapping[str, float] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    weight: Mapping[str, float] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()
    burnt: frozenset[str] = frozenset()
    exhausted: frozenset[Exhausted] = frozenset()
    given_up: frozenset[tuple[str, str, Market]] = frozenset()


def judge(
    instance: Instance,
    signals: Signals,
    *,
    now: datetime,
    start_timeout_s: float,
    unready_grace_s: float,
    lost_grace_s: float,
) -> tuple[Condition, str]:
    """The condition of an instance and, where it is not `up`, the reason in words.

    An instance of several nodes is up only when all of them are. One dead node condemns it whole, unless its stage has
    another: then its engine may go on with less until it is replaced, and is condemned once it has not answered for
    `lost_grace_s` (where requests on the lost node have failed, the gateway may shortly give it none).
    """
    name = instance.instance_id
    unready_s = signals.unready_s.get(name, 0.0)
    answers = name in signals.ready or name in signals.degraded
    lost = _lost(instance, answers=answers)
    old = (now - instance.launched_at).total_seconds() > start_timeout_s
    verdict = (
        Condition.STARTING,
        "not all of its nodes are there" if instance.missing else "its engine does not answer yet",
    )
    if not instance.standing:
        verdict = Condition.ENDED, "all its nodes have ended"
    elif not instance.consistent:
        verdict = Condition.FAILED, "its nodes contradict each other"
    elif lost and (unready_s >= lost_grace_s or not instance.may_serve):
        verdict = Condition.FAILED, lost
    elif name in signals.failed:
        verdict = Condition.FAILED, "the serving side has given it up: a node, a rank or a step of it failed"
    elif instance.missing and old and not answers:
        verdict = Condition.FAILED, f"{len(instance.missing)} of its nodes never came"
    elif not instance.missing and any(node.interrupted for node in instance.standing):
        verdict = Condition.LEAVING, "the cloud takes a spot node back"
    elif lost or name in signals.degraded:
        silent = name in signals.unready_s
        what = "it does not answer for now" if silent else "it goes on with less"
        verdict = Condition.DEGRADED, f"{lost or 'its engine has lost a node'}, and {what}"
    elif instance.running and answers:
        verdict = Condition.UP, ""
    elif old and unready_s >= unready_grace_s:
        verdict = Condition.FAILED, f"its engine has not answered for {unready_s:.0f} s"
    return verdict


def _lost(instance: Instance, *, answers: bool) -> str:
    """What no waiting brings back; empty where nothing is lost. Nodes that are not listed are, once the engine answers."""
    standing = instance.standing
    if len(standing) < len(instance.nodes):
        return "one of its nodes has ended"
    if any(node.state is NodeState.HALTED for node in standing):
        return "one of its nodes was stopped"
    return "one of its nodes is gone" if instance.missing and answers else ""
