"""One look at a fleet on the fake cloud, beside the plan that was carried out."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from artifacts.demand import append_demand
from artifacts.library import open_library
from artifacts.store import open_store
from coral_core.clock import ManualClock
from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.events import EventKind, what_holds
from coral_core.cloud.fake import FakeCloud, FakeEngine
from coral_core.config.demand import DemandSpec
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.forecast import DemandSample
from tasks.apply import Job, carry_out, take
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.providers import Provider, rehearsal_zones, stated_supply
from tasks.reallocate import Wish, goal_of, plan_from, record_plan, see
from tasks.teardown import release_of
from tasks.watch import Watched, look
from tests.fakes.acting_cases import PATIENCE
from tests.fakes.fleet_cases import START
from tests.fakes.two_regions import two_regions

ZONES = {region: zones for region, zones in rehearsal_zones().items() if region in {"us-east-1", "us-west-2"}}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    resolved = resolve_scenario(load_scenario(two_regions(tmp_path_factory.mktemp("scenario"), 1)))
    store = open_store(f"memory://{uuid.uuid4().hex}")
    build_library(build_spec_from_scenario(resolved), store, InlineExecutor(processes=1))
    return resolved, store


@pytest.fixture
def watched(built) -> Watched:
    resolved, store = built
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
    fleet = f"f{uuid.uuid4().hex[:8]}"
    return Watched(resolved=resolved, store=store, fleet=fleet, provider=provider, demand=DemandSpec())


def job_of(watched) -> Job:
    return Job(store=watched.store, fleet=watched.fleet, provider=watched.provider, patience=PATIENCE, holder="a test")


def run(watched, *, max_usd_per_h=50.0, rate=None):
    """Plan and carry it out, as a run in mode apply does."""
    resolved = watched.resolved
    if rate is not None:
        (model,) = resolved.models
        resolved = replace(resolved, models=(replace(model, demand=replace(model.demand, requests_per_s=rate)),))
    job = job_of(watched)
    snapshot = open_library(watched.store, "two-regions")
    wish = Wish(resolved=resolved, snapshot=snapshot, max_nodes=40, max_usd_per_h=max_usd_per_h)
    lease, seen = take(job), see(job, wish)
    stored = record_plan(job, plan_from(job, wish, seen))
    carry_out(job, lease, goal_of(job, wish, stored, seen, mode="apply"))
    lease.give_back()
    watched.provider.clock.advance(1)
    return stored


def measure(watched, rate):
    now_s = watched.provider.clock.now().timestamp()
    lengths = watched.resolved.models[0].demand.lengths
    sample = DemandSample(
        time_s=now_s,
        duration_s=60.0,
        model="phi-4",
        requests_per_s=rate,
        mean_input_tokens=lengths.mean_input_tokens,
        mean_output_tokens=lengths.mean_output_tokens,
    )
    append_demand(watched.store, watched.fleet, [sample], source=f"gw-{rate}")


def kinds(watched):
    return [condition.kind for condition in what_holds(look(watched)[0], tolerance_frac=0.1)]


def test_without_a_plan_nothing_holds_and_that_is_said(watched):
    found, notes = look(watched)
    assert what_holds(found, tolerance_frac=0.0) == ()
    assert notes == (f"fleet {watched.fleet} has no plan yet",)


def test_a_fleet_that_is_its_plan_is_no_news(watched):
    stored = run(watched)
    found, notes = look(watched)
    assert what_holds(found, tolerance_frac=0.1) == ()
    assert sum(found.wanted.values()) == sum(item["count"] for item in stored.plan["instances"])
    assert found.held["phi-4"] >= 1.0
    assert found.asked == {}
    assert notes == ("the demand of phi-4 is not watched: measurements are missing or stale",)


@pytest.mark.parametrize("finished", [True, False])
def test_a_fleet_that_was_torn_down_is_not_asked_for_again(watched, finished):
    run(watched)
    job = job_of(watched)
    lease, release = take(job), release_of(job)
    if finished:
        carry_out(job, lease, release.goal)
    else:
        died = replace(watched.provider, engine=Dying())
        with pytest.raises(KeyboardInterrupt):
            carry_out(replace(job, provider=died), lease, release.goal)
        watched.provider.provisioner.kill(watched.provider.provisioner.held()[0].node_id)
    found, notes = look(watched)
    assert what_holds(found, tolerance_frac=0.1) == ()
    assert notes == (f"fleet {watched.fleet} was torn down: nothing is watched until a run acts again",)
    watched.provider.clock.advance(600)
    run(watched)
    assert sum(look(watched)[0].wanted.values()) > 0


class Dying:
    """A serving side at whose first call the run dies."""

    def ready(self, instance):
        return Readiness.READY

    def set_weight(self, instance, weight):
        raise KeyboardInterrupt

    drain = ready


def test_dead_and_leaving_instances_are_seen(watched):
    run(watched)
    first, *_, last = watched.provider.provisioner.held()
    watched.provider.provisioner.interrupt(last.node_id)
    assert EventKind.SPOT_NOTICE in kinds(watched)
    watched.provider.provisioner.kill(first.node_id)
    assert EventKind.INSTANCE_DEAD in kinds(watched)


def test_what_the_serving_side_gives_up_is_news_though_its_nodes_run(watched):
    run(watched)
    failed = watched.provider.provisioner.held()[0].order.tags.instance_id
    watched.provider.engine.condemned.add(failed)
    [named] = [found for found in what_holds(look(watched)[0], tolerance_frac=0.1) if found.subject == failed]
    assert named.kind is EventKind.INSTANCE_DEAD
    assert "the serving side has given it up" in named.detail


def test_demand_is_measured_against_what_the_plan_holds(watched):
    run(watched)
    held = look(watched)[0].held["phi-4"]
    measure(watched, held * 1.05)
    assert kinds(watched) == []
    watched.provider.clock.advance(120)
    measure(watched, held * 1.2)
    assert kinds(watched) == [EventKind.DEMAND_ABOVE_PLAN]


def test_capacity_that_a_short_plan_lacked_is_news_when_it_can_be_had(watched, monkeypatch):
    scarce = replace(watched, provider=replace(watched.provider, supply=few(watched.provider.supply, nodes=1)))
    stored = run(scarce, rate=200.0)
    assert max(item["frac"] for item in stored.plan["shortfall"]) > 0
    assert kinds(scarce) == []
    assert set(kinds(watched)) == {EventKind.CAPACITY_BACK}


def few(supply, *, nodes):
    """The same supply with so many nodes of each configuration."""

    def scarce(resolved, snapshot):
        sources, ages = supply(resolved, snapshot)
        stated = sources.quotas
        fewer = replace(stated, nodes=dict.fromkeys(stated.nodes, nodes))
        return replace(sources, quotas=fewer), ages

    return scarce
