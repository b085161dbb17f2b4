"""The executor and a serving side that fails, cannot be asked or asks for time: nothing that is paid for stays for its sake."""

from __future__ import annotations

import pytest

from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.ports import ApplyStatus
from coral_core.cloud.steps import Action
from coral_core.errors import ServingError
from tests.fakes.fleet_cases import ONE, POLICY, THREE, TWO, World, apply_policy, counts, limits, plan, wanted


class Away:
    """The world's serving side behind a gateway that fails every time, or (`hiccups`) every other time that it is told something."""

    def __init__(self, world, *, hiccups=False, hangs_s=0.0):
        self.engine, self.hiccups, self.told = world.engine, hiccups, 0
        self.wait = lambda: world.clock.advance(hangs_s)

    def _engine(self):
        self.told += 1
        self.wait()
        if self.hiccups and self.told % 2 == 0:
            return self.engine
        raise ServingError("the gateway does not answer: refused")

    def ready(self, instance):
        if self.hiccups:
            return self.engine.ready(instance)
        self.wait()
        return Readiness.UNKNOWN

    def set_weight(self, instance, weight):
        self._engine().set_weight(instance, weight)

    def drain(self, instance):
        return self._engine().drain(instance)


@pytest.fixture
def world() -> World:
    return World()


def test_a_teardown_releases_all_though_the_gateway_is_away(world):
    world.apply(plan(wanted(ONE, 2), wanted(THREE, 1)), limits())
    world.events.clear()
    report = world.apply(plan(plan_id="none"), limits(), engine=Away(world))
    assert report.status is ApplyStatus.CONVERGED
    assert world.fleet() == {}
    said = [event.outcome for event in world.events]
    assert sum("the gateway does not answer" in outcome for outcome in said) == 2 * 3  # weight and drain, once each
    assert sum("given up after" in outcome for outcome in said) == 3


@pytest.mark.parametrize("hangs_s", [0.0, 10.0])
def test_a_teardown_takes_no_turns_while_all_is_paid_for(world, hangs_s):
    world.apply(plan(wanted(ONE, 20)), limits())
    begun_s = world.clock.monotonic_s()
    policy = apply_policy()
    world.apply(plan(plan_id="none"), limits(), policy, engine=Away(world, hangs_s=hangs_s))
    assert world.fleet() == {}
    assert world.clock.monotonic_s() - begun_s < 2 * policy.drain_timeout_s


def test_a_gateway_that_fails_now_and_then_is_told_again_and_loses_no_requests(world):
    world.apply(plan(wanted(ONE, 2)), limits())
    goal = plan(wanted(TWO, 1), plan_id="plan-2")
    world.events.clear()
    report = world.apply(goal, limits(), engine=Away(world, hiccups=True))
    assert report.status is ApplyStatus.CONVERGED
    assert world.fleet() == counts(goal)
    assert {world.engine.weight[node.tags.instance_id] for node in report.nodes if node.live} == {350.0}
    assert sum(event.outcome == "drained" for event in world.events) == 2


def test_what_has_failed_is_stopped_though_nobody_can_be_told(world):
    goal = plan(wanted(ONE, 2))
    world.apply(goal, limits())
    dead = world.cloud.held()[0].node_id
    world.cloud.halt(dead)
    report = world.apply(goal, limits(), apply_policy(deadline_s=300.0), engine=Away(world))
    assert report.status is ApplyStatus.DEADLINE  # nobody can say whether its replacement answers
    assert dead not in {machine.node_id for machine in world.cloud.held()}
    assert world.fleet() == counts(goal)


def test_an_engine_that_loads_for_long_is_waited_for_while_the_serving_side_says_that_it_starts(world):
    world.engine.boot_s = 3 * POLICY.start_timeout_s
    world.engine.starting = True
    assert world.apply(plan(wanted(TWO, 1)), limits(), apply_policy(deadline_s=1e5)).status is ApplyStatus.CONVERGED
    assert len(world.cloud.machines) == 2
    assert not [event for event in world.events if event.action is Action.STOP]


def test_engines_that_cannot_be_asked_condemn_nobody(world):
    world.apply(plan(wanted(TWO, 1)), limits())
    world.engine.unreachable = True
    report = world.apply(plan(wanted(TWO, 1)), limits(), apply_policy(deadline_s=5000.0))
    assert report.status is ApplyStatus.DEADLINE
    assert world.fleet() == {("d-two", "east", "on_demand"): 1}
