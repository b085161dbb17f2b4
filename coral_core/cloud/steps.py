"""What reconciliation says: ordered steps, what cannot be had, and how patient it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from coral_core.cloud.fleet_view import Instance
from coral_core.cloud.provisioner import NodeOrder
from coral_core.domain.fleet import Node, Offer, Wanted


class Action(StrEnum):
    """What a step does."""

    STOP = "stop"
    START = "start"
    WAIT = "wait"
    WEIGHT = "weight"
    DRAIN = "drain"
    RELEASE_GROUP = "release_group"


class Due(StrEnum):
    """When a step may be done: `now`, or after something else."""

    NOW = "now"
    ENGINE = "when its engine answers"
    ROOM = "when there is room under the limits"
    TURN = "when fewer others are under way"
    REPLACEMENT = "when all that the plan wants of the model is up"
    DRAINED = "when it is drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step for one serving instance. `orders` for a start, `nodes` for a stop, `weight` for a weight."""

    action: Action
    instance_id: str
    template_id: str
    region: str
    reason: str
    due: Due = Due.NOW
    orders: tuple[NodeOrder, ...] = ()
    nodes: tuple[Node, ...] = ()
    weight: float = 0.0
    instance: Instance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmet:
    """`count` wanted instances that cannot be started in this run, because of `offers` (those that refused)."""

    wanted: Wanted
    count: int
    reason: str
    offers: frozenset[Offer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """All steps that remain, in order, and what cannot be had. No step and nothing unmet: the fleet is the plan."""

    steps: tuple[Step, ...]
    unmet: tuple[Unmet, ...]

    @property
    def converged(self) -> bool:
        """Whether fleet and plan are equal (placement groups of ended instances may still be about)."""
        return not self.unmet and all(step.action is Action.RELEASE_GROUP for step in self.steps)

    @property
    def stuck(self) -> bool:
        """Whether time alone changes nothing any more: what remains waits for what cannot be had."""
        idle = {Due.REPLACEMENT, Due.DRAINED}
        return not self.converged and all(s.action is Action.RELEASE_GROUP or s.due in idle for s in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilePolicy:
    """How fast and how patient. `zones[offer]` lists the zones that sell it, best first: spot prices differ by zone.

    `max_starting` and `max_draining` (of models that stay) bound how many instances are under way at once. `start_timeout_s`: for what the serving side
    does not say to be starting, which has its engine's own limit. `lost_grace_s`: for how long an engine that
    has lost a node and may go on need not answer.
    """

    zones: Mapping[Offer, Sequence[str]]
    max_starting: int = 8
    max_draining: int = 8
    start_timeout_s: float = 900.0
    unready_grace_s: float = 120.0
    lost_grace_s: float = 15.0


def step_lines(todo: Reconciliation) -> tuple[str, ...]:
    """The steps and what cannot be had, one line each, for people who approve or look at a difference."""
    lines = [
        f"{step.action} {step.instance_id} in {step.region}{_detail(step)}: {step.reason}"
        + ("" if step.due is Due.NOW else f" ({step.due})")
        for step in todo.steps
    ]
    unmet = [f"unmet {u.count} x {u.wanted.spec.template_id} in {u.wanted.region}: {u.reason}" for u in todo.unmet]
    return (*lines, *unmet)


def _detail(step: Step) -> str:
    match step.action:
        case Action.START:
            return f", {step.orders[0].zone} {step.orders[0].market}: {', '.join(o.tags.config for o in step.orders)}"
        case Action.STOP:
            return f": {', '.join(node.node_id for node in step.nodes)}"
        case Action.WEIGHT:
            return f" to {step.weight:g}"
        case _:
            return ""
