"""What the executor refuses: plans beyond the limits, gaps, bad input, wrong credentials, other people's machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral_core.cloud.fake import Fault, Trouble
from coral_core.cloud.ports import ApplyStatus
from coral_core.cloud.tags import client_token, write_tags
from coral_core.domain.fleet import FleetId
from coral_core.domain.hardware import Market
from coral_core.errors import DataGapError, InputError, ProvisionError
from tests.fakes.fleet_cases import (
    FLEET,
    ONE,
    THREE,
    TWO,
    World,
    limits,
    plan,
    wanted,
)


@pytest.fixture
def world() -> World:
    return World()


def kinds(world: World) -> list[str]:
    return [event.action.value for event in world.events]


def test_a_plan_beyond_the_limits_does_nothing(world):
    for bound in ({"max_nodes": 1}, {"max_usd_per_h": 3.4}, {"max_by_offer": {("east", "b", Market.ON_DEMAND): 0}}):
        with pytest.raises(ProvisionError, match="the plan passes"):
            world.apply(plan(wanted(TWO, 1)), limits(**bound))
    assert world.cloud.calls == []
    world.apply(plan(wanted(TWO, 1)), limits(max_nodes=2, max_usd_per_h=3.5))


def test_a_missing_price_is_a_gap_and_never_free(world):
    unpriced = replace(limits(), price_usd_per_h={})
    with pytest.raises(DataGapError, match="no price of a"):
        world.apply(plan(wanted(ONE, 1)), unpriced)
    world.apply(plan(wanted(ONE, 1)), limits())
    prices = {key: usd for key, usd in limits().price_usd_per_h.items() if key[1] != "a"}
    world.events.clear()
    report = world.apply(plan(wanted(THREE, 1), plan_id="plan-2"), replace(limits(), price_usd_per_h=prices))
    assert report.status is ApplyStatus.CONVERGED
    assert kinds(world).index("stop") < kinds(world).index("start"), "nothing starts beside a node of unknown price"


@pytest.mark.parametrize(
    ("goal", "bounds", "match"),
    [
        (plan(wanted(ONE, 1), wanted(ONE, 2)), {}, "named twice"),
        (plan(wanted(ONE, -1)), {}, "below 0"),
        (plan(wanted(replace(ONE, slots=()), 1)), {}, "without nodes"),
        (plan(wanted(replace(ONE, throughput=float("nan")), 1)), {}, "throughput nan"),
        (plan(), {"max_nodes": -1}, "max_nodes"),
        (plan(), {"max_usd_per_h": float("nan")}, "max_usd_per_h"),
        (plan(), {"price_usd_per_h": {("east", "a", Market.SPOT): -1.0}}, "price -1"),
        (plan(), {"max_by_offer": {("east", "a", Market.SPOT): -1}}, "availability -1"),
    ],
)
def test_bad_input_is_refused_before_any_call(world, goal, bounds, match):
    with pytest.raises(InputError, match=match):
        world.apply(goal, replace(limits(), **bounds))
    assert world.cloud.calls == []


@pytest.mark.parametrize("trouble", [Trouble.DENIED, Trouble.EXPIRED])
@pytest.mark.parametrize("operation", ["account", "describe", "start"])
def test_wrong_or_expired_credentials_end_the_run_with_the_fix(world, operation, trouble):
    world.cloud.faults.append(Fault(operation=operation, trouble=trouble))
    with pytest.raises(ProvisionError, match=r"not allowed|expired") as caught:
        world.apply(plan(wanted(ONE, 1)), limits())
    assert caught.value.fix
    assert world.fleet() == {}


def test_an_unknown_region_is_named_before_anything_starts(world):
    with pytest.raises(ProvisionError, match="unknown region 'mars'"):
        world.apply(
            plan(wanted(ONE, 1), wanted(ONE, 1, region="mars")),
            replace(
                limits(),
                max_usd_per_h=float("inf"),
                price_usd_per_h={**limits().price_usd_per_h, ("mars", "a", Market.ON_DEMAND): 1.0},
            ),
        )
    assert "start" not in world.cloud.calls


def test_a_fleet_of_another_account_is_left_alone(world):
    other = FleetId(name=FLEET.name, account="222222222222")
    with pytest.raises(ProvisionError, match="account 111111111111, the fleet to 222222222222"):
        world.apply(plan(wanted(ONE, 1), fleet=other), limits())
    assert world.cloud.calls == ["account"]


def test_foreign_machines_are_reported_and_never_touched(world):
    world.apply(plan(wanted(ONE, 1)), limits())
    ours = world.cloud.held()[0]
    tags = write_tags(FLEET, ours.order.tags)
    token = client_token(FLEET, ours.order.tags.instance_id, 0)
    other = client_token(FleetId(name="demo", account="222222222222"), ours.order.tags.instance_id, 0)
    planted = {
        "copy": {"tags": tags, "token": "made-by-hand"},
        "other-account": {"tags": tags, "account": "222222222222", "token": other},
        "no-tags": {"tags": {"coral:fleet": "demo"}},
        "bad-number": {"tags": {**tags, "coral:node": "-1"}, "token": token},
        "bad-phase": {"tags": {**tags, "coral:phase": "warp"}, "token": token},
        "node-7-of-1": {"tags": {**tags, "coral:node": "7"}, "token": token},
        "other-fleet": {"tags": {**tags, "coral:fleet": "theirs"}, "token": token},
    }
    for name, given in planted.items():
        world.cloud.plant(name, region="east", **given)
    report = world.apply(plan(plan_id="plan-2"), limits())
    assert report.status is ApplyStatus.CONVERGED
    assert world.fleet() == {}
    assert {node.node_id for node in report.foreign} == set(planted) - {"other-fleet"}
    assert all(node.reason for node in report.foreign)
    assert all(world.cloud.machines[name].stopped_at is None for name in planted)
