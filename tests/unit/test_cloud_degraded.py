"""An instance that goes on without a node: what the fleet view makes of it, and that its replacement comes first."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from coral_core.cloud.engine_port import Readiness, signals_of
from coral_core.cloud.events import EventKind, Look, what_holds
from coral_core.cloud.fleet_view import Condition, Signals, gather, judge
from coral_core.cloud.ports import ApplyStatus
from coral_core.cloud.reconcile import reconcile
from coral_core.cloud.steps import Action, Due
from coral_core.domain.fleet import InstanceSpec, Node, NodeSlot, NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from tests.fakes.fleet_cases import POLICY, START, World, limits, plan, wanted

NOW = START + timedelta(hours=1)
WIDE = InstanceSpec(
    template_id="w",
    model="m",
    phase=Phase.AGGREGATED,
    slots=tuple(NodeSlot(stage=stage, config="a") for stage in (0, 0, 1, 1)),
    throughput=8.0,
)
X = frozenset({"x"})
WORDS = {
    "ready": Signals(ready=X),
    "degraded": Signals(degraded=X),
    "silent": Signals(unready_s={"x": 15.0}),
    "failed": Signals(failed=X),
    "unknown": Signals(),
}
HARMS = {
    "none": {},
    "another of its stage": {1: NodeState.GONE},
    "ending": {1: NodeState.ENDING},
    "halted": {1: NodeState.HALTED},
    "unlisted": {1: None},
    "one of each stage": {1: NodeState.GONE, 3: NodeState.HALTED},
    "a whole stage": {2: NodeState.GONE, 3: NodeState.HALTED},
    "the engine's": {0: NodeState.HALTED},
    "all": dict.fromkeys(range(4), NodeState.GONE),
}


def nodes_of(harm: dict[int, NodeState | None], *, age_s: float = 2000.0, name: str = "x") -> list[Node]:
    return [
        Node(
            node_id=f"{name}/{number}",
            region="east",
            zone="east-a",
            market=Market.ON_DEMAND,
            state=state,
            launched_at=NOW - timedelta(seconds=age_s),
            tags=NodeTags(
                instance_id=name,
                template_id=WIDE.template_id,
                model=WIDE.model,
                phase=WIDE.phase,
                config=slot.config,
                stage=slot.stage,
                node=number,
                nodes=len(WIDE.slots),
                epoch=1,
            ),
        )
        for number, slot in enumerate(WIDE.slots)
        if (state := harm.get(number, NodeState.RUNNING)) is not None
    ]


def judged(nodes: list[Node], signals: Signals) -> tuple[Condition, str]:
    (instance,) = gather(nodes)
    return judge(instance, signals, now=NOW, start_timeout_s=900.0, unready_grace_s=60.0, lost_grace_s=15.0)


@pytest.mark.parametrize(
    ("harm", "conditions"),
    [
        ("none", "up degraded starting failed starting"),
        ("another of its stage", "degraded degraded failed failed degraded"),
        ("ending", "degraded degraded failed failed degraded"),
        ("halted", "degraded degraded failed failed degraded"),
        ("unlisted", "degraded degraded failed failed failed"),
        ("one of each stage", "degraded degraded failed failed degraded"),
        ("a whole stage", "failed failed failed failed failed"),
        ("the engine's", "failed failed failed failed failed"),
        ("all", "ended ended ended ended ended"),
    ],
)
def test_what_is_lost_and_what_the_serving_side_says_together_decide(harm, conditions):
    """`conditions` in the order of WORDS."""
    expected = dict(zip(WORDS, conditions.split(), strict=True))
    found = {word: judged(nodes_of(HARMS[harm]), signals) for word, signals in WORDS.items()}
    assert {word: condition.value for word, (condition, _) in found.items()} == expected
    assert all(bool(reason) == (condition is not Condition.UP) for condition, reason in found.values())


def test_nodes_not_listed_yet_are_lost_only_once_the_engine_has_answered():
    young = nodes_of({1: None}, age_s=20.0)
    assert {word: judged(young, signals)[0].value for word, signals in WORDS.items()} == {
        "ready": "degraded",
        "degraded": "degraded",
        "silent": "starting",
        "failed": "failed",
        "unknown": "starting",
    }


def test_an_engine_need_not_answer_at_once_after_a_loss():
    nodes, short = nodes_of(HARMS["halted"]), Signals(unready_s={"x": 14.0})
    said = "one of its nodes was stopped, and it does not answer for now"
    assert judged(nodes, short) == (Condition.DEGRADED, said)
    assert judged(nodes_of({}), short)[0] is Condition.STARTING


def test_a_chain_is_condemned_whatever_the_gateway_still_says():
    chain = [node for node in nodes_of({2: NodeState.GONE}) if node.tags.node in {0, 2}]
    chain = [replace(node, tags=replace(node.tags, node=n, nodes=2)) for n, node in enumerate(chain)]
    assert judged(chain, WORDS["ready"]) == (Condition.FAILED, "one of its nodes has ended")


def test_a_spot_notice_for_a_node_that_is_left_comes_before_its_loss():
    nodes = nodes_of(HARMS["another of its stage"])
    noticed = [replace(node, interrupted=node.tags.node == 2) for node in nodes]
    assert judged(noticed, WORDS["degraded"])[0] is Condition.LEAVING
    gone = [replace(node, interrupted=node.tags.node == 1) for node in nodes]
    assert judged(gone, WORDS["degraded"])[0] is Condition.DEGRADED, "the notice was for the node that is gone"


def test_reasons_name_what_happened():
    said = {harm: judged(nodes_of(HARMS[harm]), WORDS["degraded"])[1] for harm in ("none", "halted", "unlisted")}
    assert said == {
        "none": "its engine has lost a node, and it goes on with less",
        "halted": "one of its nodes was stopped, and it goes on with less",
        "unlisted": "one of its nodes is gone, and it goes on with less",
    }


@pytest.mark.parametrize("readiness", Readiness)
def test_one_look_says_what_a_run_would_hear(readiness):
    class Said:
        def ready(self, _):
            return readiness

    (whole,) = gather(nodes_of({}))
    (headless,) = gather(nodes_of(HARMS["the engine's"]))
    named = {Readiness.READY: "ready", Readiness.DEGRADED: "degraded", Readiness.FAILED: "failed"}
    silent = Signals(unready_s={"x": 0.0})
    expected = silent if readiness is Readiness.NOT_READY else WORDS[named.get(readiness, "unknown")]
    assert signals_of(Said(), whole) == expected
    assert signals_of(Said(), headless) == silent, "nobody is asked about nodes that cannot serve"


def test_its_replacement_is_started_and_up_before_it_is_drained():
    goal = plan(wanted(WIDE, 1))
    damaged = nodes_of(HARMS["another of its stage"])
    first = reconcile(goal, damaged, limits=limits(), policy=POLICY, now=NOW, signals=WORDS["degraded"])
    name = next(step.instance_id for step in first.steps if step.action is Action.START)
    assert [(s.action, s.instance_id, s.due, s.weight) for s in first.steps] == [
        (Action.START, name, Due.NOW, 0.0),
        (Action.WEIGHT, "x", Due.NOW, 8.0),
        (Action.WEIGHT, "x", Due.REPLACEMENT, 0.0),
        (Action.DRAIN, "x", Due.REPLACEMENT, 0.0),
        (Action.STOP, "x", Due.DRAINED, 0.0),
    ]
    assert len(first.steps[0].orders) == 4, "a whole instance, not the node that is lost"
    assert [node.tags.node for node in first.steps[-1].nodes] == [0, 2, 3]
    both = [*damaged, *nodes_of({}, name=name, age_s=100.0)]
    weighed = replace(WORDS["degraded"], weight={"x": 8.0})
    coming = reconcile(goal, both, limits=limits(), policy=POLICY, now=NOW, signals=weighed)
    assert [(s.action, s.instance_id, s.due) for s in coming.steps][:2] == [
        (Action.WAIT, name, Due.ENGINE),
        (Action.WEIGHT, "x", Due.REPLACEMENT),
    ]
    there = replace(weighed, ready=frozenset({name}))
    last = reconcile(goal, both, limits=limits(), policy=POLICY, now=NOW, signals=there)
    assert [(s.action, s.instance_id, s.due, s.reason) for s in last.steps] == [
        (Action.WEIGHT, name, Due.NOW, "it is up"),
        (Action.WEIGHT, "x", Due.NOW, "it has lost a node"),
        (Action.DRAIN, "x", Due.NOW, "it has lost a node"),
        (Action.STOP, "x", Due.DRAINED, "it has lost a node"),
    ]


def test_a_whole_one_is_kept_before_a_degraded_one():
    nodes = [*nodes_of(HARMS["halted"], age_s=4000.0), *nodes_of({}, name="whole", age_s=1000.0)]
    signals = Signals(ready=frozenset({"whole"}), degraded=X, weight={"whole": 8.0})
    found = reconcile(plan(wanted(WIDE, 1)), nodes, limits=limits(), policy=POLICY, now=NOW, signals=signals)
    assert {step.instance_id for step in found.steps} == {"x"}
    assert {step.due for step in found.steps} == {Due.NOW, Due.DRAINED}


@pytest.fixture
def world() -> World:
    world = World()
    world.engine.wide.add(WIDE.template_id)
    world.apply(plan(wanted(WIDE, 1)), limits())
    world.events.clear()
    return world


def node_of(world: World, number: int) -> str:
    return next(m.node_id for m in world.cloud.held() if m.order.tags.node == number)


@pytest.mark.parametrize("harm", ["kill", "halt"])
def test_a_run_serves_from_what_is_left_until_a_whole_one_does(world, harm):
    (old,) = {m.order.tags.instance_id for m in world.cloud.held()}
    getattr(world.cloud, harm)(node_of(world, 1))
    assert world.apply(plan(wanted(WIDE, 1)), limits()).status is ApplyStatus.CONVERGED
    assert world.fleet() == {("w", "east", "on_demand"): 1}
    (new,) = {m.order.tags.instance_id for m in world.cloud.held(also_ending=False)}
    assert new != old
    steps = [(event.action, event.instance_id) for event in world.events]
    assert steps.index((Action.START, new)) < steps.index((Action.WEIGHT, new)) < steps.index((Action.DRAIN, old))
    assert steps.index((Action.DRAIN, old)) < steps.index((Action.STOP, old))
    weights = [event.outcome for event in world.events if event.action is Action.WEIGHT and event.instance_id == old]
    assert weights == ["it goes on with less: weight 8", "it has lost a node: weight 0"]


@pytest.mark.parametrize("numbers", [(0,), (2, 3)])
def test_a_run_stops_at_once_what_cannot_go_on(world, numbers):
    (old,) = {m.order.tags.instance_id for m in world.cloud.held()}
    for number in numbers:
        world.cloud.kill(node_of(world, number))
    assert world.apply(plan(wanted(WIDE, 1)), limits()).status is ApplyStatus.CONVERGED
    steps = [(event.action, event.instance_id) for event in world.events]
    assert steps[:2] == [(Action.WEIGHT, old), (Action.STOP, old)]
    assert (Action.DRAIN, old) not in steps


def test_where_no_other_can_be_had_it_stays(world):
    before = {m.order.tags.instance_id for m in world.cloud.held()}
    world.cloud.kill(node_of(world, 3))
    for zone in ("east-a", "east-b"):
        world.cloud.capacity[zone, "a"] = 0
    report = world.apply(plan(wanted(WIDE, 1)), limits())
    assert report.status is ApplyStatus.UNMET
    assert {m.order.tags.instance_id for m in world.cloud.held(also_ending=False)} == before
    assert set(world.engine.weight.values()) == {8.0}


def test_it_goes_first_where_a_limit_leaves_no_room_for_both(world):
    world.cloud.kill(node_of(world, 1))
    report = world.apply(plan(wanted(WIDE, 1)), limits(max_nodes=5))
    assert report.status is ApplyStatus.CONVERGED
    assert world.fleet() == {("w", "east", "on_demand"): 1}


def test_it_is_news():
    look = Look(
        instances={"x": (Condition.DEGRADED, "its engine has lost a node, and it goes on with less")},
        wanted={("w", "east"): 1},
        live={("w", "east"): 1},
        asked={},
        held={},
        lacked={},
        to_be_had={},
    )
    (found,) = what_holds(look, tolerance_frac=0.0)
    assert (found.kind, found.subject) == (EventKind.INSTANCE_DEGRADED, "x")
