"""What reconciliation needs of the serving side; the coordinator implements it, `fake` has one for tests."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from coral_core.cloud.fleet_view import Instance, Signals


class Readiness(StrEnum):
    """Of an engine: whether it answers.

    `degraded`: it does, and goes on without some of its nodes; `starting`: it does not yet, and is watched over by who knows
    how long that may take; `unknown`: its side cannot be asked. Neither of the last two condemns an instance. `failed`: it is
    given up for good, as a whole.
    """

    READY = "ready"
    DEGRADED = "degraded"
    STARTING = "starting"
    NOT_READY = "not_ready"
    UNKNOWN = "unknown"
    FAILED = "failed"


class Engine(Protocol):
    """Serving instances as the gateway sees them. All calls are idempotent; ServingError where the gateway fails."""

    def ready(self, instance: Instance) -> Readiness:
        """Whether the instance answers requests. Never raises for an engine that does not answer."""
        ...

    def set_weight(self, instance: Instance, weight: float) -> None:
        """Route to it in proportion to `weight` (its throughput; 0: no new requests)."""
        ...

    def drain(self, instance: Instance) -> bool:
        """Take no new requests; True once none is in flight (or the instance is no longer known)."""
        ...


def asked(engine: Engine, instance: Instance) -> Readiness:
    """What the serving side says of an instance; one whose nodes cannot serve is not ready, and nobody is asked."""
    return engine.ready(instance) if instance.may_serve else Readiness.NOT_READY


def signals_of(engine: Engine, instance: Instance) -> Signals:
    """One look at an instance: what a run would know of it that has just begun."""
    seen, named = asked(engine, instance), frozenset({instance.instance_id})
    return Signals(
        ready=named if seen is Readiness.READY else frozenset(),
        degraded=named if seen is Readiness.DEGRADED else frozenset(),
        unready_s={instance.instance_id: 0.0} if seen is Readiness.NOT_READY else {},
        failed=named if seen is Readiness.FAILED else frozenset(),
    )
