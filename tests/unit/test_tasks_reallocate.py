"""From what is seen to a plan, and whether an approved plan still holds."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from artifacts.demand import append_demand
from artifacts.fleets import FleetIdentity, Outcome, claim_fleet, list_runs
from artifacts.keys import time_text
from artifacts.library import open_library
from artifacts.plans import list_plans
from artifacts.store import open_store
from coral_core.clock import ManualClock
from coral_core.cloud.fake import FakeCloud, FakeEngine
from coral_core.cloud.observe import Sources
from coral_core.cloud.supply import Gap, GapKind, Reading
from coral_core.config.demand import DemandSpec
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.hardware import Market
from coral_core.errors import DataGapError, InputError, ProvisionError, StoreError
from coral_core.forecast import DemandSample
from tasks.apply import Job, carry_out, take
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.observe import cost_usd_per_h, gap_lines, with_observed_prices
from tasks.providers import Provider, rehearsal_zones, stated_supply
from tasks.reallocate import (
    Wish,
    check_acting,
    dry_run,
    goal_of,
    nodes_by_offer,
    plan_from,
    record_plan,
    record_unacted,
    see,
    why_outdated,
)
from tests.fakes.acting_cases import PATIENCE
from tests.fakes.fleet_cases import START
from tests.fakes.two_regions import two_regions

ZONES = {region: zones for region, zones in rehearsal_zones().items() if region in {"us-east-1", "us-west-2"}}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenario")
    resolved = resolve_scenario(load_scenario(two_regions(folder, 1)))
    store = open_store(f"memory://{uuid.uuid4().hex}")
    build_library(build_spec_from_scenario(resolved), store, InlineExecutor(processes=1))
    return resolved, open_library(store, "two-regions")


@pytest.fixture
def wish(library) -> Wish:
    resolved, snapshot = library
    return Wish(resolved=resolved, snapshot=snapshot, max_nodes=40, max_usd_per_h=50.0)


@pytest.fixture
def job() -> Job:
    clock = ManualClock(start=START)
    cloud = FakeCloud(clock=clock, zones=ZONES)
    provider = Provider(
        name="fake",
        provisioner=cloud,
        engine=FakeEngine(cloud=cloud),
        clock=clock,
        sleep=clock.advance,
        settle_s=60.0,
        supply=lambda resolved, snapshot: stated_supply(resolved, snapshot, ZONES, clock),
        notes=(),
    )
    store = open_store(f"memory://{uuid.uuid4().hex}")
    return Job(store=store, fleet="demo", provider=provider, patience=PATIENCE, holder="a test")


def at_rate(wish: Wish, rate: float) -> Wish:
    (model,) = wish.resolved.models
    other = replace(model, demand=replace(model.demand, requests_per_s=rate))
    return replace(wish, resolved=replace(wish.resolved, models=(other,)))


def run(job, wish):
    lease, seen = take(job), see(job, wish)
    stored = record_plan(job, plan_from(job, wish, seen))
    done = carry_out(job, lease, goal_of(job, wish, stored, seen, mode="apply"))
    lease.give_back()
    job.provider.clock.advance(1)
    return stored, done


def test_plans_follow_what_is_seen_and_count_what_runs(job, wish):
    first, done = run(job, wish)
    assert done.outcome is Outcome.CONVERGED
    assert first.plan["churn_usd_per_h"] > 0
    assert first.decision["running"] == []
    seen = see(job, wish)
    again = plan_from(job, wish, seen)
    assert again.plan["churn_usd_per_h"] == 0
    assert sum(item["count"] for item in again.decision["running"]) == len(again.plan["instances"])
    offers = {(o["region"], o["config"], o["market"]): o for o in again.decision["supply"]["offers"]}
    (used,) = nodes_by_offer(again.plan)
    mine = offers[used[0], used[1], used[2].value]
    assert mine["held"] == nodes_by_offer(again.plan)[used]
    assert mine["price_usd_per_h_source"] == "stated by scenario two-regions"
    assert mine["zones"] == list(ZONES[used[0]])
    assert done.cost_usd_per_h == pytest.approx(first.plan["cost_usd_per_h"])


def test_rented_nodes_are_planned_for_what_vllm_runs_and_a_rehearsal_for_all(job, wish):
    rehearsed = plan_from(job, wish, see(job, wish))
    assert rehearsed.decision["runtimes"]["allowed"] is None
    rented = replace(job, provider=replace(job.provider, name="aws"))
    outcome = plan_from(rented, wish, see(rented, wish))
    assert outcome.decision["runtimes"]["allowed"] == ["vllm"]
    assert {item["runtime"] for item in outcome.plan["instances"]} <= {"vllm"}
    assert [note for note in outcome.plan["notes"] if "the library has none made for it" in note]


def test_a_cost_limit_makes_a_shortfall_and_never_a_dearer_plan(job, wish):
    tight = replace(at_rate(wish, 6), max_usd_per_h=5.0)
    plan = plan_from(job, tight, see(job, tight)).plan
    assert plan["cost_usd_per_h"] <= 5.0
    assert max(row["frac"] for row in plan["shortfall"]) > 0


def test_what_refusals_have_shown_bounds_the_next_plan(job, wish):
    seen = see(job, wish)
    (offer,) = nodes_by_offer(plan_from(job, wish, seen).plan)
    lowered = {offer: 1}
    outcome = plan_from(job, wish, seen, lowered)
    assert nodes_by_offer(outcome.plan).get(offer, 0) <= 1
    assert outcome.decision["lowered"] == [{"region": offer[0], "config": offer[1], "market": "on_demand", "nodes": 1}]


def test_a_dry_run_lists_steps_and_both_costs_and_writes_nothing(job, wish):
    found = dry_run(job, wish)
    assert {line.split()[0] for line in found.steps} == {"start"}
    assert (found.cost_now_usd_per_h, found.cost_planned_usd_per_h) == (0.0, found.outcome.plan["cost_usd_per_h"])
    assert job.store.list_keys("") == []
    assert "start" not in job.provider.provisioner.calls
    run(job, wish)
    assert dry_run(job, wish).steps == ()
    unlimited = replace(wish, max_nodes=math.inf, max_usd_per_h=math.inf)
    assert dry_run(job, unlimited).steps == ()


def test_the_last_plan_may_stand_for_what_runs(job, wish):
    record_plan(job, plan_from(job, wish, see(job, wish)))
    job.provider.clock.advance(1)
    kept = plan_from(job, replace(wish, keep_running=True), see(job, wish))
    assert kept.plan["churn_usd_per_h"] == 0


@pytest.mark.parametrize(("later_s", "acts"), [(60.0, False), (86_400.0, True)])
def test_demand_falls_from_the_plan_in_force_and_not_from_one_that_was_only_asked_for(job, wish, later_s, acts):
    """Nor from one of the future: a clock was wrong when it was made, and demand would never fall again."""
    run(job, wish)
    asked = plan_from(job, at_rate(wish, 100.0), see(job, wish))
    stray = replace(job, provider=replace(job.provider, clock=ManualClock(start=START, elapsed_s=later_s)))
    stored = record_plan(stray, asked)
    if acts:
        job.store.put(f"plans/{job.fleet}/{time_text(stored.record.time)}/steps.json", b"{}")
    job.provider.clock.advance(600)
    now_s = job.provider.clock.now().timestamp()
    sample = DemandSample(time_s=now_s, duration_s=60.0, model="phi-4", requests_per_s=0.5)
    append_demand(job.store, job.fleet, [sample], source="gw")
    measured = replace(wish, demand=DemandSpec(method="last", down_s=600.0))
    [row] = plan_from(job, measured, see(job, wish)).decision["demand_sources"]
    assert row["previous_requests_per_s"] == wish.resolved.models[0].demand.requests_per_s


def test_a_damaged_last_plan_stops_only_those_who_need_it(job, wish):
    stored = record_plan(job, plan_from(job, wish, see(job, wish)))
    job.store.put(f"plans/{job.fleet}/{time_text(stored.record.time)}/plan.json", b"{")
    assert plan_from(job, wish, see(job, wish)).plan["instances"]
    with pytest.raises(StoreError, match="damaged"):
        plan_from(job, replace(wish, keep_running=True), see(job, wish))


def supply_without(job, what):
    """The stated supply, of which one source fails."""

    class Silent:
        def __getattr__(self, name):
            def fail(*_):
                raise ProvisionError("not allowed", fix="grant it")

            return fail

    inner = job.provider.supply

    def supply(resolved, snapshot):
        sources, ages = inner(resolved, snapshot)
        given = {name: getattr(sources, name) for name in ("prices", "spot", "offerings", "quotas")}
        return Sources(**{**given, what: Silent()}), ages

    return replace(job, provider=replace(job.provider, supply=supply))


@pytest.mark.parametrize("what", ["prices", "offerings"])
def test_a_supply_of_which_nothing_is_known_makes_no_plan(job, wish, what):
    with pytest.raises(DataGapError, match=r"nothing is known of any offer.*not allowed"):
        see(supply_without(job, what), wish)


def with_gap(seen, offer):
    gap = Gap(what="price", kind=GapKind.MISSING, reason="nobody says")
    state = replace(seen.supply.offers[offer], price_usd_per_h=gap)
    return replace(seen, supply=replace(seen.supply, offers={**seen.supply.offers, offer: state}))


def test_an_offer_that_is_not_known_is_left_out_by_name_unless_it_runs(job, wish):
    seen = see(job, wish)
    (offer,) = nodes_by_offer(plan_from(job, wish, seen).plan)
    blind = with_gap(seen, offer)
    outcome = plan_from(job, wish, blind)
    assert offer not in nodes_by_offer(outcome.plan)
    named = f"{offer[1]} (on_demand) in {offer[0]} is left out: price: missing, nobody says"
    assert named in outcome.plan["notes"]
    assert gap_lines(blind.supply) == [named]
    run(job, wish)
    with pytest.raises(DataGapError, match=r"while 4 nodes of it run: price: missing"):
        plan_from(job, wish, with_gap(see(job, wish), offer))


def test_an_approved_plan_holds_until_it_is_old_scarce_dear_or_unknown(job, wish):
    seen = see(job, wish)
    stored = record_plan(job, plan_from(job, wish, seen))
    nodes = nodes_by_offer(stored.plan)
    (offer, count), *_ = nodes.items()

    def why(seen=seen, wish=wish, max_age_s=600.0):
        return why_outdated(wish, stored, seen, max_age_s=max_age_s)

    def changed(**facts):
        state = replace(seen.supply.offers[offer], **facts)
        return replace(seen, supply=replace(seen.supply, offers={**seen.supply.offers, offer: state}))

    def reading(value):
        return Reading(value=value, source="s", as_of=START)

    assert why() == ""
    assert why(seen=replace(seen, at=seen.at + timedelta(seconds=601))) == "it is 601 s old, more than 600 s"
    assert f"it needs {count} {offer[1]}" in why(seen=changed(available=reading(count - 1)))
    assert why(seen=changed(available=reading(count))) == ""
    assert "is not known any more" in why(seen=with_gap(seen, offer))
    cost = stored.plan["cost_usd_per_h"]
    dearer = changed(price_usd_per_h=reading(seen.prices_usd_per_h[offer] * 1.2))
    assert why(seen=dearer) == f"it costs {cost * 1.2:.2f} USD/h now, {cost:.2f} when it was made"
    assert why(seen=changed(price_usd_per_h=reading(seen.prices_usd_per_h[offer] * 1.04))) == ""
    assert "more than the limit of 1" in why(wish=replace(wish, max_usd_per_h=1.0))
    record_unacted(job, stored, Outcome.OUTDATED, why(seen=dearer))
    (record,) = list_runs(job.store, "demo")
    assert (record.mode, record.outcome, list_plans(job.store, "demo")) == (
        "approve",
        Outcome.OUTDATED,
        [stored.record.time],
    )


def test_nothing_acts_without_limits_or_on_another_fleet(job, wish):
    check_acting(job, wish)
    for name in ("max_nodes", "max_usd_per_h"):
        with pytest.raises(InputError, match=f"{name}: {name} is not set.*CORAL_{name.upper()}"):
            check_acting(job, replace(wish, **{name: math.inf}))
    claim_fleet(job.store, FleetIdentity(fleet="demo", provider="aws", account="1"))
    with pytest.raises(InputError, match="the fleet is on aws, not on fake"):
        check_acting(job, wish)


def test_observed_prices_replace_the_catalogues(job, wish):
    seen = see(job, wish)
    resolved = with_observed_prices(wish.resolved, seen.supply)
    assert set(resolved.catalog.prices) == set(seen.supply.offers)
    assert {price.source for price in resolved.catalog.prices.values()} == {"stated by scenario two-regions"}
    assert np.isclose(
        resolved.catalog.prices["us-east-1", "g6.xlarge", Market.ON_DEMAND].price_usd_per_h,
        wish.resolved.catalog.prices["us-east-1", "g6.xlarge", Market.ON_DEMAND].price_usd_per_h,
    )


def test_the_cost_of_nodes_is_that_of_those_paid_for(job, wish):
    _, done = run(job, wish)
    seen = see(job, wish)
    assert cost_usd_per_h(seen.nodes, seen.prices_usd_per_h) == pytest.approx(done.cost_usd_per_h)
    assert cost_usd_per_h(seen.nodes, {}) is None
    assert cost_usd_per_h((), {}) == 0.0
