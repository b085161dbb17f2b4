"""The pure reconciliation: which steps, in which order, and what each waits for."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from coral_core.cloud.fleet_view import Condition, Exhausted, Signals, gather, judge
from coral_core.cloud.reconcile import reconcile
from coral_core.cloud.steps import Action, Due, Reconciliation, step_lines
from coral_core.cloud.tags import instance_id
from coral_core.domain.fleet import InstanceSpec, Node, NodeSlot, NodeState, NodeTags
from coral_core.domain.hardware import Market
from tests.fakes.fleet_cases import FLEET, ONE, POLICY, START, THREE, TWO, limits, plan, wanted

NOW = START + timedelta(hours=1)


def nodes_of(spec: InstanceSpec, name: str, *, age_s: float = 2000.0, zone: str = "east-a", **changes) -> list[Node]:
    return [
        Node(
            **{
                "node_id": f"{name}/{number}",
                "region": "east",
                "zone": zone,
                "market": Market.ON_DEMAND,
                "state": NodeState.RUNNING,
                "launched_at": NOW - timedelta(seconds=age_s),
                "tags": NodeTags(
                    instance_id=name,
                    template_id=spec.template_id,
                    model=spec.model,
                    phase=spec.phase,
                    config=slot.config,
                    stage=slot.stage,
                    node=number,
                    nodes=len(spec.slots),
                    epoch=1,
                ),
                **changes,
            }
        )
        for number, slot in enumerate(spec.slots)
    ]


def run(goal, nodes, **changes) -> Reconciliation:
    given = {"limits": limits(), "policy": POLICY, "now": NOW, "signals": Signals(), **changes}
    return reconcile(goal, nodes, **given)


def lines(result: Reconciliation) -> list[tuple[str, str, Due]]:
    return [(step.action.value, step.instance_id, step.due) for step in result.steps]


def test_the_steps_of_a_replacement_are_in_order_and_say_what_they_wait_for():
    old = nodes_of(ONE, "old")
    goal = plan(wanted(TWO, 1))
    first = run(goal, old, signals=Signals(ready=frozenset({"old"})))
    name = instance_id(
        FLEET, plan_id="plan-1", template_id="d-two", region="east", zone="east-a", market=Market.ON_DEMAND, ordinal=0
    )
    assert lines(first) == [
        ("start", name, Due.NOW),
        ("weight", "old", Due.REPLACEMENT),
        ("drain", "old", Due.REPLACEMENT),
        ("stop", "old", Due.DRAINED),
    ]
    new = nodes_of(TWO, name, age_s=10.0)
    assert lines(run(goal, [*old, *new], signals=Signals(ready=frozenset({"old"}))))[0] == ("wait", name, Due.ENGINE)
    up = Signals(ready=frozenset({"old", name}))
    assert lines(run(goal, [*old, *new], signals=up)) == [
        ("weight", name, Due.NOW),
        ("weight", "old", Due.NOW),
        ("drain", "old", Due.NOW),
        ("stop", "old", Due.DRAINED),
    ]
    drained = replace(up, weight={name: 350.0, "old": 0.0}, drained=frozenset({"old"}), draining=frozenset({"old"}))
    assert lines(run(goal, [*old, *new], signals=drained)) == [("stop", "old", Due.NOW)]
    done = run(goal, new, signals=drained)
    assert done.converged
    assert not done.stuck
    assert done.steps == ()


def test_a_start_names_every_node_its_stage_and_one_zone():
    (step,) = run(plan(wanted(THREE, 1), epoch=7), []).steps
    assert [(o.tags.node, o.tags.stage, o.tags.config, o.zone) for o in step.orders] == [
        (0, 0, "b", "east-a"),
        (1, 0, "b", "east-a"),
        (2, 1, "c", "east-a"),
    ]
    assert {(o.tags.nodes, o.tags.epoch, o.grouped, o.market) for o in step.orders} == {(3, 7, True, Market.ON_DEMAND)}


def test_the_order_of_nodes_and_of_wishes_does_not_matter():
    nodes = [*nodes_of(ONE, "a1"), *nodes_of(TWO, "b1"), *nodes_of(THREE, "c1", age_s=5.0)]
    goal = plan(wanted(ONE, 2), wanted(THREE, 1), wanted(TWO, 0))
    signals = Signals(ready=frozenset({"a1", "b1"}))
    forth, back = run(goal, nodes, signals=signals), run(goal, nodes[::-1], signals=signals)
    assert forth == back
    turned = run(replace(goal, wanted=goal.wanted[::-1]), nodes, signals=signals)
    assert sorted(lines(turned)) == sorted(lines(forth))


def test_a_begun_instance_is_completed_in_its_zone():
    begun = nodes_of(THREE, "begun", age_s=20.0, zone="east-b")[:1]
    (step,) = run(plan(wanted(THREE, 1)), begun).steps
    assert (step.action, step.instance_id, step.due) == (Action.START, "begun", Due.NOW)
    assert [(o.tags.node, o.zone) for o in step.orders] == [(1, "east-b"), (2, "east-b")]


@pytest.mark.parametrize(
    ("signals", "goal", "age_s", "reason"),
    [
        (Signals(), plan(), 20.0, "no longer wanted"),
        (Signals(), plan(wanted(THREE, 1)), 2000.0, "never came"),
        (Signals(burnt=frozenset({"begun"})), plan(wanted(THREE, 1)), 20.0, "token"),
        (
            Signals(
                exhausted=frozenset({Exhausted(region="east", zone="east-a", config="c", market=Market.ON_DEMAND)})
            ),
            plan(wanted(THREE, 1)),
            20.0,
            "cannot give",
        ),
        (
            Signals(),
            plan(wanted(replace(THREE, slots=(NodeSlot(stage=0, config="c"), *THREE.slots[1:])), 1)),
            20.0,
            "laid out otherwise",
        ),
    ],
)
def test_what_cannot_be_completed_is_stopped_whole(signals, goal, age_s, reason):
    begun = nodes_of(THREE, "begun", age_s=age_s)[:2]
    weight, stop, *rest = run(goal, begun, signals=signals).steps
    assert (weight.action, weight.weight, stop.action) == (Action.WEIGHT, 0.0, Action.STOP)
    assert reason in stop.reason
    assert stop.nodes == tuple(begun)
    assert all(step.due is Due.TURN for step in rest), "its replacement waits for the stop"


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({}, Condition.UP),
        ({"state": NodeState.PENDING}, Condition.STARTING),
        ({"state": NodeState.GONE}, Condition.DEGRADED),
        ({"state": NodeState.ENDING}, Condition.DEGRADED),
        ({"state": NodeState.HALTED}, Condition.DEGRADED),
        ({"interrupted": True}, Condition.LEAVING),
        ({"zone": "east-b"}, Condition.FAILED),
        ({"market": Market.SPOT}, Condition.FAILED),
    ],
)
def test_an_instance_is_as_good_as_its_worst_node(change, condition):
    nodes = nodes_of(THREE, "x")
    nodes[1] = replace(nodes[1], **change)
    (instance,) = gather(nodes)
    found, reason = judge(
        instance,
        Signals(ready=frozenset({"x"})),
        now=NOW,
        start_timeout_s=900.0,
        unready_grace_s=60.0,
        lost_grace_s=15.0,
    )
    assert found is condition
    assert bool(reason) == (condition is not Condition.UP)


@pytest.mark.parametrize(
    ("age_s", "unready_s", "condition"),
    [
        (100.0, 1e6, Condition.STARTING),
        (2000.0, 30.0, Condition.STARTING),
        (2000.0, 60.0, Condition.FAILED),
        (2000.0, None, Condition.STARTING),
    ],
)
def test_a_silent_engine_fails_an_instance_only_when_old_and_long_silent(age_s, unready_s, condition):
    (instance,) = gather(nodes_of(ONE, "x", age_s=age_s))
    signals = Signals(unready_s={} if unready_s is None else {"x": unready_s})
    found, _ = judge(instance, signals, now=NOW, start_timeout_s=900.0, unready_grace_s=60.0, lost_grace_s=15.0)
    assert found is condition


def test_two_nodes_of_one_number_are_a_contradiction():
    nodes = nodes_of(ONE, "x")
    twin = replace(nodes[0], node_id="twin")
    result = run(plan(wanted(ONE, 1)), [*nodes, twin], signals=Signals(ready=frozenset({"x"})))
    assert {node.node_id for step in result.steps for node in step.nodes} == {"x/0", "twin"}


def test_the_youngest_surplus_goes_and_what_drains_already_goes_first():
    nodes = [
        *nodes_of(ONE, "old", age_s=3000.0),
        *nodes_of(ONE, "mid", age_s=2000.0),
        *nodes_of(ONE, "new", age_s=1000.0),
    ]
    up = Signals(ready=frozenset({"old", "mid", "new"}))
    goal = plan(wanted(ONE, 2))
    assert {s.instance_id for s in run(goal, nodes, signals=up).steps if s.action is Action.STOP} == {"new"}
    begun = replace(up, draining=frozenset({"old"}))
    assert {s.instance_id for s in run(goal, nodes, signals=begun).steps if s.action is Action.STOP} == {"old"}


def test_what_goes_anyway_or_drains_already_makes_the_room_that_a_limit_lacks():
    nodes = [*nodes_of(ONE, "old", age_s=3000.0), *nodes_of(ONE, "mid"), *nodes_of(ONE, "new", age_s=1000.0)]
    up = Signals(ready=frozenset({"old", "mid", "new", "other"}))
    goal, bounds = plan(wanted(ONE, 1), wanted(TWO, 1)), limits(max_nodes=4)

    def going(nodes, signals, bounds):
        steps = run(goal, nodes, signals=signals, limits=bounds).steps
        return {step.instance_id for step in steps if step.action is Action.DRAIN and step.due is Due.NOW}

    assert going(nodes, up, bounds) == {"mid"}
    assert going(nodes, replace(up, draining=frozenset({"mid"})), bounds) == {"mid"}
    other = nodes_of(THREE, "other", age_s=500.0)  # of a model that nobody wants any more
    assert going([*nodes, *other], up, limits(max_nodes=7)) == {"other"}


def test_only_models_that_are_complete_let_go():
    nodes = [*nodes_of(ONE, "m1-old"), *nodes_of(THREE, "m2-old")]
    signals = Signals(ready=frozenset({"m1-old", "m2-old"}))
    result = run(plan(wanted(TWO, 1)), nodes, signals=signals)
    due = {step.instance_id: step.due for step in result.steps if step.action is Action.DRAIN}
    assert due == {"m1-old": Due.REPLACEMENT, "m2-old": Due.NOW}


def test_no_zone_for_all_nodes_is_said():
    policy = replace(
        POLICY, zones={("east", "a", Market.ON_DEMAND): ("east-a",), ("east", "b", Market.ON_DEMAND): ("east-b",)}
    )
    result = run(plan(wanted(TWO, 2)), [], policy=policy)
    assert result.steps == ()
    assert result.stuck
    assert [(u.count, u.reason, u.offers) for u in result.unmet] == [
        (2, "no zone is known to offer all of its nodes", frozenset())
    ]


def test_ids_in_use_or_burnt_are_passed_over():
    def name(ordinal):
        return instance_id(
            FLEET, plan_id="plan-1", template_id="d-one", region="east", zone="east-a", market=Market.ON_DEMAND,
            ordinal=ordinal,
        )  # fmt: skip

    gone = [replace(node, state=NodeState.GONE) for node in nodes_of(ONE, name(0))]
    result = run(plan(wanted(ONE, 2)), gone, signals=Signals(burnt=frozenset({name(1)})))
    assert [step.instance_id for step in result.steps] == [name(2), name(3)]


def test_groups_without_an_instance_are_released_and_others_kept():
    ending = [replace(node, state=NodeState.ENDING) for node in nodes_of(TWO, "ending")]
    groups = [("east", "ending"), ("east", "absent"), ("east", "there")]
    there = nodes_of(TWO, "there")
    signals = Signals(ready=frozenset({"there"}), weight={"there": 350.0})
    result = run(plan(wanted(TWO, 1)), [*ending, *there], groups=groups, signals=signals)
    assert lines(result) == [
        ("release_group", "ending", Due.NOW),
        ("release_group", "absent", Due.NOW),
    ]
    assert result.converged


def test_steps_read_as_lines_for_people():
    old = nodes_of(ONE, "old")
    no_c = replace(POLICY, zones={key: zones for key, zones in POLICY.zones.items() if key[1] != "c"})
    result = run(plan(wanted(TWO, 1), wanted(THREE, 2)), old, signals=Signals(ready=frozenset({"old"})), policy=no_c)
    start, weight, drain, stop, unmet = step_lines(result)
    assert start.startswith("start d-two-")
    assert start.endswith(" in east, east-a on_demand: a, b: the plan wants 1")
    wait = "(when all that the plan wants of the model is up)"
    assert weight == f"weight old in east to 0: the plan does not want it {wait}"
    assert drain == f"drain old in east: the plan does not want it {wait}"
    assert stop == "stop old in east: old/0: the plan does not want it (when it is drained)"
    assert unmet == "unmet 2 x p-three in east: no zone is known to offer all of its nodes"
