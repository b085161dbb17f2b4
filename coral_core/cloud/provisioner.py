"""The port to a cloud: list, start and stop nodes. One call is one request; retrying is the executor's business."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from coral_core.domain.fleet import FleetId, ForeignNode, Node, NodeTags
from coral_core.domain.hardware import Market
from coral_core.errors import ProvisionError


class CloudBusyError(ProvisionError):
    """A passing trouble of a read or a stop: throttled, unavailable, or the answer was lost. The only retryable error."""

    kind: ClassVar[str] = "cloud_busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """One node to start. The request, its token included, is a function of this record alone.

    The nodes of a serving instance of several nodes share a placement group, made where it is missing.
    """

    region: str
    zone: str
    market: Market
    tags: NodeTags

    @property
    def grouped(self) -> bool:
        """Whether the node belongs into a placement group: pipelines want their stages near each other."""
        return self.tags.nodes > 1


class Refusal(StrEnum):
    """Why a node was not started, from the cloud's named code.

    `capacity`: none left in this zone; `not_offered`: never sold in this zone; `quota`: the account's limit in the region;
    `throttled`: too many requests, nothing happened; `unknown`: no answer, it may have happened (repeat the same order);
    `conflict`: the token was used by a different request (give this order up).
    """

    CAPACITY = "capacity"
    NOT_OFFERED = "not_offered"
    QUOTA = "quota"
    THROTTLED = "throttled"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"

    @property
    def passing(self) -> bool:
        """Whether repeating the same order is right."""
        return self in {Refusal.THROTTLED, Refusal.UNKNOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The order's node exists. After a repeated order it may be an older one, in any state."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The order was not fulfilled (`unknown`: perhaps); `code` is the cloud's own."""

    refusal: Refusal
    code: str
    message: str


StartOutcome = Started | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All of a fleet in one region.

    `nodes` are ours, those lately gone included; `foreign` ones carry the fleet's name; `groups` are the ids of the
    instances whose placement groups exist.
    """

    nodes: tuple[Node, ...]
    foreign: tuple[ForeignNode, ...] = ()
    groups: tuple[str, ...] = ()


class Provisioner(Protocol):
    """A cloud.

    Every method raises ProvisionError, with the fix, for what no repetition mends: wrong credentials, expired token,
    missing permission, unknown region, bad parameters.
    """

    @property
    def call_timeout_s(self) -> float:
        """No call takes longer; the executor starts none when less of its lease is left."""
        ...

    def account(self) -> str:
        """The account that the credentials belong to. Raises CloudBusyError."""
        ...

    def describe(self, fleet: FleetId, region: str) -> Listing:
        """All nodes that carry the fleet's name. May lag behind starts and stops. Raises CloudBusyError."""
        ...

    def start(self, fleet: FleetId, order: NodeOrder) -> StartOutcome:
        """Start one node; the same order again gives the same node."""
        ...

    def stop(self, fleet: FleetId, region: str, nodes: Iterable[Node]) -> None:
        """End nodes for good; one already gone is no error. Raises CloudBusyError (some may be ending)."""
        ...

    def release_group(self, fleet: FleetId, region: str, instance_id: str) -> bool:
        """Remove an instance's placement group; False while nodes hold it, True once absent. Raises CloudBusyError."""
        ...
