"""A fleet: the rented nodes, the serving instances they form, and what a plan wants of them (DESIGN 7).

The cloud is the state. A *node* is one rented machine; a *serving instance* is all nodes that carry one instance id,
up only when every one of them is. Nothing here does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from coral_core.domain.hardware import Market
from coral_core.domain.templates import ServingTemplate
from coral_core.domain.workload import Phase

INSTANCE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What a serving instance may be called wherever it is a path, a label or a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetId:
    """Whose nodes: a name, and the cloud account (AWS account number, GCP project) it lives in."""

    name: str
    account: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlot:
    """The place of one node in a serving instance: pipeline stage (from 0) and node configuration."""

    stage: int
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """What a serving instance of a template consists of: `slots[i]` is node i; `throughput` is its routing weight.

    `throughput` is in the unit of the phase: requests/s for `aggregated`, tokens/s otherwise.
    """

    template_id: str
    model: str
    phase: Phase
    slots: tuple[NodeSlot, ...]
    throughput: float

    @property
    def combination(self) -> dict[str, int]:
        """Nodes per configuration, keys sorted."""
        counts: dict[str, int] = {}
        for slot in self.slots:
            counts[slot.config] = counts.get(slot.config, 0) + 1
        return dict(sorted(counts.items()))


def spec_of(template: ServingTemplate) -> InstanceSpec:
    """The nodes of one instance of `template`: stages in order, the nodes of a stage sorted."""
    stages = enumerate(template.placement.stages)
    return InstanceSpec(
        template_id=template.template_id,
        model=template.model,
        phase=template.phase,
        slots=tuple(NodeSlot(stage=s, config=config) for s, stage in stages for config in sorted(stage.nodes)),
        throughput=template.throughput,
    )


class NodeState(StrEnum):
    """Life of a rented node.

    `pending` and `running` are paid for, `halted` (stopped by someone) may cost storage, `ending` still holds capacity
    and quota, `gone` holds nothing.
    """

    PENDING = "pending"
    RUNNING = "running"
    HALTED = "halted"
    ENDING = "ending"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTags:
    """What a node of ours says of itself, written at its launch and never changed.

    `node` counts from 0 within the serving instance, which has `nodes` nodes in all; `epoch` is the lease epoch of the
    plan that started it.
    """

    instance_id: str
    template_id: str
    model: str
    phase: Phase
    config: str
    stage: int
    node: int
    nodes: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node proven to be ours. `interrupted`: the cloud announced that it takes this spot node back."""

    node_id: str
    region: str
    zone: str
    market: Market
    state: NodeState
    launched_at: datetime
    tags: NodeTags
    interrupted: bool = False

    @property
    def live(self) -> bool:
        """Whether it may serve, now or soon."""
        return self.state in {NodeState.PENDING, NodeState.RUNNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignNode:
    """A node that carries the fleet's name but is not proven ours: reported, never touched, never counted."""

    node_id: str
    region: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`count` serving instances of `spec` in a region, on nodes of one market."""

    spec: InstanceSpec
    region: str
    market: Market
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The fleet that shall be. `plan_id` and `epoch` are fixed when the plan is made: a rerun repeats its client tokens.

    Each (template, region, market) is named at most once.
    """

    fleet: FleetId
    plan_id: str
    epoch: int
    wanted: tuple[Wanted, ...]


Offer = tuple[str, str, Market]
"""(region, configuration, market): what has a price and an availability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """What may never be passed, at any moment of a change.

    `max_by_offer` bounds nodes per offer (A_r(c), those we run included); an offer that is absent is not bounded by it.
    `price_usd_per_h` must hold every offer a plan uses; a running node whose price is unknown counts as over the limit
    (unknown is never zero), so nothing is started beside it.
    """

    max_nodes: int
    max_usd_per_h: float
    price_usd_per_h: Mapping[Offer, float]
    max_by_offer: Mapping[Offer, int] = field(default_factory=dict)
