"""Whatever joins, dies, restarts and comes back: what has failed is not used, what is well is not failed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coral_core.serving.control.held import Stage
from coral_core.serving.control.messages import NodeState
from tests.fakes.control_world import LOAD_S, TERMS, World

SHAPE = {"one": 1, "two": 2, "three": 3, "wide": 3}
WIDE = ("wide",)
NODES = [(name, node) for name, nodes in SHAPE.items() for node in range(nodes)]
NOTICE_S = int(TERMS.lost_s + TERMS.unheard_grace_s)


class Control(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(SHAPE, wide=WIDE)
        self.blamed: set[str] = set()
        self.weights: dict[str, float] = {}

    @initialize(settled=st.booleans())
    def begin(self, settled):
        """Half of the stories begin with instances that serve, and are weighed as a reallocation does."""
        if settled:
            self.world.advance(LOAD_S + 4)
            for name, weight in zip(SHAPE, (1.0, 3.0, 7.0, 5.0), strict=True):
                self.a_reallocation_weighs(name, weight)

    def condemn(self, where):
        """A node is about to die, and with it its instance, unless the engine goes on without it."""
        name, node = where
        if name not in WIDE or node == 0 or self.world.agents[name, 0].weight_frac is None:
            self.blamed.add(name)

    # ---- what may happen

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds):
        self.world.advance(seconds)

    @rule(where=st.sampled_from(NODES))
    def an_engine_fails(self, where):
        agent = self.world.agents[where]
        if agent.engine is not None and agent.engine.alive:
            self.condemn(where)
            self.world.fault(*where)
            self.world.advance(2)

    @rule(where=st.sampled_from(NODES))
    def an_agent_is_killed(self, where):
        agent = self.world.agents[where]
        if agent.alive:
            if agent.engine is not None:
                self.condemn(where)
            else:  # nothing is broken yet, but silence for long enough is a reason to give its instance up
                self.blamed.add(where[0])
            self.world.kill_agent(*where)
            self.world.advance(2)

    @rule(where=st.sampled_from(NODES))
    def an_agent_comes_back(self, where):
        if not self.world.agents[where].alive:
            self.world.restart_agent(*where)

    @rule(where=st.sampled_from(NODES), seconds=st.integers(1, int(TERMS.lost_s) - 1))
    def an_agent_is_not_heard_for_a_while(self, where, seconds):
        """The connection breaks and comes back as another one: no reason to fail."""
        agent = self.world.agents[where]
        agent.connected = False
        self.world.advance(seconds)
        agent.connected = True
        if agent.welcome:
            self.world.connections += 1
            agent.connection = str(self.world.connections).encode()
        self.world.advance(2)

    @precondition(lambda self: self.world.coordinator is not None)
    @rule(seconds=st.integers(5, 60))
    def the_coordinator_is_held_up(self, seconds):
        """The process, its machine or its disk stands still: what it slept through is nobody's silence."""
        coordinator, self.world.coordinator = self.world.coordinator, None
        self.world.advance(seconds)
        self.world.coordinator = coordinator
        self.world.advance(2)

    @rule(where=st.sampled_from(NODES))
    def an_agent_is_told_to_end(self, where):
        agent = self.world.agents[where]
        if agent.alive:
            agent.leaving = True
            self.blamed.add(where[0])

    @precondition(lambda self: self.world.coordinator is not None)
    @rule()
    def the_coordinator_dies(self):
        self.world.coordinator = None

    @rule(remembers=st.booleans())
    def a_coordinator_starts(self, remembers):
        self.world.restart_coordinator(remembers=remembers)
        self.world.advance(2)
        if not remembers:  # only the gateway knows then, until agents and it have been heard
            self.weights = {}
            self.world.advance(3)
            held = self.world.coordinator.held
            self.weights = {name: row.weight for name, row in self.world.rows.items() if name in held}

    @rule(up=st.booleans())
    def the_gateway_restarts(self, up):
        self.world.restart_gateway()
        self.world.gateway_up = up
        if self.world.coordinator is None or not up:
            self.weights = {}  # nobody may be left who knows

    @precondition(lambda self: self.world.gateway_up and self.world.coordinator is not None)
    @rule(name=st.sampled_from(list(SHAPE)), weight=st.sampled_from([0.0, 1.0, 7.0]))
    def a_reallocation_weighs(self, name, weight):
        from dataclasses import replace

        if name in self.world.rows:
            self.world.rows[name] = replace(self.world.rows[name], weight=weight)
            self.world.advance(1)
            if name in self.world.coordinator.held:  # else nobody has seen it yet but the gateway
                self.weights[name] = weight
            else:
                self.weights.pop(name, None)

    # ---- what holds

    @invariant()
    def what_is_over_gets_no_requests(self):
        world = self.world
        if world.coordinator is None or not world.gateway_up:
            return
        for one in world.coordinator.held.values():
            if one.stage.over and one.since_s < world.now_s:
                assert not world.takes_requests(one.instance_id), one

    @invariant()
    def what_is_well_is_not_failed(self):
        if self.world.coordinator is not None:
            for name, one in self.world.coordinator.held.items():
                if name not in self.blamed:
                    assert not one.stage.over, (one.stage, one.reason)

    @invariant()
    def weights_outlive_restarts(self):
        world = self.world
        if world.coordinator is None or not world.gateway_up:
            return
        for name, weight in self.weights.items():
            row = world.rows.get(name)
            if row is not None and name not in self.blamed:
                assert row.weight == weight

    def teardown(self):
        """Once everybody is back, all that is broken is failed whole and ended, and all that is well is ready."""
        world = self.world
        world.gateway_up = True
        if world.coordinator is None:
            world.restart_coordinator(remembers=True)
        for where in NODES:
            if not world.agents[where].alive:
                world.restart_agent(*where)
        world.advance(NOTICE_S + 5 * LOAD_S + 5)
        for name, nodes in SHAPE.items():
            one = world.coordinator.held[name]
            engines = [world.agents[name, node].engine for node in range(nodes)]
            states = [engine.state(world.now_s) if engine else NodeState.IDLE for engine in engines]
            first = world.agents[name, 0]
            if first.weight_frac is not None and not one.stage.over:
                assert set(one.lost_nodes) == set(first.lost_nodes)
                assert not any(engines[int(node)] and engines[int(node)].alive for node in first.lost_nodes)
                assert one.stage is not Stage.READY or world.rows[name].weight_frac == first.weight_frac
                states = [state for node, state in enumerate(states) if str(node) not in first.lost_nodes]
            if one.stage.over:
                assert name in self.blamed
                assert not any(engine is not None and engine.alive for engine in engines), (one, states)
                assert not world.takes_requests(name)
            elif name not in self.blamed:
                assert one.stage is Stage.READY, (one, states)
                assert set(states) == {NodeState.READY}
                assert world.rows[name].reported is not False
            else:
                assert NodeState.FAILED not in states, (one, states)


Control.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
test_control_laws = Control.TestCase
