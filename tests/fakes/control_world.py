"""Agents, engines and a gateway in a few lines, around the real state machine, on a clock of whole seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import msgspec

from coral_core.domain.fleet import NodeTags
from coral_core.domain.launch import LaunchPlan, NodeLaunch, Runtime
from coral_core.domain.workload import Phase
from coral_core.serving.control.gateway_calls import gateway_calls
from coral_core.serving.control.held import (
    AskPlan,
    ControlTerms,
    Effect,
    GatewayCall,
    GatewayRow,
    Happened,
    Held,
    Tell,
)
from coral_core.serving.control.instances import Instances
from coral_core.serving.control.messages import (
    Drain,
    EngineSample,
    Hello,
    Launch,
    NodeReport,
    NodeState,
    Refused,
    Stop,
    Welcome,
    WhoAreYou,
    framed,
    from_agent,
    from_coordinator,
)
from coral_core.serving.control.state_file import restored, state_document

TERMS = ControlTerms(lost_s=10.0, unheard_grace_s=5.0, resend_s=2.0, forget_s=600.0)
LOAD_S = 3


def tags(instance: str = "i", *, node: int = 0, nodes: int = 1, **changes) -> NodeTags:
    facts = {"template_id": f"t-{instance}", "model": "tiny", "phase": Phase.AGGREGATED, "config": "c", "epoch": 1}
    return NodeTags(instance_id=instance, stage=node, node=node, nodes=nodes, **{**facts, **changes})


def hello(instance: str = "i", *, node: int = 0, nodes: int = 1, **changes) -> Hello:
    facts = {
        "node_id": f"{instance}/{node}",
        "tags": tags(instance, node=node, nodes=nodes),
        "region": "east",
        "host": "127.0.0.1",
        "first_port": 20000 + 100 * node,
        "ports": 10,
        "agent_epoch": 1,
        "report": NodeReport(),
    }
    return Hello(**{**facts, **changes})


def plan_of(question: AskPlan) -> LaunchPlan:
    """Every node runs `serve`; node 0 answers; the last node is started first."""
    nodes = tuple(
        NodeLaunch(node=place.node, argv=("serve",), env={}, ports=(place.first_port,), serves=place.node == "0")
        for place in reversed(question.places)
    )
    first = question.places[0]
    return LaunchPlan(
        instance_id=question.instance_id,
        model=question.model,
        phase=question.phase,
        runtime=Runtime.VLLM,
        url=f"http://{first.host}:{first.first_port}",
        nodes=nodes,
    )


@dataclass
class Engine:
    """An engine of one node. It loads for `LOAD_S`; `fault` is why it failed."""

    launch: Launch
    begun_s: float
    fault: str = ""
    ended: bool = False
    knows: bool = True  # of an engine that goes on without nodes: whether it notices that they are lost

    def state(self, now_s: float) -> NodeState:
        if self.fault:
            return NodeState.FAILED
        if self.ended:
            return NodeState.ENDED
        return NodeState.READY if now_s - self.begun_s >= LOAD_S else NodeState.STARTING

    @property
    def alive(self) -> bool:
        return not self.fault and not self.ended


@dataclass
class Agent:
    """A node: its agent may be dead, or not heard, while its engine is there."""

    instance: str
    node: int
    nodes: int
    epoch: int = 1
    alive: bool = True
    connected: bool = True
    welcome: bool = False
    leaving: bool = False
    stopped: bool = False
    draining: bool = False
    weight: float | None = None
    progress_age_s: float | None = 0.0
    connection: bytes = b""
    engine: Engine | None = None
    weight_frac: float | None = None
    lost_nodes: dict[str, str] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    def report(self, now_s: float) -> NodeReport:
        if self.engine is None:
            state = NodeState.ENDED if self.stopped else NodeState.IDLE
            return NodeReport(state=state, leaving=self.leaving, draining=self.draining, weight=self.weight)
        return NodeReport(
            state=self.engine.state(now_s),
            reason=self.engine.fault,
            launch_id=self.engine.launch.launch_id,
            url=self.engine.launch.url,
            serves=self.engine.launch.launch.serves,
            alive=self.engine.alive,
            leaving=self.leaving,
            sample=EngineSample(running_requests=1, waiting_requests=0, progress_age_s=self.progress_age_s),
            weight_frac=self.weight_frac,
            lost_nodes=self.lost_nodes,
            draining=self.draining,
            weight=self.weight,
        )


class World:
    """What there is in truth; `coordinator` is the one part under test, and may be away (None)."""

    def __init__(self, shape: dict[str, int], *, wide: Sequence[str] = ()) -> None:
        """`wide`: instances whose nodes are one stage of alike nodes, of which the first one runs the engine."""
        self.wide = wide
        self.now_s = 100.0
        self.agents = {(name, node): Agent(name, node, nodes) for name, nodes in shape.items() for node in range(nodes)}
        self.rows: dict[str, GatewayRow] = {}
        self.gateway_up = True
        self.coordinator: Instances | None = Instances(TERMS, name="c1")
        self.written: dict[str, object] | None = None
        self.starts = 1
        self.connections = 0
        self.happened: list[Happened] = []
        self.ever_ready: set[str] = set()

    # ---- time

    def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for name in self.wide:
                self._engine_looks_round(name)
            self._agents_speak()
            if self.coordinator is not None:
                self._carry_out(self.coordinator.tick(self.now_s))
                self._sync_gateway()
                self.written = msgspec.json.decode(msgspec.json.encode(self._document()))

    def _engine_looks_round(self, name: str) -> None:
        """Once ready the engine notes nodes whose part has died, for good: they do not come back."""
        first = self.agents[name, 0]
        if first.engine is None:
            first.weight_frac, first.lost_nodes = None, {}
            return
        if first.engine.state(self.now_s) is not NodeState.READY or not first.engine.knows:
            return
        for node in range(1, first.nodes):
            engine = self.agents[name, node].engine
            if engine is None or not engine.alive:
                first.lost_nodes = {**first.lost_nodes, str(node): "its connection ended"}
        first.weight_frac = float(Fraction(first.nodes - len(first.lost_nodes), first.nodes))

    def _agents_speak(self) -> None:
        for agent in self.agents.values():
            if not agent.alive or not agent.connected or self.coordinator is None:
                continue
            if agent.welcome:
                self._carry_out(self.coordinator.heartbeat(agent.connection, agent.report(self.now_s), self.now_s))
            else:
                self._say_hello(agent)

    def _say_hello(self, agent: Agent) -> None:
        if not agent.connection:
            self.connections += 1
            agent.connection = str(self.connections).encode()
        said = hello(
            agent.instance,
            node=agent.node,
            nodes=agent.nodes,
            agent_epoch=agent.epoch,
            report=agent.report(self.now_s),
        )
        assert from_agent(framed(said)) == said
        self._carry_out(self.coordinator.hello(agent.connection, "fleet", said, self.now_s))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell():
                    assert from_coordinator(framed(effect.message)) == effect.message
                    for agent in self.agents.values():
                        if agent.connection == effect.connection and agent.alive and agent.connected:
                            self._obey(agent, effect.message)
                case AskPlan():
                    self._carry_out(self.coordinator.planned(effect.instance_id, plan_of(effect), self.now_s))
                case Happened():
                    self.happened.append(effect)
                    if effect.event == "ready":
                        self.ever_ready.add(effect.instance_id)

    def _obey(self, agent: Agent, message: object) -> None:
        match message:
            case Welcome():
                agent.welcome, agent.draining = True, message.draining
            case WhoAreYou():
                agent.welcome = False
            case Refused():
                agent.welcome = False
                agent.refusals.append(message.reason)
            case Launch() if agent.engine is None and not agent.stopped and not agent.leaving:
                agent.engine = Engine(launch=message, begun_s=self.now_s)
            case Stop():
                agent.stopped = True
                if agent.engine is not None:
                    agent.engine.ended = True
            case Drain():
                agent.draining, agent.weight = message.draining, message.weight

    # ---- the gateway

    def _sync_gateway(self) -> None:
        if not self.gateway_up:
            return
        for name, row in self.rows.items():
            self.rows[name] = replace(row, answers=self._serves(name))
        self._carry_out(self.coordinator.gateway_says(list(self.rows.values()), self.now_s))
        for call in gateway_calls(self.coordinator.held.values(), dict(self.rows)):
            self._gateway_does(call)

    def _serves(self, name: str) -> bool:
        if (name, 0) not in self.agents:
            return True
        engine = self.agents[name, 0].engine
        return engine is not None and engine.alive and engine.state(self.now_s) is NodeState.READY

    def _gateway_does(self, call: GatewayCall) -> None:
        name, *what = call.path.removeprefix("/instances/").split("/")
        match call.method, what:
            case "PUT", []:
                facts = {"draining": False, "answers": False, "reported": None, "failed": "", "in_flight": 0}
                self.rows[name] = GatewayRow(name=name, **{**facts, **call.body, "phase": Phase(call.body["phase"])})
            case "PUT", ["readiness"]:
                said = {"failed": "", "weight_frac": 1.0, **call.body}
                self.rows[name] = replace(
                    self.rows[name], reported=said["ready"], failed=said["failed"], weight_frac=said["weight_frac"]
                )
            case "POST", ["drain"]:
                self.rows[name] = replace(self.rows[name], draining=True)
            case "DELETE", []:
                self.rows.pop(name, None)

    def takes_requests(self, name: str) -> bool:
        row = self.rows.get(name)
        return row is not None and row.weight > 0 and not row.draining and not row.failed and row.reported is not False

    # ---- what happens to it

    def fault(self, name: str, node: int, why: str = "its rank died") -> None:
        engine = self.agents[name, node].engine
        assert engine is not None
        engine.fault = why

    def kill_agent(self, name: str, node: int) -> None:
        """As kill -9: nobody ends the engine, which its keeper then does."""
        agent = self.agents[name, node]
        agent.alive = agent.welcome = False
        agent.connection = b""
        if agent.engine is not None:
            agent.engine.ended = True

    def restart_agent(self, name: str, node: int) -> None:
        old = self.agents[name, node]
        self.agents[name, node] = Agent(name, node, old.nodes, epoch=old.epoch + 1)

    def restart_coordinator(self, *, remembers: bool) -> None:
        self.starts += 1
        held: list[Held] = restored(self.written, self.now_s) if remembers and self.written is not None else []
        self.coordinator = Instances(TERMS, name=f"c{self.starts}", held=held)
        for agent in self.agents.values():
            agent.connection = b""
            if agent.connected and agent.alive and agent.welcome:  # its next heartbeat comes from nobody known
                self.connections += 1
                agent.connection = str(self.connections).encode()

    def restart_gateway(self) -> None:
        self.rows.clear()

    def _document(self) -> dict[str, object]:
        from datetime import UTC, datetime

        return state_document(
            self.coordinator.held.values(),
            name="c",
            endpoint="tcp://h:1",
            now=datetime(2026, 11, 29, tzinfo=UTC),
            now_s=self.now_s,
            counts={},
        )
