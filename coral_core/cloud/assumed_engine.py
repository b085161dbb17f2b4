"""The serving side while none is connected: an instance whose nodes run counts as ready, and as drained at once."""

from __future__ import annotations

from typing import Final

from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.fleet_view import Instance

ASSUMED_NOTE: Final = (
    "no serving side is connected: an instance counts as ready when its nodes run, and nothing is drained"
)


class AssumedEngine:
    """Implements `Engine` by assumption; whoever uses it says so in the run's record (`ASSUMED_NOTE`)."""

    def ready(self, instance: Instance) -> Readiness:
        """Ready once all nodes run."""
        return Readiness.READY if instance.running else Readiness.NOT_READY

    def set_weight(self, instance: Instance, weight: float) -> None:
        """Nobody routes."""

    def drain(self, instance: Instance) -> bool:  # noqa: ARG002  # the port's signature
        """Nothing is in flight."""
        return True
