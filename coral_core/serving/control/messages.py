"""What agents and coordinator say to each other: typed messages in MessagePack, under a versioned protocol.

On the wire a message is two frames: `PROTOCOL`, then the message. Whoever speaks another version is answered with a
`Refused` of his own peer's version, whose fields never change, so that both ends can say why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from coral_core.domain.fleet import NodeTags
from coral_core.domain.launch import LaunchPlan, NodeLaunch

PROTOCOL: Final = b"coral-control/1"
MOST_BYTES: Final = 256 * 1024
"""A larger message is none."""
MOST_NODES: Final = 64
MOST_INSTANCES: Final = 10_000
_LINES: Final = 20

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Line = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class NodeState(StrEnum):
    """What a node's engine is in. `idle`: never started; `ended`: was told to end, and has."""

    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    ENDED = "ended"


class EngineSample(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's own metrics said last. `progress_age_s`: since a token was last seen to come; None: not known."""

    running_requests: Count | None = None
    waiting_requests: Count | None = None
    progress_age_s: float | None = None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its agent sees it.

    `launch_id`, `url`, `serves`: what it was told to run, which a coordinator that knows nothing of it takes over.
    `alive`: a process of its engine exists. `leaving`: the agent was told to end, and waits until requests have ended.
    `weight_frac`: of an engine that goes on without some nodes, the share of its throughput that is left (None: not one of
    these, or not known); `lost_nodes`: the nodes that it goes on without, and why. `draining` and `weight` are what the agent
    was last told that the gateway has (None: nothing): a coordinator that knows nothing takes them over.
    """

    state: NodeState = NodeState.IDLE
    doing: Text = ""
    reason: Text = ""
    log: Annotated[tuple[Line, ...], msgspec.Meta(max_length=_LINES)] = ()
    launch_id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    url: Annotated[str, msgspec.Meta(max_length=200)] = ""
    serves: bool = False
    alive: bool = False
    leaving: bool = False
    sample: EngineSample | None = None
    weight_frac: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    lost_nodes: Annotated[dict[Name, Line], msgspec.Meta(max_length=MOST_NODES)] = {}
    draining: bool = False
    weight: Weight | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent registers. `agent_epoch`: when it started (ns); of two agents of one node the younger counts."""

    node_id: Name
    tags: NodeTags
    region: Name
    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*$", max_length=128)]
    first_port: Port
    ports: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    cpus: tuple[Count, ...] = ()
    memory_bytes: Count | None = None
    agent_epoch: Count
    report: NodeReport


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """At least every 2 s, and at once when something changes."""

    report: NodeReport


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """The agent ends; its engine has ended."""

    reason: Text = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The agent is known now; `draining` as in `Drain`."""

    coordinator: Name
    draining: bool = False


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """A heartbeat has come: the coordinator is there."""


class WhoAreYou(msgspec.Struct, frozen=True, kw_only=True, tag="who"):
    """A heartbeat of an agent that this coordinator does not know: say hello."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The agent is not taken; it may try again later, since what stands against it may pass."""

    reason: Text
    fix: Text = ""


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """Run this, unless it runs already."""

    launch_id: Name
    url: Name
    launch: NodeLaunch


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the engine, all of its processes."""

    reason: Text


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """The gateway gives the instance no new requests (any more), or does so again, in proportion to `weight`."""

    draining: bool
    weight: Weight | None = None


AgentMessage = Hello | Heartbeat | Bye
CoordinatorMessage = Welcome | Acknowledged | WhoAreYou | Refused | Launch | Stop | Drain

_encode: Final = msgspec.msgpack.Encoder().encode
_from_agent: Final = msgspec.msgpack.Decoder(AgentMessage)
_from_coordinator: Final = msgspec.msgpack.Decoder(CoordinatorMessage)
_refused: Final = msgspec.msgpack.Decoder(Refused)


class GarbageError(ValueError):
    """Frames that are no message of this protocol."""


class OtherVersionError(ValueError):
    """Frames of another version of the protocol; `spoken` is its name."""

    def __init__(self, spoken: str) -> None:
        super().__init__(f"the peer speaks {spoken}, this one {PROTOCOL.decode()}")
        self.spoken = spoken


def framed(message: AgentMessage | CoordinatorMessage) -> list[bytes]:
    """The frames of a message."""
    return [PROTOCOL, _encode(message)]


def from_agent(frames: list[bytes]) -> AgentMessage:
    """What an agent says. Raises GarbageError, OtherVersionError."""
    _check_version(frames)
    try:
        return _from_agent.decode(frames[1])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise GarbageError(str(error)) from None


def from_coordinator(frames: list[bytes]) -> CoordinatorMessage:
    """What the coordinator says; a refusal is read in any version. Raises GarbageError, OtherVersionError."""
    try:
        _check_version(frames)
    except OtherVersionError:
        try:
            return _refused.decode(frames[1])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise OtherVersionError(frames[0].decode(errors="replace")) from None
    try:
        return _from_coordinator.decode(frames[1])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise GarbageError(str(error)) from None


def launch_id(plan: LaunchPlan) -> str:
    """What tells two launches apart: a hash of all that the nodes are told."""
    return hashlib.sha256(msgspec.json.encode(plan, order="sorted")).hexdigest()[:32]


def shortened(text: str, most: int = 2000) -> str:
    """At most so many characters, the end of a longer text left out."""
    return text if len(text) <= most else text[: most - 1] + "…"


def last_lines(lines: list[str]) -> tuple[str, ...]:
    """The last lines of a log as a report carries them."""
    return tuple(shortened(line, 500) for line in lines[-_LINES:])


def as_document(report: NodeReport) -> Mapping[str, object]:
    """A report for people and machines that read JSON."""
    return {name: value for name, value in msgspec.to_builtins(report).items() if value not in ("", (), None, {})}


def _check_version(frames: list[bytes]) -> None:
    if len(frames) != 2 or len(frames[1]) > MOST_BYTES:
        raise GarbageError(f"{len(frames)} frames")
    if frames[0] != PROTOCOL:
        if frames[0].startswith(b"coral-control/") and len(frames[0]) < 40:
            raise OtherVersionError(frames[0].decode(errors="replace"))
        raise GarbageError("no frame of this protocol")
