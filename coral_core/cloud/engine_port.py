"""What reconciliation needs of the serving side; the coordinator implements it, `fake` has one for tests."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from coral_core.cloud.fleet_view import Instance


class Readiness(StrEnum):
    """`unknown`: the engine's side cannot be asked; it condemns no instance. `failed`: it is given up for good, as a whole."""

    READY = "ready"
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
