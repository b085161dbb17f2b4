"""The coordinator's decisions, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral_core.errors import InputError, ServingError
from coral_core.serving.control.gateway_calls import gateway_calls, rows_of
from coral_core.serving.control.held import ControlTerms, GatewayCall, Stage, Tell
from coral_core.serving.control.instances import Instances
from coral_core.serving.control.messages import (
    MOST_INSTANCES,
    Launch,
    NodeReport,
    NodeState,
    Refused,
    Stop,
    Welcome,
    WhoAreYou,
)
from coral_core.serving.control.state_file import read_state, restored, write_state
from tests.fakes.control_world import TERMS, World, hello, plan_of, tags


def told(effects, kind) -> list:
    return [effect.message for effect in effects if isinstance(effect, Tell) and isinstance(effect.message, kind)]


def up(**shape: int) -> World:
    world = World(shape)
    world.advance(7)
    assert all(one.stage is Stage.READY for one in world.coordinator.held.values())
    return world


def stage(world: World, name: str = "i") -> Stage:
    return world.coordinator.held[name].stage


def test_nodes_start_in_the_plans_order_each_after_the_one_before():
    instances = Instances(TERMS, name="c")
    assert told(instances.hello(b"0", "k", hello(node=0, nodes=2), 0.0), Launch) == []
    [question] = [e for e in instances.hello(b"1", "k", hello(node=1, nodes=2), 0.0) if not isinstance(e, Tell)]
    assert [(place.node, place.first_port) for place in question.places] == [("0", 20000), ("1", 20100)]
    started = instances.planned("i", plan_of(question), 1.0)
    assert [(e.connection, e.message.launch.node) for e in started if isinstance(e, Tell)] == [(b"1", "1")]
    assert told(instances.tick(2.0), Launch) == []  # said a moment ago
    assert [one.launch.node for one in told(instances.tick(3.5), Launch)] == ["1"]  # and again, as it has no effect
    launched = told(started, Launch)[0]
    report = NodeReport(state=NodeState.STARTING, launch_id=launched.launch_id, url=launched.url, alive=True)
    assert [one.launch.node for one in told(instances.heartbeat(b"1", report, 3.6), Launch)] == ["0"]
    assert instances.held["i"].stage is Stage.STARTING


def test_an_instance_is_ready_when_the_node_that_serves_is_and_the_gateway_knows_that_it_starts_before():
    world = World({"i": 2})
    world.advance(3)
    assert stage(world) is Stage.STARTING
    assert (world.rows["i"].reported, world.rows["i"].failed) == (False, "")
    world.advance(4)
    assert stage(world) is Stage.READY
    assert (world.rows["i"].weight, world.rows["i"].region, world.rows["i"].reported) == (0.0, "east", True)
    assert [one.event for one in world.happened] == ["starting", "ready"]


def test_what_serves_is_not_taken_out_by_a_coordinator_that_remembers_its_start():
    world = up(i=1)
    held = replace(world.coordinator.held["i"], stage=Stage.STARTING)
    assert gateway_calls([held], world.rows) == []
    assert [call.body for call in gateway_calls([held], {}) if call.path.endswith("readiness")] == [{"ready": False}]


def test_a_lost_node_that_serves_is_kept_while_the_gateways_probe_is_answered():
    world = up(i=1)
    world.agents["i", 0].connected = False
    world.advance(int(TERMS.lost_s + TERMS.unheard_grace_s))
    assert stage(world) is Stage.READY
    world.advance(2)
    assert stage(world) is Stage.FAILED
    assert "has not been heard of for 16 s" in world.rows["i"].failed
    dead = up(i=1)
    dead.agents["i", 0].connected = False
    dead.agents["i", 0].engine.ended = True  # the machine is gone
    dead.advance(11)
    assert stage(dead) is Stage.FAILED


def test_one_that_starts_is_given_the_grace_whatever_the_gateway_says_of_it():
    world = World({"i": 1})
    world.advance(1)
    assert stage(world) is Stage.STARTING
    world.agents["i", 0].connected = False
    world.advance(int(TERMS.lost_s + TERMS.unheard_grace_s) - 1)
    assert stage(world) is Stage.STARTING
    world.advance(3)
    assert stage(world) is Stage.FAILED


def test_a_lost_rank_is_kept_while_tokens_come():
    world = up(i=2)
    world.agents["i", 1].connected = False
    world.advance(12)
    assert stage(world) is Stage.READY
    world.advance(5)
    assert stage(world) is Stage.FAILED
    for age_s in (None, 50.0):
        still = up(i=2)
        still.agents["i", 1].connected = False
        still.agents["i", 0].progress_age_s = age_s
        still.advance(11)
        assert stage(still) is Stage.FAILED
        assert still.coordinator.held["i"].reason.startswith("node 1: its agent")


def test_what_the_nodes_run_is_taken_over_and_a_start_is_gone_on_with():
    world = World({"i": 2})
    world.advance(1)
    world.kill_agent("i", 0)  # before it was told anything: node 1 runs, node 0 comes anew
    assert world.agents["i", 1].engine is not None
    world.restart_agent("i", 0)
    world.restart_coordinator(remembers=False)
    world.advance(8)
    assert stage(world) is Stage.READY
    world.restart_coordinator(remembers=False)
    world.advance(2)
    assert stage(world) is Stage.READY
    assert world.coordinator.held["i"].plan is None  # what runs needs none


def test_nodes_that_run_different_things_are_no_instance():
    instances = Instances(TERMS, name="c")
    running = NodeReport(state=NodeState.READY, launch_id="a", url="http://h:1", serves=True, alive=True)
    instances.hello(b"0", "k", hello(node=0, nodes=2, report=running), 0.0)
    other = NodeReport(state=NodeState.READY, launch_id="b", alive=True)
    effects = instances.hello(b"1", "k", hello(node=1, nodes=2, report=other), 0.0)
    assert [e.connection for e in effects if isinstance(e, Tell) and isinstance(e.message, Stop)] == [b"0", b"1"]
    assert "something else" in instances.held["i"].reason
    again = Instances(TERMS, name="c")
    again.hello(b"0", "k", hello(node=0, nodes=2, report=running), 0.0)
    [question] = [e for e in again.hello(b"1", "k", hello(node=1, nodes=2), 0.0) if not isinstance(e, Tell)]
    again.planned("i", plan_of(question), 0.0)
    assert again.held["i"].reason == "its nodes run something else than they should now"


def test_who_may_speak_for_a_node():
    instances = Instances(TERMS, name="c")
    assert told(instances.hello(b"0", "k", hello(agent_epoch=5), 0.0), Welcome)
    double = instances.hello(b"x", "k", hello(node_id="double"), 1.0)
    assert "i/0, whose agent is alive" in told(double, Refused)[0].reason
    assert "younger" in told(instances.hello(b"x", "k", hello(agent_epoch=4), 1.0), Refused)[0].reason
    younger = instances.hello(b"y", "k", hello(agent_epoch=6), 1.0)
    assert [e.connection for e in younger if isinstance(e, Tell) and isinstance(e.message, Refused)] == [b"0"]
    assert told(instances.heartbeat(b"0", NodeReport(), 1.0), WhoAreYou)
    instances.bye(b"y", 2.0)
    assert instances.bye(b"y", 2.0) == []
    assert told(instances.hello(b"x", "k", hello(node_id="double"), 3.0), Welcome)  # the seat is free
    for wrong in (tags(node=2, nodes=2), tags(node=0, nodes=65), tags(node=-1, nodes=1)):
        assert told(instances.hello(b"w", "k", hello(tags=wrong), 3.0), Refused)
    for other in ({"template_id": "u"}, {"model": "large"}, {"epoch": 2}):
        assert told(instances.hello(b"w", "k", hello(tags=tags(nodes=1, **other)), 3.0), Refused)
    assert told(instances.hello(b"w", "k", hello(region="west"), 3.0), Refused)


def test_no_more_instances_than_can_be_held():
    instances = Instances(TERMS, name="c")
    instances.held = dict.fromkeys(map(str, range(MOST_INSTANCES)), up(i=1).coordinator.held["i"])
    refused = instances.hello(b"0", "k", hello(), 0.0)
    assert "known already" in told(refused, Refused)[0].reason


def test_a_withdrawn_key_is_told_so_and_its_node_lost_in_time():
    world = up(i=1)
    agent = world.agents["i", 0]
    assert "not let in" in told(world.coordinator.key_withdrawn(agent.connection), Refused)[0].reason
    agent.connected = False
    world.advance(17)
    assert stage(world) is Stage.FAILED


def test_what_cannot_be_launched_fails_and_says_why():
    world = World({"i": 1})
    world.coordinator.hello(b"0", "k", hello(), world.now_s)
    world.coordinator.planned("i", "no such template", world.now_s)
    held = world.coordinator.held["i"]
    assert (held.stage, held.reason) == (Stage.FAILED, "cannot be launched: no such template")
    calls = gateway_calls([held], {})
    assert [call.method for call in calls] == ["PUT", "PUT"]
    assert calls[0].body["url"] == "http://127.0.0.1:20000"
    assert calls[1].body == {"ready": False, "failed": "cannot be launched: no such template"}
    assert world.coordinator.planned("i", "again", world.now_s) == []
    assert world.coordinator.planned("unknown", "again", world.now_s) == []
    other = Instances(TERMS, name="c")
    [question] = [e for e in other.hello(b"0", "k", hello(), 0.0) if not isinstance(e, Tell)]
    other.planned("i", replace(plan_of(question), nodes=()), 0.0)
    assert "other nodes" in other.held["i"].reason


def test_an_agent_that_leaves_lets_requests_run_out():
    world = up(i=2)
    world.rows["i"] = replace(world.rows["i"], weight=2.0, in_flight=3)
    world.agents["i", 0].leaving = True
    world.advance(3)
    assert stage(world) is Stage.LEAVING
    assert world.rows["i"].draining
    assert world.agents["i", 1].draining
    assert world.agents["i", 0].engine.alive
    world.rows["i"] = replace(world.rows["i"], in_flight=0)
    world.advance(3)
    assert stage(world) is Stage.ENDED
    assert not any(agent.engine.alive for agent in world.agents.values())
    assert world.rows["i"].failed == "its agent was told to end"
    early = World({"i": 2})
    early.agents["i", 0].leaving = True
    early.advance(2)
    assert stage(early) is Stage.ENDED


def test_an_agent_that_leaves_while_nobody_drains_ends_its_instance():
    world = up(i=2)
    world.gateway_up = False
    world.agents["i", 0].leaving = True
    world.advance(3)
    assert stage(world) is Stage.LEAVING
    world.agents["i", 0].engine.ended = True  # out of patience
    world.advance(1)
    assert stage(world) is Stage.ENDED
    world.advance(2)
    assert not world.agents["i", 1].engine.alive


def test_one_that_the_gateway_does_not_have_need_not_be_drained():
    world = up(i=1)
    world._gateway_does = lambda call: None  # it serves no such model
    world.rows.clear()
    world.agents["i", 0].leaving = True
    world.advance(2)
    assert stage(world) is Stage.ENDED


@pytest.mark.parametrize("how", ["restarts", "says bye"])
def test_an_agent_that_comes_back_without_its_engine_fails_its_instance(how):
    world = up(i=1)
    if how == "restarts":
        world.kill_agent("i", 0)
        world.restart_agent("i", 0)
    else:
        world.agents["i", 0].alive = False
        world.coordinator.bye(world.agents["i", 0].connection, world.now_s)
    world.advance(2)
    assert stage(world) is Stage.FAILED


def test_draining_is_put_back_where_the_gateway_has_lost_it():
    world = up(i=1)
    world.rows["i"] = replace(world.rows["i"], weight=4.0, draining=True)
    world.advance(1)
    assert world.agents["i", 0].draining
    world.restart_gateway()
    world.advance(1)
    assert (world.rows["i"].weight, world.rows["i"].draining) == (4.0, True)
    world.rows["i"] = replace(world.rows["i"], draining=False)  # kept after all
    world.advance(1)
    assert not world.agents["i", 0].draining
    assert not world.rows["i"].draining


def test_an_instance_that_is_wrongly_down_is_put_right_and_strangers_are_left_alone():
    world = up(i=1)
    stranger = replace(world.rows["i"], name="stranger", weight=9.0)
    world.rows |= {"stranger": stranger, "i": replace(world.rows["i"], reported=False, failed="once")}
    world.advance(1)
    assert (world.rows["i"].reported, world.rows["i"].failed) == (True, "")
    assert world.rows["stranger"] == stranger
    held = world.coordinator.held["i"]
    moved = replace(world.rows["i"], url="http://elsewhere:1", weight=7.0)
    [call] = gateway_calls([held], {"i": moved})
    assert (call.method, call.body["url"], call.body["weight"]) == ("PUT", held.url, 0.0)


def test_what_was_given_up_stays_so_though_its_coordinator_has_forgotten_all():
    world = up(i=1)
    world.fault("i", 0, "its rank is dead")
    world.advance(2)
    world.kill_agent("i", 0)
    world.restart_agent("i", 0)
    world.restart_coordinator(remembers=False)
    world.advance(3)
    assert (stage(world), world.coordinator.held["i"].reason) == (Stage.FAILED, "node 0: its rank is dead")
    assert world.agents["i", 0].engine is None or not world.agents["i", 0].engine.alive
    assert not world.takes_requests("i")


def test_what_is_over_is_forgotten_once_nobody_speaks_for_it():
    world = up(i=1)
    world.fault("i", 0)
    world.advance(int(TERMS.forget_s) + 20)
    assert stage(world) is Stage.FAILED  # its agent is there
    world.kill_agent("i", 0)
    world.advance(15)
    assert world.coordinator.held == {}
    assert "i" not in world.rows


@pytest.mark.parametrize("how", ["the gateway is away", "a call is lost", "another coordinator"])
def test_what_is_forgotten_while_the_gateway_does_not_hear_is_deleted_later(how):
    world = up(i=1)
    stranger = replace(world.rows["i"], name="stranger")
    world.rows["stranger"] = stranger
    world.fault("i", 0)
    world.advance(2)
    world.kill_agent("i", 0)
    does = world._gateway_does
    if how == "a call is lost":
        world._gateway_does = lambda call: None
    else:
        world.gateway_up = False
    world.advance(int(TERMS.forget_s) + 20)
    if how == "another coordinator":
        world.restart_coordinator(remembers=True)
    assert world.rows["i"].failed
    world._gateway_does, world.gateway_up = does, True
    world.advance(int(TERMS.forget_s) + 20 if how == "another coordinator" else 2)
    assert (world.coordinator.held, world.rows) == ({}, {"stranger": replace(stranger, answers=True)})


def test_what_the_gateway_has_from_elsewhere_under_the_same_name_is_not_deleted():
    world = up(i=1)
    world.fault("i", 0)
    world.advance(2)
    world.kill_agent("i", 0)
    world.gateway_up = False
    world.advance(int(TERMS.forget_s) + 20)
    world.rows["i"] = replace(world.rows["i"], url="http://elsewhere:1")
    world.gateway_up = True
    world.advance(2)
    assert (world.coordinator.held, world.rows["i"].url) == ({}, "http://elsewhere:1")


def test_without_a_gateway_what_is_over_is_forgotten_too():
    instances = Instances(TERMS, name="c", gateway=False)
    instances.hello(b"0", "k", hello(), 0.0)
    instances.planned("i", "no such template", 0.0)
    for second in range(int(TERMS.forget_s) + 2):
        instances.tick(float(second))
    assert instances.held == {}


def test_what_was_written_down_is_read_again(tmp_path):
    world = up(i=1)
    world.rows["i"] = replace(world.rows["i"], weight=4.0)
    world.advance(1)
    write_state(tmp_path, world.written)
    [one] = restored(read_state(tmp_path), 5.0)
    assert (one.instance_id, one.stage, one.weight, one.seats) == ("i", Stage.READY, 4.0, {})
    assert one.address == one.url
    with pytest.raises(ServingError, match="damaged"):
        restored({"instances": [{"stage": "ready"}]}, 0.0)
    (tmp_path / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(ServingError, match="cannot be read"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"format": 99}', encoding="utf-8")
    with pytest.raises(ServingError, match="no state of this version"):
        read_state(tmp_path)
    with pytest.raises(ServingError, match="no coordinator has run here"):
        read_state(tmp_path / "none")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ServingError, match="cannot write down"):
        write_state(tmp_path / "file", {})


def test_one_that_failed_before_its_nodes_were_known_again_is_not_made_up():
    world = up(i=1)
    world.fault("i", 0)
    world.advance(2)
    for row in world.written["instances"]:
        row["url"] = ""
    [one] = restored(world.written, 0.0)
    assert gateway_calls([one], {}) == []


def test_the_gateways_list_is_read_or_refused():
    world = up(i=1)
    row = {name: getattr(world.rows["i"], name) for name in world.rows["i"].__slots__} | {"silent_probes": 1}
    [read] = rows_of({"instances": [row]})
    assert read == replace(world.rows["i"], answers=False)
    for wrong in (None, {}, {"instances": [{}]}, {"instances": [{**row, "phase": "x"}]}):
        with pytest.raises(ServingError, match="cannot be read"):
            rows_of(wrong)


def test_patience_must_be_some():
    for name in ("lost_s", "resend_s", "forget_s", "rows_s"):
        with pytest.raises(InputError, match=f"patience.{name}"):
            ControlTerms(**{name: 0.0})
    assert ControlTerms(unheard_grace_s=0.0).unheard_grace_s == 0.0
    with pytest.raises(InputError):
        ControlTerms(unheard_grace_s=-1.0)
    assert GatewayCall(method="DELETE", path="/instances/i").body is None
