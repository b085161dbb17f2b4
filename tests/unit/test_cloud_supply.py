"""A_r(c) and p_r(c) from what sources say: hand-made cases, and what happens where they say nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import numpy as np
import pytest

from coral_core.cloud.as_allocation import lower, market_name, pools_of, running_of, split_market, wanted_of
from coral_core.cloud.fleet_view import holdings
from coral_core.cloud.observe import MaxAge, Sources, observe_supply
from coral_core.cloud.ports import ApplyStatus, StartFailure
from coral_core.cloud.provisioner import CloudBusyError, Refusal
from coral_core.cloud.reconcile import reconcile
from coral_core.cloud.steps import Action, ReconcilePolicy
from coral_core.cloud.supply import Gap, GapKind, Reading, Supply, planning_arrays
from coral_core.domain.allocation import InstanceCount, Pool, Running
from coral_core.domain.fleet import FleetId
from coral_core.domain.hardware import Market
from coral_core.errors import DataGapError, InputError, ProvisionError
from tasks.observe import known_prices, zones_of
from tests.fakes.fleet_cases import FLEET, ONE, START, THREE, TWO, World, limits, plan, wanted

OFFER = ("east", "a", Market.ON_DEMAND)
SPOT = ("east", "a", Market.SPOT)


@dataclass
class Table:
    """All four sources from plain values; an exception as a value is raised."""

    price: object = field(default_factory=lambda: {"a": 1.0, "b": 2.5})
    spot: object = field(default_factory=lambda: {("a", "east-a"): 0.5, ("a", "east-b"): 0.4})
    sold: object = field(default_factory=lambda: {"a": ("east-a", "east-b"), "b": ("east-a",), "c": ()})
    size: object = field(default_factory=lambda: {"a": 4, "b": 8, "c": 96})
    limit: object = field(default_factory=lambda: {"pool": 40.0, "pool-spot": 8.0})
    others: object = field(default_factory=lambda: {"pool": 10})
    as_of: object = START
    calls: list[str] = field(default_factory=list)

    def _say(self, name: str) -> object:
        self.calls.append(name)
        value = getattr(self, name)
        if isinstance(value, list):
            value = value.pop(0) if len(value) > 1 else value[0]
        if isinstance(value, Exception):
            raise value
        return value

    def _each(self, name: str):
        return {k: Reading(value=v, source=name, as_of=self.as_of) for k, v in self._say(name).items()}

    def on_demand_usd_per_h(self, region, configs):
        return self._each("price")

    def spot_usd_per_h(self, region, configs):
        return self._each("spot")

    def zones(self, region, configs):
        return Reading(value=self._say("sold"), source="sold", as_of=self.as_of)

    def pool(self, config, market):
        if config == "x":
            return None
        return "pool" if market is Market.ON_DEMAND else "pool-spot"

    def vcpus(self, region, configs):
        return self._each("size")

    def limit_vcpus(self, region):
        return self._each("limit")

    def others_vcpus(self, fleet: FleetId, region):
        return Reading(value=self._say("others"), source="others", as_of=self.as_of)


def observe(table: Table, *, held=None, failures=(), configs=("a", "b", "c"), **changes) -> Supply:
    given = {
        "regions": ("east",),
        "markets": tuple(Market),
        "now": START,
        "sleep": lambda _: None,
        "held": held or {},
        **changes,
    }
    sources = Sources(prices=table, spot=table, offerings=table, quotas=table)
    return observe_supply(sources, FLEET, configs=configs, failures=failures, **given)


def failure(zone="east-a", *, refusal=Refusal.CAPACITY, held=1, age_s=60.0, config="a") -> StartFailure:
    return StartFailure(
        at=START - timedelta(seconds=age_s),
        region="east",
        zone=zone,
        config=config,
        market=Market.ON_DEMAND,
        refusal=refusal,
        code="Code",
        message="",
        held=held,
    )


def value(found):
    assert isinstance(found, Reading), found
    return found.value


def test_availability_is_quota_less_the_use_of_others_over_the_size():
    supply = observe(Table())
    assert value(supply.offers[OFFER].available) == (40 - 10) // 4
    assert value(supply.offers["east", "b", Market.ON_DEMAND].available) == (40 - 10) // 8
    assert value(supply.offers[SPOT].available) == 8 // 4
    assert "40 vCPUs in pool, 10 used by others" in supply.offers[OFFER].available.source
    assert supply.gaps.keys() == {
        ("east", "b", Market.SPOT),
        ("east", "c", Market.SPOT),
        ("east", "c", Market.ON_DEMAND),
    }


def test_what_no_zone_sells_is_known_to_be_none_but_what_runs_stays_counted():
    offer = ("east", "c", Market.ON_DEMAND)
    assert value(observe(Table()).offers[offer].available) == 0
    assert value(observe(Table(), held={offer: 2}).offers[offer].available) == 2


def test_what_runs_is_available_even_beyond_the_quota():
    assert value(observe(Table(limit={"pool": 8.0}), held={OFFER: 5}).offers[OFFER].available) == 5


def test_prices_are_on_demand_or_the_cheapest_zone():
    supply = observe(Table())
    assert value(supply.offers[OFFER].price_usd_per_h) == 1.0
    assert value(supply.offers[SPOT].price_usd_per_h) == 0.4
    assert supply.offers[SPOT].zones == ("east-b", "east-a")
    assert supply.offers[OFFER].zones == ("east-a", "east-b")


def test_what_runs_and_is_no_longer_planned_with_is_priced_so_that_its_replacement_starts_beside_it():
    world = World()
    world.apply(plan(wanted(THREE, 1)), limits())
    held = holdings(world.apply(plan(wanted(THREE, 1)), limits()).nodes)
    table = Table(price={"a": 1.0, "b": 2.5, "c": 7.0})
    supply = observe(table, held=held, configs=("a",))
    assert set(supply.offers) == {OFFER, SPOT, ("east", "b", Market.ON_DEMAND), ("east", "c", Market.ON_DEMAND)}
    world.events.clear()
    priced = limits(price_usd_per_h=known_prices(supply))
    goal = plan(wanted(replace(ONE, model=THREE.model), 1), plan_id="plan-2")
    assert world.apply(goal, priced).status is ApplyStatus.CONVERGED
    kinds = [event.action for event in world.events]
    assert kinds.index(Action.START) < kinds.index(Action.DRAIN)


def test_a_spot_node_is_priced_at_and_started_in_the_cheapest_zone_that_has_not_refused():
    refused = [replace(failure("east-b"), market=Market.SPOT)]
    for failures, zone, usd in (([], "east-b", 0.4), (refused, "east-a", 0.5)):
        supply = observe(Table(), failures=failures)
        assert value(supply.offers[SPOT].price_usd_per_h) == usd
        policy = ReconcilePolicy(zones=zones_of(supply))
        for market, place in ((Market.SPOT, zone), (Market.ON_DEMAND, "east-a")):
            goal = plan(wanted(ONE, 1, market=market))
            [step] = reconcile(goal, [], limits=limits(), policy=policy, now=START).steps
            assert step.orders[0].zone == place


@pytest.mark.parametrize(
    ("failures", "held", "expected"),
    [
        ([failure("east-a")], 0, 7),  # one of two zones refused
        ([failure("east-a"), failure("east-b", held=3)], 0, 3),
        ([failure("east-a"), failure("east-b", held=3)], 5, 5),
        ([failure("east-a", refusal=Refusal.QUOTA, held=2)], 0, 2),
        ([failure("east-a", refusal=Refusal.QUOTA, held=2, age_s=1801.0)], 0, 7),
        ([failure("east-a", refusal=Refusal.QUOTA, held=2, config="b")], 0, 7),
        ([failure("east-a", refusal=Refusal.QUOTA, held=20)], 0, 7),
    ],
)
def test_a_refusal_lowers_availability_while_it_cools_down(failures, held, expected):
    supply = observe(Table(), failures=failures, held={OFFER: held})
    assert value(supply.offers[OFFER].available) == expected


def test_a_zone_that_refused_is_tried_last():
    assert observe(Table(), failures=[failure("east-a")]).offers[OFFER].zones == ("east-b", "east-a")


@pytest.mark.parametrize(
    ("changes", "offer", "field_name", "kind", "reason"),
    [
        ({"price": {}}, OFFER, "price_usd_per_h", GapKind.MISSING, "no source says so for east"),
        ({"price": ProvisionError("not allowed")}, OFFER, "price_usd_per_h", GapKind.MISSING, "not allowed"),
        ({"price": {"a": float("nan")}}, OFFER, "price_usd_per_h", GapKind.MISSING, "says nan"),
        ({"price": {"a": -1.0}}, OFFER, "price_usd_per_h", GapKind.MISSING, "says -1"),
        ({"spot": {}}, SPOT, "price_usd_per_h", GapKind.MISSING, "no source"),
        ({"sold": ProvisionError("down")}, OFFER, "available", GapKind.MISSING, "down"),
        ({"sold": {"b": ()}}, OFFER, "available", GapKind.MISSING, "says nothing of it"),
        ({"size": {}}, OFFER, "available", GapKind.MISSING, "no source"),
        ({"limit": {}}, OFFER, "available", GapKind.MISSING, "no source"),
        ({"others": ProvisionError("denied")}, OFFER, "available", GapKind.MISSING, "denied"),
        ({"as_of": START - timedelta(days=8)}, OFFER, "price_usd_per_h", GapKind.STALE, "older than 604800 s"),
        ({"as_of": START - timedelta(hours=2)}, SPOT, "price_usd_per_h", GapKind.STALE, "older than 3600 s"),
        ({"as_of": START - timedelta(hours=1)}, OFFER, "available", GapKind.STALE, "older than 900 s"),
    ],
)
def test_what_is_not_known_is_a_gap_with_its_reason(changes, offer, field_name, kind, reason):
    supply = observe(Table(**changes))
    gap = getattr(supply.offers[offer], field_name)
    assert isinstance(gap, Gap)
    assert gap.kind is kind
    assert reason in gap.reason
    assert gap in supply.gaps[offer]
    with pytest.raises(DataGapError, match=r"east: a \("):
        planning_arrays(supply, ["east"], [offer[1:]], leave_out_gaps=False)


def test_an_unknown_quota_pool_is_a_gap():
    supply = observe(Table(sold={"x": ("east-a",)}), configs=("x",))
    assert "no quota pool" in supply.offers["east", "x", Market.ON_DEMAND].available.reason


def test_a_busy_source_is_asked_again_and_a_denied_one_is_not():
    pauses = []
    busy = Table(price=[CloudBusyError("throttled"), CloudBusyError("throttled"), {"a": 1.0}])
    assert value(observe(busy, sleep=pauses.append).offers[OFFER].price_usd_per_h) == 1.0
    assert pauses == [1.0, 3.0]
    always = Table(price=CloudBusyError("throttled"))
    assert "throttled" in observe(always).offers[OFFER].price_usd_per_h.reason
    assert always.calls.count("price") == 3
    denied = Table(price=ProvisionError("denied"))
    observe(denied)
    assert denied.calls.count("price") == 1


def test_offers_of_one_pool_share_it():
    supply = observe(Table())
    pool = next(p for p in supply.pools if p.pool == "pool")
    assert pool.free_vcpus == 30
    assert pool.vcpus[OFFER] == 4
    assert supply.pool_excess({OFFER: 3, ("east", "b", Market.ON_DEMAND): 2}) == ()
    assert supply.pool_excess({OFFER: 4, ("east", "b", Market.ON_DEMAND): 2}) == (pool,)
    assert observe(Table(limit={})).pools == ()


def test_shared_quotas_become_pools_of_the_allocation():
    supply = observe(Table())
    columns = [("a", Market.ON_DEMAND), ("b", Market.ON_DEMAND), ("a", Market.SPOT)]
    # Of the spot pool there is one column only: its availability says it already.
    assert pools_of(supply, ["east"], columns) == (
        Pool(name="vCPU quota pool", region="east", limit=30.0, units=(("a", 4.0), ("b", 8.0))),
    )
    both = [*columns, ("b", Market.SPOT)]
    assert [pool.units for pool in pools_of(supply, ["east"], both)][1] == (("a@spot", 4.0), ("b@spot", 8.0))
    assert pools_of(supply, ["west"], columns) == ()
    crowded = observe(Table(others={"pool": 50}))
    assert [pool.limit for pool in pools_of(crowded, ["east"], columns)] == [0.0]
    running = observe(Table(others={"pool": 50}), held={OFFER: 2, ("east", "b", Market.ON_DEMAND): 1})
    assert [pool.limit for pool in pools_of(running, ["east"], columns)] == [2 * 4.0 + 8.0]


@pytest.mark.parametrize(("others", "a", "b"), [(50, 3, 0), (30, 3, 0), (28, 3, 1)])
def test_beyond_a_lowered_quota_there_is_what_runs_and_nothing_to_swap_it_for(others, a, b):
    """Of 40 vCPUs others use so many; three nodes of 4 run. Free are fewer than 12, or just those."""
    supply = observe(Table(others={"pool": others}), held={OFFER: 3})
    assert value(supply.offers[OFFER].available) == a
    assert value(supply.offers["east", "b", Market.ON_DEMAND].available) == b


def test_ages_can_be_allowed_to_be_longer():
    old = Table(as_of=START - timedelta(days=30))
    year_s = 365 * 86400.0
    ages = MaxAge(price_s=year_s, spot_s=year_s, offering_s=year_s, quota_s=year_s, use_s=year_s)
    supply = observe(old, configs=("a",), max_age=ages)
    assert supply.gaps == {}
    assert supply.offers[OFFER].available.as_of == START - timedelta(days=30)


def test_arrays_hold_what_is_known_and_name_what_is_left_out():
    columns = [("a", Market.ON_DEMAND), ("a", Market.SPOT), ("b", Market.SPOT), ("c", Market.ON_DEMAND)]
    arrays = planning_arrays(observe(Table()), ["east"], columns, leave_out_gaps=True)
    np.testing.assert_array_equal(arrays.available, [[7, 2, 0, 0]])
    np.testing.assert_array_equal(arrays.price_usd_per_h, [[1.0, 0.4, np.nan, np.nan]])
    assert arrays.left_out == (("east", "b", Market.SPOT),)
    lowered = lower(arrays, ["east"], columns, {OFFER: 3, SPOT: 9, ("west", "a", Market.SPOT): 0})
    np.testing.assert_array_equal(lowered.available, [[3, 2, 0, 0]])
    np.testing.assert_array_equal(arrays.available, [[7, 2, 0, 0]])


def test_nodes_that_run_are_never_left_out_for_want_of_data():
    supply = observe(Table(price={}), held={OFFER: 2})
    with pytest.raises(DataGapError, match="while 2 nodes of it run") as caught:
        planning_arrays(supply, ["east"], [("a", Market.ON_DEMAND)], leave_out_gaps=True)
    assert caught.value.fix


def test_what_was_not_observed_is_a_gap():
    with pytest.raises(DataGapError, match="was not observed"):
        planning_arrays(observe(Table()), ["mars"], [("a", Market.SPOT)], leave_out_gaps=True)


def test_markets_are_part_of_names():
    for market in Market:
        assert split_market(market_name("g5.xlarge", market)) == ("g5.xlarge", market)
    assert market_name("t", Market.SPOT) == "t@spot"


def test_running_counts_whole_instances_that_stay():
    world = World()
    world.apply(
        plan(wanted(ONE, 2, market=Market.SPOT), wanted(TWO, 1), wanted(THREE, 1, region="west")), limits(max_nodes=30)
    )
    nodes = [n for region in ("east", "west") for n in world.cloud.describe(FLEET, region).nodes]
    assert running_of(nodes) == (
        Running(template="d-one@spot", region="east", count=2),
        Running(template="d-two", region="east", count=1),
        Running(template="p-three", region="west", count=1),
    )
    assert running_of(n for n in nodes if n.tags.node == 0)[-1].template == "d-one@spot"
    noticed = [replace(n, interrupted=n.market is Market.SPOT) for n in nodes]
    assert [r.template for r in running_of(noticed)] == ["d-two", "p-three"]
    assert holdings(nodes) == {
        ("east", "a", Market.SPOT): 2,
        ("east", "a", Market.ON_DEMAND): 1,
        ("east", "b", Market.ON_DEMAND): 1,
        ("west", "b", Market.ON_DEMAND): 2,
        ("west", "c", Market.ON_DEMAND): 1,
    }


def test_an_allocation_becomes_what_the_fleet_wants():
    found = wanted_of([InstanceCount(template="d-one@spot", region="east", count=2)], {"d-one": ONE})
    assert found == (wanted(ONE, 2, market=Market.SPOT),)
    with pytest.raises(InputError, match=r"instances\[0\]: unknown template 'd-on'.*d-one"):
        wanted_of([InstanceCount(template="d-on", region="east", count=2)], {"d-one": ONE})
