"""What a run acts through, how patient it is, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from coral_core.clock import Clock
from coral_core.cloud.engine_port import Engine
from coral_core.cloud.provisioner import Provisioner, Refusal
from coral_core.cloud.steps import Action, ReconcilePolicy, Reconciliation, Unmet
from coral_core.domain.fleet import ForeignNode, Node, Offer
from coral_core.domain.hardware import Market
from coral_core.errors import ProvisionError


class LeaseLostError(ProvisionError):
    """The run may no longer change the fleet: another one may be at work."""

    kind: ClassVar[str] = "lease_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """One thing that was done or refused, for the record."""

    at: datetime
    action: Action
    region: str
    instance_id: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What the executor acts through.

    `guard()` renews the run's lease, gives the seconds left of it and raises LeaseLostError where another run holds it.
    It is asked before every change and at least every `max_backoff_s` (or `poll_s`) plus one call. `record` gets every event when it has happened. `sleep` waits on the same clock as `clock`.
    """

    provisioner: Provisioner
    engine: Engine
    clock: Clock
    sleep: Callable[[float], None]
    guard: Callable[[], float]
    record: Callable[[FleetEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPolicy:
    """Patience of a run.

    `settle_s` is the longest that a cloud takes to list what it has started. After `max_failed_starts` instances of a
    template whose engines never answered, a run gives this template up.
    """

    reconcile: ReconcilePolicy
    drain_timeout_s: float = 300.0
    settle_s: float = 60.0
    poll_s: float = 5.0
    max_backoff_s: float = 60.0
    deadline_s: float = 1800.0
    max_failed_starts: int = 3


class ApplyStatus(StrEnum):
    """How a run ended: the fleet is the plan; something cannot be had (solve again); time is up; the lease is lost."""

    CONVERGED = "converged"
    UNMET = "unmet"
    DEADLINE = "deadline"
    LEASE_LOST = "lease_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """A start that the cloud refused; `held` nodes of the offer were held at that moment (more could not be had)."""

    at: datetime
    region: str
    zone: str
    config: str
    market: Market
    refusal: Refusal
    code: str
    message: str
    held: int

    @property
    def offer(self) -> Offer:
        """What was refused."""
        return (self.region, self.config, self.market)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport:
    """What a run has done and left.

    `lowered` is the availability A_r(c) to solve again with: for each offer that keeps the plan from being met, the
    most nodes that could be held; where it is empty, solving again would give the same plan. `nodes` is the fleet at the
    end, gone ones left out.
    """

    status: ApplyStatus
    reason: str
    nodes: tuple[Node, ...]
    foreign: tuple[ForeignNode, ...]
    failures: tuple[StartFailure, ...]
    unmet: tuple[Unmet, ...]
    lowered: Mapping[Offer, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The fleet as listed (gone nodes included) and what it would take to make it the plan."""

    nodes: tuple[Node, ...]
    foreign: tuple[ForeignNode, ...]
    todo: Reconciliation
