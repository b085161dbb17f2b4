"""What a coordinator holds of a serving instance and its nodes, and what it wants done: plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coral_core.domain.fleet import NodeTags
from coral_core.domain.launch import LaunchPlan, NodePlace
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.serving.control.messages import CoordinatorMessage, Hello, NodeReport


class Stage(StrEnum):
    """Life of an instance.

    `gathering`: not all of its agents are there; `starting`: told what to run; `ready`: its engine has answered a real
    completion; `leaving`: told to end, requests run out; `ended` and `failed`: over for good.
    """

    GATHERING = "gathering"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    ENDED = "ended"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether nothing of it serves any more, ever."""
        return self in {Stage.ENDED, Stage.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTerms:
    """How patient a coordinator is. Raises InputError for a time that is not above 0 (the grace: below 0).

    `lost_s`: an agent that is not heard of for so long is lost. `unheard_grace_s`: for so long after that its node is
    kept while there is evidence that the engine works. `resend_s`: what was not seen to take effect is said again after
    so long. `forget_s`: how long instances that are over are remembered. `rows_s`: how old the gateway's word may be.
    `word_s`: for so long the node that serves may say that its engine goes on without a node that is in trouble.
    """

    lost_s: float = 10.0
    unheard_grace_s: float = 20.0
    resend_s: float = 2.0
    forget_s: float = 3600.0
    rows_s: float = 5.0
    word_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value >= 0 if name == "unheard_grace_s" else value > 0):
                raise InputError(f"is {value!r}, must be above 0", where=f"patience.{name}")


@dataclass(slots=True, kw_only=True)
class Seat:
    """A node of an instance as its agent, on `connection`, says it is. `gone`: the agent has said bye."""

    hello: Hello
    connection: bytes
    key_name: str
    heard_s: float
    report: NodeReport
    gone: bool = False
    told: dict[str, float] = field(default_factory=dict)

    def lost(self, now_s: float, terms: ControlTerms) -> bool:
        """Whether its agent has not been heard of for too long."""
        return self.gone or now_s - self.heard_s > terms.lost_s


@dataclass(slots=True, kw_only=True)
class Held:
    """A serving instance. `launch_id` is set once its nodes were told what to run, or said what they run.

    `weight` (None: not known) and `draining` are what the gateway was last seen to have, or agents were told that it has: they
    are put back where it has lost them.
    `weight_frac`: of an engine that goes on without `lost_nodes` (why, by node number), what is left of its throughput; the
    gateway routes by so much of `weight`, which stays the full one. `troubled_s`: since when a node has been in trouble.
    `forgettable`: the gateway shall forget it, and once it has this coordinator does.
    """

    instance_id: str
    template_id: str
    model: str
    phase: Phase
    nodes: int
    epoch: int
    region: str
    first_s: float
    since_s: float
    stage: Stage = Stage.GATHERING
    reason: str = ""
    seats: dict[int, Seat] = field(default_factory=dict)
    plan: LaunchPlan | None = None
    asked_s: float | None = None
    launch_id: str = ""
    url: str = ""
    weight: float | None = None
    draining: bool = False
    weight_frac: float = 1.0
    lost_nodes: dict[str, str] = field(default_factory=dict)
    troubled_s: dict[int, float] = field(default_factory=dict)
    rejected: str = ""
    forgettable: bool = False

    def fits(self, tags: NodeTags, region: str) -> bool:
        """Whether a node that says this of itself is one of its nodes."""
        mine = (self.template_id, self.model, self.phase, self.nodes, self.epoch, self.region)
        return mine == (tags.template_id, tags.model, tags.phase, tags.nodes, tags.epoch, region)

    def is_row(self, row: GatewayRow | None) -> bool:
        """Whether what the gateway has under this name is this instance, and not another one from elsewhere."""
        return (
            row is not None
            and (row.model, row.phase, row.region) == (self.model, self.phase, self.region)
            and self.address in {"", row.url}
        )

    @property
    def complete(self) -> bool:
        """Whether every node has an agent that has not said bye."""
        return len(self.seats) == self.nodes and not any(seat.gone for seat in self.seats.values())

    @property
    def working(self) -> dict[int, Seat]:
        """The seats but those of nodes that the engine goes on without."""
        return {number: seat for number, seat in self.seats.items() if str(number) not in self.lost_nodes}

    @property
    def places(self) -> tuple[NodePlace, ...]:
        """Where its nodes are, in the order of node numbers."""
        return tuple(
            NodePlace(
                node=str(number),
                config=seat.hello.tags.config,
                host=seat.hello.host,
                first_port=seat.hello.first_port,
                ports=seat.hello.ports,
                cpus=seat.hello.cpus,
            )
            for number, seat in sorted(self.seats.items())
        )

    @property
    def address(self) -> str:
        """Where it answers, or would: an instance that failed before its launch was known has an address too."""
        if self.url or not self.seats:
            return self.url
        first = self.seats[min(self.seats)].hello
        return f"http://{f'[{first.host}]' if ':' in first.host else first.host}:{first.first_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRow:
    """An instance as the gateway has it. `answers`: its engine answered the newest probe."""

    name: str
    model: str
    phase: Phase
    url: str
    region: str
    weight: float
    draining: bool
    answers: bool
    reported: bool | None
    failed: str
    in_flight: int
    weight_frac: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Say this to the agent on this connection."""

    connection: bytes
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlan:
    """Find out what the nodes of this instance shall run; the answer goes to `Instances.planned`."""

    instance_id: str
    template_id: str
    model: str
    phase: Phase
    places: tuple[NodePlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """Something that people and machines want to know of."""

    event: str
    instance_id: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCall:
    """A call of the gateway's admin side."""

    method: str
    path: str
    body: Mapping[str, object] | None = None


Effect = Tell | AskPlan | Happened
