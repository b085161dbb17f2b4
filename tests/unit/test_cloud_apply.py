"""The executor on a fake cloud: order of steps, roll-back, limits, leases, lagging listings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral_core.cloud.apply import preview_plan
from coral_core.cloud.fake import Fault, Trouble
from coral_core.cloud.ports import ApplyStatus, LeaseLostError
from coral_core.cloud.provisioner import CloudBusyError, Refusal
from coral_core.cloud.steps import Action
from coral_core.domain.hardware import Market
from coral_core.errors import ProvisionError
from tests.fakes.fleet_cases import (
    ONE,
    POLICY,
    START,
    THREE,
    TWO,
    World,
    apply_policy,
    counts,
    limits,
    plan,
    wanted,
)


@pytest.fixture
def world() -> World:
    return World()


def kinds(world: World) -> list[str]:
    return [event.action.value for event in world.events]


def test_a_plan_becomes_the_fleet_and_a_second_run_changes_nothing(world):
    goal = plan(wanted(TWO, 2), wanted(THREE, 1, region="west"), wanted(ONE, 1, market=Market.SPOT))
    report = world.apply(goal, limits())
    assert report.status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)
    assert {world.engine.weight[n.tags.instance_id] for n in report.nodes} == {100.0, 350.0, 900.0}
    starts = world.cloud.calls.count("start")
    world.events.clear()
    again = world.apply(goal, limits())
    assert again.status is ApplyStatus.CONVERGED
    assert world.cloud.calls.count("start") == starts
    assert set(kinds(world)) == {"weight"}


def test_old_is_drained_only_after_new_serves(world):
    world.apply(plan(wanted(ONE, 2)), limits())
    old = {m.order.tags.instance_id for m in world.cloud.held()}
    world.events.clear()
    goal = plan(wanted(TWO, 1), plan_id="plan-2")
    assert world.apply(goal, limits()).status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)
    served = next(i for i, e in enumerate(world.events) if e.action is Action.WEIGHT and "weight 350" in e.outcome)
    gone = [i for i, e in enumerate(world.events) if e.action in {Action.DRAIN, Action.STOP} and e.instance_id in old]
    assert gone
    assert min(gone) > served
    order = [e.action for e in world.events if e.instance_id == min(old)]
    assert order.index(Action.WEIGHT) < order.index(Action.DRAIN) < order.index(Action.STOP)


def test_old_goes_first_where_a_limit_leaves_no_room_for_both(world):
    tight = limits(max_nodes=2)
    world.apply(plan(wanted(ONE, 2)), tight)
    peak = []
    world.cloud.watch = lambda cloud: peak.append(len(cloud.held()))
    goal = plan(wanted(TWO, 1), plan_id="plan-2")
    assert world.apply(goal, tight).status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)
    assert max(peak) <= 2


def test_only_as_much_goes_first_as_the_limit_demands(world):
    tight = limits(max_nodes=4)
    world.apply(plan(wanted(ONE, 3)), tight)
    world.events.clear()
    world.apply(plan(wanted(TWO, 1), plan_id="plan-2"), tight)
    before = [e.instance_id for e in world.events[: kinds(world).index("start")] if e.action is Action.STOP]
    assert len(before) == 1


def test_an_offer_that_is_all_held_is_freed_first(world):
    scarce = limits(max_by_offer={("east", "a", Market.ON_DEMAND): 2})
    world.cloud.capacity["east-a", "a"] = 2
    world.cloud.capacity["east-b", "a"] = 0
    world.apply(plan(wanted(ONE, 2)), scarce)
    report = world.apply(plan(wanted(TWO, 2), plan_id="plan-2"), scarce)
    assert report.status is ApplyStatus.CONVERGED
    assert report.failures == ()


def test_no_capacity_in_one_zone_rolls_back_whole_and_goes_to_the_next(world):
    world.cloud.capacity["east-a", "c"] = 0
    report = world.apply(plan(wanted(THREE, 1)), limits())
    assert report.status is ApplyStatus.CONVERGED
    assert {node.zone for node in report.nodes if node.live} == {"east-b"}
    assert world.fleet() == {("p-three", "east", "on_demand"): 1}
    assert [(f.refusal, f.config, f.zone) for f in report.failures] == [(Refusal.CAPACITY, "c", "east-a")]
    assert report.lowered == {}


def test_what_no_zone_gives_is_reported_for_a_new_solve_and_nothing_half_is_left(world):
    world.apply(plan(wanted(THREE, 1)), limits())
    for zone in ("east-a", "east-b"):
        world.cloud.capacity[zone, "c"] = 1 if zone == "east-a" else 0
    report = world.apply(plan(wanted(THREE, 2), wanted(ONE, 1), plan_id="plan-2"), limits())
    assert report.status is ApplyStatus.UNMET
    assert report.lowered == {("east", "c", Market.ON_DEMAND): 1}
    assert [(u.wanted.spec.template_id, u.count) for u in report.unmet] == [("p-three", 1)]
    assert world.fleet() == {("p-three", "east", "on_demand"): 1, ("d-one", "east", "on_demand"): 1}


def test_old_stays_while_its_replacement_cannot_be_had(world):
    world.apply(plan(wanted(ONE, 2)), limits())
    world.cloud.faults.append(Fault(operation="start", trouble=Trouble.QUOTA))
    report = world.apply(plan(wanted(TWO, 1), plan_id="plan-2"), limits())
    assert report.status is ApplyStatus.UNMET
    assert world.fleet() == {("d-one", "east", "on_demand"): 2}
    assert report.failures[0].refusal is Refusal.QUOTA
    assert report.lowered == {("east", "a", Market.ON_DEMAND): 2}


def test_quota_is_tried_again_once_what_ends_has_ended(world):
    scarce = limits(max_nodes=3)
    world.cloud.quota["east", "a", Market.ON_DEMAND] = 2
    world.apply(plan(wanted(ONE, 2)), scarce)
    for machine in world.cloud.held():
        world.cloud.kill(machine.node_id)
    report = world.apply(plan(wanted(ONE, 2)), scarce)
    assert report.status is ApplyStatus.CONVERGED
    assert report.failures == ()


def test_what_the_serving_side_gives_up_is_stopped_whole_and_replaced_at_once(world):
    goal = plan(wanted(TWO, 2))
    world.apply(goal, limits())
    failed, kept = {machine.order.tags.instance_id for machine in world.cloud.held()}
    world.engine.condemned.add(failed)
    world.events.clear()
    begun_s = world.clock.monotonic_s()
    assert world.apply(goal, limits()).status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)
    assert failed not in {m.order.tags.instance_id for m in world.cloud.held(also_ending=False)}
    assert kept in {m.order.tags.instance_id for m in world.cloud.held(also_ending=False)}
    first = [event for event in world.events if event.instance_id == failed]
    assert [event.action for event in first[:2]] == [Action.WEIGHT, Action.STOP]
    assert (first[1].at - START).total_seconds() - begun_s < 1.0
    assert "the serving side has given it up" in first[1].outcome


@pytest.mark.parametrize("trouble", [Trouble.THROTTLED, Trouble.LOST, Trouble.UNAVAILABLE])
def test_passing_trouble_is_repeated_with_the_same_order(world, trouble):
    world.cloud.lag_s = 30.0
    world.cloud.faults.append(Fault(operation="start", trouble=trouble, times=2))
    report = world.apply(plan(wanted(THREE, 1)), limits())
    assert report.status is ApplyStatus.CONVERGED
    assert len(world.cloud.machines) == 3


@pytest.mark.parametrize("operation", ["describe", "stop", "account"])
def test_reads_and_stops_survive_passing_trouble(world, operation):
    world.apply(plan(wanted(ONE, 2)), limits())
    world.cloud.faults += [
        Fault(operation=operation, trouble=Trouble.THROTTLED, times=2),
        Fault(operation=operation, trouble=Trouble.LOST),
    ]
    assert world.apply(plan(plan_id="plan-2"), limits()).status is ApplyStatus.CONVERGED
    assert world.fleet() == {}


def test_a_cloud_that_never_answers_ends_the_run_at_its_deadline(world):
    world.cloud.faults.append(Fault(operation="describe", trouble=Trouble.UNAVAILABLE, times=10_000))
    with pytest.raises(CloudBusyError):
        world.apply(plan(wanted(ONE, 1)), limits(), apply_policy(deadline_s=100.0))
    assert world.clock.elapsed_s < 300
    assert "start" not in world.cloud.calls


def test_endless_throttling_ends_at_the_deadline_and_says_what_is_left(world):
    world.cloud.faults.append(Fault(operation="start", trouble=Trouble.THROTTLED, times=10_000))
    report = world.apply(plan(wanted(ONE, 1)), limits(), apply_policy(deadline_s=100.0))
    assert report.status is ApplyStatus.DEADLINE
    assert "start d-one" in report.reason


def test_an_engine_that_never_answers_is_rolled_back_and_given_up(world):
    world.engine.broken.add("d-two")
    report = world.apply(plan(wanted(TWO, 1), wanted(ONE, 1)), limits(), apply_policy(deadline_s=1e5))
    assert report.status is ApplyStatus.UNMET
    assert "never answered" in report.reason
    assert report.lowered == {}
    assert world.fleet() == {("d-one", "east", "on_demand"): 1}
    assert len([m for m in world.cloud.machines.values() if m.order.tags.template_id == "d-two"]) == 3 * 2


def test_what_a_run_itself_slept_through_is_no_engines_silence(world):
    goal = plan(wanted(TWO, 1))
    world.apply(goal, limits())
    held = {machine.node_id for machine in world.cloud.held()}
    world.clock.advance(2 * POLICY.start_timeout_s)
    world.engine.broken.add("d-two")  # it answers late, for two looks
    slept_s = []

    def sleep(duration_s: float) -> None:
        slept_s.append(duration_s)
        world.clock.advance(duration_s if len(slept_s) > 1 else 3600.0)
        if len(slept_s) > 1:
            world.engine.broken.clear()

    report = world.apply(goal, limits(), apply_policy(deadline_s=1e5), sleep=sleep)
    assert report.status is ApplyStatus.CONVERGED
    assert len(slept_s) >= 2
    assert {machine.node_id for machine in world.cloud.held()} == held


@pytest.mark.parametrize("harm", ["kill", "halt"])
def test_one_lost_node_replaces_the_instance_whole(world, harm):
    goal = plan(wanted(THREE, 1))
    world.apply(goal, limits())
    before = {m.node_id for m in world.cloud.held()}
    getattr(world.cloud, harm)(min(before))
    assert world.apply(goal, limits()).status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)
    assert not before & {m.node_id for m in world.cloud.held(also_ending=False)}


def test_a_spot_notice_drains_at_once_and_replaces(world):
    goal = plan(wanted(ONE, 2, market=Market.SPOT))
    world.apply(goal, limits())
    doomed = world.cloud.held()[0]
    world.cloud.interrupt(doomed.node_id)
    world.events.clear()
    assert world.apply(goal, limits()).status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)
    assert doomed.stopped_at is not None
    drained = [e for e in world.events if e.action is Action.DRAIN]
    assert {e.instance_id for e in drained} == {doomed.order.tags.instance_id}


def test_requests_that_never_end_are_cut_off_after_the_time_limit(world):
    world.apply(plan(wanted(ONE, 1)), limits())
    world.engine.drain_s = 1e9
    report = world.apply(plan(plan_id="plan-2"), limits(), apply_policy(drain_timeout_s=120.0))
    assert report.status is ApplyStatus.CONVERGED
    assert any("cut off" in event.outcome for event in world.events)


def test_what_was_draining_is_kept_when_it_is_needed_again(world):
    goal = plan(wanted(ONE, 2))
    world.apply(goal, limits())
    world.engine.drain_s = 200.0
    killed = []

    def kill_the_kept_one(operation):
        draining = set(world.engine.draining_since)
        kept = [m for m in world.cloud.held() if m.order.tags.instance_id not in draining]
        if draining and not killed and world.clock.elapsed_s > 0:
            killed.append(kept[0].node_id)
            world.cloud.kill(kept[0].node_id)

    world.cloud.before_call = kill_the_kept_one
    less = plan(wanted(ONE, 1), plan_id="plan-2")
    starts = world.cloud.calls.count("start")
    assert world.apply(less, limits()).status is ApplyStatus.CONVERGED
    assert killed
    assert world.cloud.calls.count("start") == starts, "the draining one serves again, nothing new is needed"
    assert set(world.engine.weight.values()) == {0.0, 100.0}


def test_parallelism_is_bounded(world):
    world.cloud.boot_s = 100.0
    policy = apply_policy(reconcile=replace(POLICY, max_starting=2, max_draining=1))
    goal = plan(wanted(ONE, 6))
    starting = []

    def watch(cloud):
        booting = [m for m in cloud.held() if (world.clock.now() - m.born_at).total_seconds() < 160]
        starting.append(len(booting))

    world.cloud.watch = watch
    assert world.apply(goal, limits(), policy).status is ApplyStatus.CONVERGED
    assert max(starting) == 2
    world.events.clear()
    world.apply(plan(wanted(ONE, 1), plan_id="plan-2"), limits(), policy)
    order = [e.action for e in world.events if e.action in {Action.DRAIN, Action.STOP} and e.outcome != "drained"]
    assert order == [Action.DRAIN, Action.STOP] * 5


def test_no_call_is_made_without_enough_of_the_lease(world):
    left = iter([100.0, 100.0, 5.0])
    world.guard = lambda: next(left)
    report = world.apply(plan(wanted(THREE, 1)), limits())
    assert report.status is ApplyStatus.LEASE_LOST
    assert world.cloud.calls.count("start") == 2
    assert "5 s of the lease are left" in report.reason


def test_a_lease_held_by_another_run_stops_this_one_before_its_first_change(world):
    def guard():
        raise LeaseLostError("held by run 7", where="fleet demo")

    world.guard = guard
    report = world.apply(plan(wanted(ONE, 1)), limits())
    assert (report.status, report.reason) == (ApplyStatus.LEASE_LOST, "fleet demo: held by run 7")
    assert "start" not in world.cloud.calls


def test_placement_groups_of_pipelines_are_removed_with_them(world):
    world.apply(plan(wanted(TWO, 1), wanted(ONE, 1)), limits())
    assert len(world.cloud.groups) == 1
    world.apply(plan(plan_id="plan-2"), limits())
    world.clock.advance(60.0)
    world.apply(plan(plan_id="plan-3"), limits())
    assert world.cloud.groups == set()


def test_an_order_whose_token_is_taken_is_given_up_for_the_next_id(world):
    goal = plan(wanted(ONE, 1))
    world.apply(goal, limits())
    world.apply(plan(plan_id="plan-0"), limits())
    world.clock.advance(world.cloud.forget_s + 100)
    used = len(world.cloud.machines)
    changed = replace(goal, epoch=9)  # same ids, other request
    report = world.apply(changed, limits())
    assert report.status is ApplyStatus.CONVERGED
    assert len(world.cloud.machines) == used + 1
    assert any("conflict" in event.outcome for event in world.events)


def test_a_token_of_a_node_long_gone_is_not_taken_for_a_new_node(world):
    goal = plan(wanted(ONE, 1))
    world.apply(goal, limits())
    world.apply(plan(plan_id="plan-0"), limits())
    world.clock.advance(world.cloud.forget_s + 100)
    assert world.apply(goal, limits()).status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)


def test_a_run_does_not_end_before_what_it_may_have_started_can_be_seen(world):
    world.cloud.lag_s = 50.0
    world.cloud.faults += [
        Fault(operation="start", trouble=Trouble.LOST),
        Fault(operation="start", trouble=Trouble.UNAVAILABLE, times=100),
    ]
    report = world.apply(plan(wanted(ONE, 1)), limits(), apply_policy(deadline_s=10.0))
    assert report.status is ApplyStatus.DEADLINE
    assert [node.node_id for node in report.nodes] == [machine.node_id for machine in world.cloud.held()]
    assert len(report.nodes) == 1


def test_the_same_plan_run_again_at_once_finds_what_no_listing_shows(world):
    world.cloud.lag_s = 50.0

    class Crash(Exception):  # noqa: N818  # the process is gone, nobody handles it
        pass

    def crash(operation):
        if world.cloud.calls.count("start") == 4:
            raise Crash

    world.cloud.after_call = crash
    goal = plan(wanted(THREE, 2))
    with pytest.raises(Crash):
        world.apply(goal, limits())
    world.cloud.after_call = None
    assert world.apply(goal, limits()).status is ApplyStatus.CONVERGED
    assert len(world.cloud.machines) == 6


def test_what_cannot_be_completed_is_rolled_back_even_while_no_listing_shows_it(world):
    world.cloud.lag_s = 50.0
    world.cloud.capacity.update({("east-a", "c"): 0, ("east-b", "c"): 0})
    report = world.apply(plan(wanted(THREE, 1)), limits())
    assert report.status is ApplyStatus.UNMET
    assert len(world.cloud.machines) == 4
    assert world.fleet() == {}
    assert report.lowered == {("east", "c", Market.ON_DEMAND): 0}


def test_a_preview_shows_the_steps_and_changes_nothing(world):
    world.apply(plan(wanted(ONE, 1)), limits())
    world.cloud.plant("stranger", region="east", tags={"coral:fleet": "demo"})
    world.cloud.faults.append(Fault(operation="describe", trouble=Trouble.THROTTLED))
    world.cloud.calls.clear()
    world.events.clear()

    def guard():
        raise LeaseLostError("another run holds it")

    preview = preview_plan(
        plan(wanted(TWO, 1), plan_id="plan-2"),
        regions=("east", "west"),
        limits=limits(),
        policy=apply_policy(),
        ports=world.ports(guard=guard),
    )
    assert [step.action for step in preview.todo.steps] == [Action.START, Action.WEIGHT, Action.DRAIN, Action.STOP]
    assert [node.node_id for node in preview.foreign] == ["stranger"]
    assert len(preview.nodes) == 1
    assert set(world.cloud.calls) == {"account", "describe"}
    assert world.events == []
    with pytest.raises(ProvisionError, match="the plan passes"):
        preview_plan(
            plan(wanted(TWO, 1)), regions=(), limits=limits(max_nodes=1), policy=apply_policy(), ports=world.ports()
        )


def test_a_group_that_cannot_be_released_is_left_to_the_next_run(world):
    world.apply(plan(wanted(TWO, 1)), limits())
    world.apply(plan(plan_id="plan-2"), limits())
    world.clock.advance(100.0)
    world.cloud.faults.append(Fault(operation="release_group", trouble=Trouble.THROTTLED))
    assert world.apply(plan(plan_id="plan-2"), limits()).status is ApplyStatus.CONVERGED
    assert len(world.cloud.groups) == 1
    assert any("left to the next run" in event.outcome for event in world.events)


def test_no_two_starts_of_one_round_ask_for_what_was_just_refused(world):
    world.cloud.capacity["east-a", "a"] = 1
    report = world.apply(plan(wanted(ONE, 5)), limits())
    assert report.status is ApplyStatus.CONVERGED
    assert len(report.failures) == 1
    assert world.cloud.calls.count("start") == 6


def test_what_was_rolled_back_is_in_the_sums_of_the_next_run_even_when_listings_lag(world):
    world.cloud.lag_s = 55.0
    scarce = limits(max_by_offer={("east", "a", Market.ON_DEMAND): 3})
    held = []
    world.cloud.watch = lambda cloud: held.append(sum(m.order.tags.config == "a" for m in cloud.held()))
    world.apply(plan(wanted(ONE, 2)), scarce)
    world.cloud.quota["east", "b", Market.ON_DEMAND] = 0
    for _ in range(3):
        assert world.apply(plan(wanted(TWO, 1), plan_id="plan-2"), scarce).status is ApplyStatus.UNMET
    assert max(held) == 3
