"""An engine that goes on without some of its nodes: degraded, not failed; its full weight is never lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral_core.serving.control.gateway_calls import gateway_calls
from coral_core.serving.control.held import Stage
from coral_core.serving.control.messages import Stop
from coral_core.serving.control.state_file import restored
from tests.fakes.control_world import TERMS, Agent, World


def wide(nodes: int = 3, weight: float = 6.0) -> World:
    world = World({"w": nodes}, wide=("w",))
    world.advance(4 + 2 * nodes)
    assert world.coordinator.held["w"].stage is Stage.READY
    world.rows["w"] = replace(world.rows["w"], weight=weight)
    world.advance(1)
    return world


def left(world: World) -> tuple[Stage, float, float]:
    row = world.rows["w"]
    return world.coordinator.held["w"].stage, row.weight, row.weight_frac


def killed(world: World, node: int) -> None:
    world.kill_agent("w", node)


def faulty(world: World, node: int) -> None:
    world.fault("w", node, "its part has died")


def ticks(world: World) -> list:
    """What a few seconds lead to in which nobody says anything."""
    return [effect for second in range(1, 6) for effect in world.coordinator.tick(world.now_s + second)]


@pytest.mark.parametrize("dies", [killed, faulty])
def test_a_node_that_dies_takes_its_share_and_no_more(dies):
    world = wide()
    dies(world, 1)
    world.advance(2)
    assert left(world) == (Stage.READY, 6.0, pytest.approx(2 / 3))
    assert world.takes_requests("w")
    world.advance(60)  # whatever its agent does not say any more
    assert left(world) == (Stage.READY, 6.0, pytest.approx(2 / 3))
    dies(world, 2)
    world.advance(60)
    assert left(world) == (Stage.READY, 6.0, pytest.approx(1 / 3))
    assert [one.event for one in world.happened] == ["starting", "ready", "degraded", "degraded"]
    said = "degraded, 33% of its throughput is left: node 1: its connection ended; node 2: its connection ended"
    assert world.happened[-1].detail == world.coordinator.held["w"].reason == said


def test_a_whole_engine_that_could_go_on_is_told_of_to_nobody():
    world = wide()
    assert left(world) == (Stage.READY, 6.0, 1.0)
    assert [one.event for one in world.happened] == ["starting", "ready"]
    assert gateway_calls(world.coordinator.held.values(), world.rows) == []


@pytest.mark.parametrize("remembers", [True, False])
def test_the_full_weight_and_the_share_outlive_restarts(remembers):
    world = wide()
    killed(world, 1)
    world.advance(2)
    world.rows["w"] = replace(world.rows["w"], weight=9.0)  # a reallocation weighs it anew, as if it were whole
    world.advance(1)
    world.restart_gateway()
    world.advance(1)
    assert left(world) == (Stage.READY, 9.0, pytest.approx(2 / 3))
    world.restart_coordinator(remembers=remembers)
    world.advance(40)
    assert left(world) == (Stage.READY, 9.0, pytest.approx(2 / 3))
    world.restart_gateway()
    world.advance(1)
    assert left(world) == (Stage.READY, 9.0, pytest.approx(2 / 3))


def test_a_loss_that_costs_no_throughput_is_told_too():
    world = wide()
    first = world.agents["w", 0]
    first.engine.knows = False  # what it says is set here
    world.fault("w", 1, "its part has died")
    first.lost_nodes = {"1": "its connection ended"}
    world.advance(10)
    assert left(world) == (Stage.READY, 6.0, 1.0)
    assert world.happened[-1].detail == "degraded, 100% of its throughput is left: node 1: its connection ended"


def test_a_lost_node_whose_agent_is_dead_is_not_told_for_ever():
    world = wide()
    killed(world, 1)
    world.advance(1)
    assert any(isinstance(effect.message, Stop) for effect in ticks(world))
    world.advance(15)
    assert ticks(world) == []


def test_what_both_forget_at_once_the_agents_remember():
    world = wide()
    killed(world, 1)
    world.advance(3)
    world.restart_gateway()
    world.restart_coordinator(remembers=False)
    world.advance(3)
    assert left(world) == (Stage.READY, 6.0, pytest.approx(2 / 3))
    world.rows["w"] = replace(world.rows["w"], weight=0.0, draining=True)
    world.advance(3)
    world.restart_gateway()
    world.restart_coordinator(remembers=False)
    world.advance(3)
    assert left(world) == (Stage.READY, 0.0, pytest.approx(2 / 3))
    assert world.rows["w"].draining
    assert {agent.draining for agent in world.agents.values() if agent.alive} == {True}


def test_the_gateways_own_word_counts_more_than_what_agents_remember():
    world = wide()
    world.agents["w", 2].connected = False  # does not hear of the new weight
    world.rows["w"] = replace(world.rows["w"], weight=9.0)
    world.advance(3)
    world.agents["w", 2].connected = True
    world.restart_coordinator(remembers=False)
    world.advance(3)
    assert left(world) == (Stage.READY, 9.0, 1.0)
    assert {agent.weight for agent in world.agents.values()} == {9.0}


@pytest.mark.parametrize("remembers", [True, False])
def test_a_coordinator_that_starts_waits_for_the_engines_word(remembers):
    world = wide()
    world.coordinator, away = None, world.coordinator
    faulty(world, 1)
    world.advance(5)
    assert away.held["w"].lost_nodes == {}
    world.agents["w", 0].connected = False  # the others are heard first
    world.restart_coordinator(remembers=remembers)
    world.advance(3)
    world.agents["w", 0].connected = True
    world.advance(3)
    assert left(world) == (Stage.READY, 6.0, pytest.approx(2 / 3))
    silent = wide()
    faulty(silent, 1)
    silent.agents["w", 0].connected = False
    silent.coordinator = None
    silent.restart_coordinator(remembers=False)
    silent.advance(int(TERMS.word_s) + 3)
    assert silent.coordinator.held["w"].reason == "node 1: its part has died"


def test_what_the_engine_does_not_name_in_time_condemns_it():
    world = wide()
    world.agents["w", 0].engine.knows = False
    faulty(world, 1)
    world.advance(int(TERMS.word_s))
    assert left(world) == (Stage.READY, 6.0, 1.0)
    world.advance(3)
    assert world.coordinator.held["w"].reason == "node 1: its part has died"
    assert not world.takes_requests("w")
    silent = wide()
    silent.agents["w", 0].engine.knows = False
    silent.agents["w", 0].progress_age_s = None
    killed(silent, 2)
    silent.advance(int(TERMS.lost_s) + 2)
    assert left(silent)[0] is Stage.READY
    silent.advance(5)  # 15 s, give or take a look
    assert silent.coordinator.held["w"].stage is Stage.FAILED


@pytest.mark.parametrize("dies", [killed, faulty])
def test_with_the_node_that_serves_all_is_lost(dies):
    world = wide()
    killed(world, 1)
    world.advance(3)
    dies(world, 0)
    world.advance(int(TERMS.lost_s) + 2)
    assert world.coordinator.held["w"].stage is Stage.FAILED
    assert world.coordinator.held["w"].reason.startswith("node 0: ")
    back = wide()
    back.agents["w", 0].lost_nodes = {"0": "its own part has died"}
    back.agents["w", 0].weight_frac = 0.5
    back.advance(1)
    assert back.coordinator.held["w"].lost_nodes == {}  # its agent still attends to the engine
    killed(back, 0)
    back.restart_agent("w", 0)
    back.advance(2)
    assert back.coordinator.held["w"].stage is Stage.FAILED


def test_without_any_node_of_a_stage_it_fails_whole():
    world = wide()
    world.agents["w", 0].engine.knows = False
    world.agents["w", 0].weight_frac = 0.0
    world.agents["w", 0].lost_nodes = {"2": "silent for 10 s", "1": "its connection ended"}
    world.advance(2)
    said = "node 0: a stage has no node left: node 1: its connection ended; node 2: silent for 10 s"
    assert world.coordinator.held["w"].reason == world.rows["w"].failed == said
    assert not any(agent.engine.alive for agent in world.agents.values())


def test_before_it_serves_every_node_counts():
    world = World({"w": 2}, wide=("w",))
    world.advance(3)
    faulty(world, 1)
    world.advance(1)
    assert world.coordinator.held["w"].reason == "node 1: its part has died"


def test_what_is_left_on_a_lost_node_is_ended_and_nothing_started_there():
    world = wide()
    first, lost = world.agents["w", 0], world.agents["w", 1]
    first.lost_nodes = {"1": "silent for 10 s"}  # though it lives
    world.advance(2)
    assert lost.stopped
    assert not lost.engine.alive
    assert left(world)[0] is Stage.READY
    killed(world, 1)
    world.restart_agent("w", 1)
    world.restart_coordinator(remembers=False)
    world.advance(20)
    assert world.agents["w", 1].engine is None
    assert left(world) == (Stage.READY, 6.0, pytest.approx(2 / 3))
    world.agents["w", 1].leaving = True  # its machine is taken away: nobody else is drained
    world.advance(5)
    assert left(world)[0] is Stage.READY
    world.agents["w", 2].leaving = True
    world.advance(1)
    assert world.coordinator.held["w"].stage is Stage.LEAVING


def test_an_engine_of_another_kind_says_nothing_and_fails_whole():
    world = World({"w": 3})
    world.advance(10)
    faulty(world, 1)
    world.advance(1)
    assert world.coordinator.held["w"].stage is Stage.FAILED


def test_strange_names_are_nobody():
    world = wide()
    first: Agent = world.agents["w", 0]
    first.engine.knows = False
    first.weight_frac, first.lost_nodes = 0.5, {"9": "a", "n1": "b", "": "c"} | {"2": "gone"}
    del first.lost_nodes[""]
    world.advance(1)
    assert world.coordinator.held["w"].lost_nodes == {"2": "gone"}


def test_a_state_of_an_earlier_version_is_read():
    world = wide()
    killed(world, 1)
    world.advance(2)
    [one] = restored(world.written, 0.0)
    assert (one.weight, one.weight_frac, set(one.lost_nodes)) == (6.0, pytest.approx(2 / 3), {"1"})
    for row in world.written["instances"]:
        del row["weight_frac"], row["lost_nodes"]
    [one] = restored(world.written, 0.0)
    assert (one.weight_frac, one.lost_nodes) == (1.0, {})
