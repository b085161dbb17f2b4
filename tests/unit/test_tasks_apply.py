"""Runs that act: what they do under their lease, and what they record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from artifacts.fleets import Outcome, list_runs, read_identity, read_run, used_regions
from artifacts.keys import fleet_region_key, time_text
from artifacts.leases import LeaseTaken, LeaseTerms
from artifacts.plans import list_plans
from coral_core.cloud.fake import Fault, Trouble
from coral_core.cloud.ports import ApplyReport, ApplyStatus, LeaseLostError
from coral_core.cloud.tags import write_tags
from coral_core.config.settings import Settings
from coral_core.domain.fleet import FleetId
from coral_core.domain.hardware import Market
from coral_core.errors import InputError, ProvisionError
from tasks.apply import (
    Patience,
    apply_policy,
    carry_out,
    check_patience,
    holder_text,
    open_job,
    take,
    verified,
    wanted_of_plan,
)
from tasks.fleet import diff_document, history_rows, status_document
from tasks.observe import recent_failures
from tasks.teardown import release_of
from tests.fakes.acting_cases import PATIENCE, Acting, plan_document
from tests.fakes.fleet_cases import ACCOUNT, FLEET, ONE, THREE, TWO, plan, wanted


class Crash(BaseException):
    """The process is gone; nobody handles it."""


@pytest.fixture
def acting() -> Acting:
    return Acting()


def runs(acting):
    return list_runs(acting.store, FLEET.name)


def test_a_plan_is_carried_out_verified_and_recorded(acting):
    done = acting.run(wanted(ONE, 2), wanted(TWO, 1, region="west"))
    assert (done.outcome, done.again) == (Outcome.CONVERGED, False)
    assert done.cost_usd_per_h == pytest.approx(2 * 1.0 + 1.0 + 2.5)
    assert acting.world.fleet() == {("d-one", "east", "on_demand"): 2, ("d-two", "west", "on_demand"): 1}
    (run,) = runs(acting)
    assert (run.mode, run.outcome, run.planned) == ("apply", Outcome.CONVERGED, True)
    assert run.steps.cost_before_usd_per_h == 0.0
    assert sum(line.startswith("start ") for line in run.steps.steps) == 3
    assert {event["action"] for event in run.result.events} >= {"start", "weight"}
    assert {node["state"] for node in run.result.nodes} == {"running"}
    assert run.result.notes == ("a test",)
    assert done.result_url == acting.store.url_of(f"plans/demo/{done.result_url.split('/')[-2]}/result.json")
    assert used_regions(acting.store, FLEET.name) == ("east", "west")
    assert read_identity(acting.store, FLEET.name).account == ACCOUNT


def test_two_at_once_one_acts_and_the_other_says_why_not(acting):
    first, second = acting.job("first"), acting.job("second")
    lease = acting.lease(first)
    loser = take(second)
    assert isinstance(loser, LeaseTaken)
    assert "is being changed by first since 2026-11-29" in str(loser)
    stored = acting.record(wanted(ONE, 1))
    assert carry_out(first, lease, acting.goal(stored)).outcome is Outcome.CONVERGED


def test_a_run_that_loses_its_lease_stops_and_says_so(acting):
    job, other = acting.job("slow"), acting.job("quick")
    lease, stored = acting.lease(job), acting.record(wanted(ONE, 3))
    calls = []

    def overtake(operation):
        calls.append(operation)
        if calls.count("start") == 2:
            acting.world.cloud.before_call = None
            acting.world.clock.advance(400)
            acting.lease(other)

    acting.world.cloud.before_call = overtake
    done = carry_out(job, lease, acting.goal(stored))
    assert done.outcome is Outcome.LEASE_LOST
    assert "quick holds it since" in done.reason
    assert len(acting.world.cloud.held()) == 2  # the call that was under way, and no other


def test_a_lease_too_short_for_a_call_is_left_to_run_out(acting):
    job = acting.job()
    acting.world.cloud.call_timeout_s = 1000.0
    assert acting.run(wanted(ONE, 1), job=job).outcome is Outcome.LEASE_LOST
    assert isinstance(take(job), LeaseTaken)


def test_a_run_that_was_taken_for_dead_ends_beside_what_was_said_of_it(acting):
    job, other = acting.job("slow"), acting.job("quick")
    lease, stored = acting.lease(job), acting.record(wanted(ONE, 2))

    def overtake(operation):
        if operation == "start":
            acting.world.cloud.before_call = None
            acting.world.clock.advance(400)
            acting.run(wanted(ONE, 3), job=other)

    acting.world.cloud.before_call = overtake
    done = carry_out(job, lease, acting.goal(stored))
    assert done.outcome is Outcome.LEASE_LOST
    slow, quick = runs(acting)
    assert (slow.outcome, quick.outcome) == (Outcome.INTERRUPTED, Outcome.CONVERGED)
    assert done.result_url.endswith("result.json")


def test_a_run_whose_lease_ran_out_while_it_planned_says_nothing_of_others(acting):
    """The other one has begun and not ended; it must not be taken for dead."""
    slow, quick = acting.job("slow"), acting.job("quick")
    lease, stored = acting.lease(slow), acting.record(wanted(ONE, 1))
    acting.world.clock.advance(400)
    lease_of_quick, newer = acting.lease(quick), acting.record(wanted(ONE, 2))

    def barge_in(operation):
        if operation == "start":
            acting.world.cloud.before_call = None
            with pytest.raises(LeaseLostError, match="quick holds it since"):
                carry_out(slow, lease, acting.goal(stored))

    acting.world.cloud.before_call = barge_in
    assert carry_out(quick, lease_of_quick, acting.goal(newer)).outcome is Outcome.CONVERGED
    assert [run.outcome for run in runs(acting)] == [Outcome.PLANNED, Outcome.CONVERGED]


def test_a_dead_run_is_closed_and_its_tokens_are_used_again(acting):
    job = acting.job("dead")
    lease, stored = acting.lease(job), acting.record(wanted(TWO, 2))
    acting.world.cloud.lag_s = 200.0  # what the dead run has started is not listed for long

    def die(operation):
        if operation == "start" and len(acting.world.cloud.held()) == 3:
            raise Crash

    acting.world.cloud.after_call = die
    with pytest.raises(Crash):
        carry_out(job, lease, acting.goal(stored))
    acting.world.cloud.after_call = None
    (dead,) = runs(acting)
    assert dead.outcome is Outcome.UNFINISHED
    assert isinstance(take(acting.job("early")), LeaseTaken)
    acting.world.clock.advance(lease.left_s + PATIENCE.lease.skew_s)
    acting.world.cloud.lag_s = 1000.0  # nor for the next one
    acting.run(wanted(TWO, 2), job=acting.job("heir"))
    acting.world.cloud.lag_s = 0.0
    assert len(acting.world.cloud.held()) == 4
    closed, heir = runs(acting)
    assert (closed.outcome, closed.result.reason) == (
        Outcome.INTERRUPTED,
        "it died or was stopped; heir went on from there",
    )
    assert (heir.steps.plan_id, heir.steps.epoch) == (dead.steps.plan_id, dead.steps.epoch)


def test_after_a_dead_run_another_plan_gets_an_id_of_its_own(acting):
    job = acting.job("dead")
    lease, stored = acting.lease(job), acting.record(wanted(ONE, 2))
    acting.world.cloud.after_call = lambda operation: (_ for _ in ()).throw(Crash) if operation == "start" else None
    with pytest.raises(Crash):
        carry_out(job, lease, acting.goal(stored))
    acting.world.cloud.after_call = None
    acting.world.clock.advance(lease.left_s + PATIENCE.lease.skew_s)
    assert acting.run(wanted(ONE, 3)).outcome is Outcome.CONVERGED
    dead, heir = runs(acting)
    assert heir.steps.plan_id != dead.steps.plan_id
    assert acting.world.fleet() == {("d-one", "east", "on_demand"): 3}


@pytest.mark.parametrize("step", range(1, 30))
def test_wherever_a_run_dies_the_next_one_converges(acting, step):
    """From an old fleet to a new one: starts, weights, drains and stops, each with a crash before and after."""
    acting.run(wanted(ONE, 2), wanted(THREE, 1, region="west"))
    left = [step]

    def die(_operation):
        left[0] -= 1
        if left[0] == 0:
            raise Crash

    acting.world.cloud.before_call = acting.world.cloud.after_call = die
    goal = (wanted(ONE, 1), wanted(TWO, 1), wanted(THREE, 1, region="west"))
    job = acting.job("mortal")
    lease, stored = acting.lease(job), acting.record(*goal)
    try:
        carry_out(job, lease, acting.goal(stored))
        lease.give_back()
    except Crash:
        acting.world.clock.advance(max(lease.left_s, 0) + PATIENCE.lease.skew_s)
    acting.world.cloud.before_call = acting.world.cloud.after_call = None
    assert acting.run(*goal).outcome is Outcome.CONVERGED
    assert acting.world.fleet() == {
        ("d-one", "east", "on_demand"): 1,
        ("d-two", "east", "on_demand"): 1,
        ("p-three", "west", "on_demand"): 1,
    }
    assert len(acting.world.cloud.held(also_ending=False)) == 1 + 2 + 3
    assert Outcome.UNFINISHED not in {run.outcome for run in runs(acting)}


def test_refusals_are_recorded_and_believed_for_the_cool_down(acting):
    for zone in ("east-a", "east-b"):
        acting.world.cloud.capacity[zone, "c"] = 0
    done = acting.run(wanted(replace(ONE, template_id="d-c", slots=(replace(ONE.slots[0], config="c"),)), 1))
    assert (done.outcome, done.again) == (Outcome.UNMET, True)
    assert done.lowered == {("east", "c", Market.ON_DEMAND): 0}
    now = acting.world.clock.now()
    failures = recent_failures(acting.store, FLEET.name, now=now)
    assert {(f.zone, f.config, f.held) for f in failures} == {("east-a", "c", 0), ("east-b", "c", 0)}
    acting.world.clock.advance(2000)
    assert recent_failures(acting.store, FLEET.name, now=acting.world.clock.now()) == []


@pytest.mark.parametrize("trouble", [Trouble.DENIED, Trouble.EXPIRED])
def test_what_no_repetition_mends_is_a_failed_run_and_changes_nothing(acting, trouble):
    acting.run(wanted(ONE, 1))
    before = set(acting.world.cloud.machines)
    acting.world.cloud.faults.append(Fault(operation="start", trouble=trouble))
    with pytest.raises(ProvisionError, match=r"grant|renew"):
        acting.run(wanted(ONE, 2))
    assert isinstance(take(acting.job("next")), LeaseTaken), "what was under way may not be listed yet"
    assert set(acting.world.cloud.machines) == before
    failed = runs(acting)[-1]
    assert failed.outcome is Outcome.FAILED
    assert "UnauthorizedOperation" in failed.result.reason or "ExpiredToken" in failed.result.reason


def test_a_fleet_of_the_same_name_in_another_account_is_refused(acting):
    acting.run(wanted(ONE, 1))
    acting.world.cloud.owner = "222222222222"
    machines = dict(acting.world.cloud.machines)
    other = FleetId(name=FLEET.name, account="222222222222")
    with pytest.raises(ProvisionError, match=r"fleet demo: belongs to account 111111111111 \(fake\)"):
        acting.run(wanted(ONE, 2), fleet=other)
    with pytest.raises(ProvisionError, match="the credentials belong to account 222222222222"):
        release_of(acting.job())
    with pytest.raises(ProvisionError, match="the credentials belong to account 222222222222"):
        status_document(acting.job())
    assert acting.world.cloud.machines == machines


def test_a_plan_beyond_the_limits_starts_nothing(acting):
    acting.limits = replace(acting.limits, max_nodes=2)
    with pytest.raises(ProvisionError, match="passes the limit of 2 nodes"):
        acting.run(wanted(ONE, 3))
    acting.limits = replace(acting.limits, max_nodes=20, max_usd_per_h=2.9)
    with pytest.raises(ProvisionError, match=r"passes the limit of 2\.9 USD/h"):
        acting.run(wanted(ONE, 3))
    assert acting.world.cloud.machines == {}


def test_teardown_releases_all_everywhere_and_nothing_of_others(acting):
    acting.run(wanted(ONE, 2), wanted(TWO, 1, region="west"))
    theirs = write_tags(FLEET, next(iter(acting.world.cloud.machines.values())).order.tags)
    acting.world.cloud.plant("i-copied", region="east", tags=theirs, token="own")
    acting.world.cloud.plant("i-other", region="west", tags={"coral:fleet": "other"})
    acting.world.cloud.plant("i-broken", region="west", tags={"coral:fleet": FLEET.name, "coral:node": "x"})
    job = acting.job()
    found = release_of(job)
    assert found.goal.regions == ("east", "west")
    assert sum(line.startswith("stop ") for line in found.steps) == 3
    assert sum("left alone" in line for line in found.steps) == 2
    lease = acting.lease(job)
    done = carry_out(job, lease, found.goal)
    lease.give_back()
    assert (done.outcome, done.reason) == (Outcome.CONVERGED, "nothing is left in east, west")
    assert (done.cost_usd_per_h, done.plan_url) == (0.0, "")
    assert {m.node_id for m in acting.world.cloud.held(also_ending=False)} == {"i-copied", "i-other", "i-broken"}
    run = runs(acting)[-1]
    assert (run.mode, run.planned, len(run.result.foreign)) == ("teardown", False, 2)
    assert any("i-copied in east carries the fleet's name" in note for note in run.result.notes)
    assert run.time not in list_plans(acting.store, FLEET.name)


@pytest.mark.parametrize("name", ["plan.json", "decision.json"])
def test_a_damaged_plan_keeps_no_nodes_and_is_told(acting, name):
    acting.run(wanted(ONE, 2))
    job = acting.job()
    lease, stored = acting.lease(job), acting.record(wanted(ONE, 3))
    acting.world.cloud.before_call = lambda operation: (_ for _ in ()).throw(Crash) if operation == "start" else None
    with pytest.raises(Crash):
        carry_out(job, lease, acting.goal(stored))
    acting.world.cloud.before_call = None
    where = f"plans/{FLEET.name}/{time_text(stored.record.time)}/{name}"
    data = acting.store.get(where)
    acting.store.put(where, data[: len(data) // 2])
    acting.world.clock.advance(400)  # the dead run's lease is over
    found = status_document(job)
    assert [(row["running"], row["wanted"]) for row in found["counts"]] == [(2, None)]
    assert (found["cost_usd_per_h"], found["planned_usd_per_h"]) == (None, None)
    assert any(name in note and "damaged" in note for note in found["notes"])
    lease = acting.lease(job)
    done = carry_out(job, lease, release_of(job).goal)
    lease.give_back()
    assert (done.outcome, acting.world.cloud.held(also_ending=False)) == (Outcome.CONVERGED, [])
    assert [run.outcome for run in runs(acting)] == [Outcome.CONVERGED, Outcome.INTERRUPTED, Outcome.CONVERGED]


def test_a_damaged_note_of_a_region_still_names_it(acting):
    acting.run(wanted(ONE, 2))
    acting.store.put(fleet_region_key(FLEET.name, "east"), b"{")
    assert acting.run(wanted(ONE, 1)).outcome is Outcome.CONVERGED
    assert used_regions(acting.store, FLEET.name) == ("east", "west")


def test_a_fleet_that_never_was_cannot_be_torn_down(acting):
    with pytest.raises(InputError, match="never rented anything"):
        release_of(acting.job())
    assert release_of(acting.job(), ["east"]).steps == ()


@pytest.mark.parametrize(
    ("now", "there"), [((), "nothing"), ((wanted(ONE, 2),), "2 x d-one in east (on_demand)")], ids=["gone", "more"]
)
def test_a_run_that_says_it_has_converged_is_not_believed_unseen(acting, now, there):
    job, goal = acting.job(), (wanted(ONE, 1),)
    acting.run(*now)
    said = ApplyReport(
        status=ApplyStatus.CONVERGED,
        reason="the fleet is the plan",
        nodes=(),
        foreign=(),
        failures=(),
        unmet=(),
        lowered={},
    )
    outcome, reason = verified(job, plan(*goal), said, ("east", "west"))
    assert outcome is Outcome.FAILED
    assert reason == f"looked at again, the fleet is not the plan: it has {there}, not 1 x d-one in east (on_demand)"


@pytest.mark.parametrize(
    ("name", "patience", "message"),
    [
        ("demo", Patience(lease=LeaseTerms(duration_s=100.0)), r"lease_s: .*too short.*at least 160 s"),
        ("Demo", PATIENCE, "bad fleet name 'Demo'"),
        ("1demo", PATIENCE, "bad fleet name"),
    ],
)
def test_what_cannot_act_safely_is_refused_beforehand(acting, name, patience, message):
    with pytest.raises(InputError, match=message):
        check_patience(acting.job(fleet=name, patience=patience))
    check_patience(acting.job())


def test_status_shows_what_runs_against_what_is_wanted(acting):
    nothing = status_document(acting.job())
    assert (nothing["counts"], nothing["plan"], nothing["cost_usd_per_h"]) == (
        [],
        {"time": None, "mode": "none"},
        0.0,
    )
    acting.run(wanted(ONE, 2), wanted(TWO, 1))
    acting.world.clock.advance(3600)
    (victim, *_) = [m for m in acting.world.cloud.held() if m.order.tags.template_id == "d-two"]
    acting.world.cloud.kill(victim.node_id)
    acting.world.cloud.plant("i-x", region="east", tags={"coral:fleet": FLEET.name})
    found = status_document(acting.job())
    counts = {row["template"]: (row["running"], row["wanted"]) for row in found["counts"]}
    assert counts == {"d-one": (2, 2), "d-two": (0, 1)}
    assert (found["unhealthy"], found["plan"]["mode"], found["lease"]) == (1, "apply", None)
    sick = next(row for row in found["instances"] if row["condition"] != "up")
    assert (sick["template"], sick["condition"], sick["reason"]) == ("d-two", "failed", "one of its nodes has ended")
    assert all(row["age_s"] >= 3600 for row in found["instances"])
    assert found["cost_usd_per_h"] == pytest.approx(2 * 1.0 + (1.0 if victim.order.tags.config == "b" else 2.5))
    assert [node["node_id"] for node in found["foreign"]] == ["i-x"]
    held = take(acting.job("somebody"))
    lease = status_document(acting.job())["lease"]
    assert (lease["holder"], lease["over"]) == ("somebody", False)
    acting.world.clock.advance(400)
    assert status_document(acting.job())["lease"]["over"]
    held.give_back()


def test_status_shows_what_the_serving_side_has_given_up(acting):
    acting.run(wanted(ONE, 2))
    failed = acting.world.cloud.held()[0].order.tags.instance_id
    acting.world.engine.condemned.add(failed)
    found = status_document(acting.job())
    [sick] = [row for row in found["instances"] if row["condition"] != "up"]
    assert (sick["instance"], sick["condition"]) == (failed, "failed")
    assert "given it up" in sick["reason"]


def test_a_cost_with_an_unknown_price_is_unknown(acting):
    job, stored = acting.job(), acting.record(wanted(ONE, 1), supply=False)
    lease = acting.lease(job)
    assert carry_out(job, lease, acting.goal(stored)).cost_usd_per_h == 1.0
    assert status_document(job)["cost_usd_per_h"] is None


def test_diff_lists_what_would_be_done_and_history_what_was(acting):
    acting.run(wanted(ONE, 2))
    same = diff_document(acting.job())
    assert (same["steps"], same["in_order"]) == ([], False)  # its weights would be said again
    later = acting.record(wanted(ONE, 1), wanted(TWO, 1), cost_usd_per_h=4.5)
    found = diff_document(acting.job())
    assert [line.split()[0] for line in found["steps"]] == ["start", "weight", "drain", "stop"]
    assert (found["cost_now_usd_per_h"], found["cost_planned_usd_per_h"]) == (2.0, 4.5)
    assert diff_document(acting.job(), runs(acting)[0].time)["steps"] == []
    acting.record(wanted(ONE, 1), supply=False)
    with pytest.raises(InputError, match="made without looking at the cloud"):
        diff_document(acting.job())
    rows = history_rows(acting.job(), newest=10)
    assert [(row["mode"], row["outcome"]) for row in rows] == [
        ("apply", "converged"),
        ("plan", "planned"),
        ("plan", "planned"),
    ]
    assert rows[0]["cost_usd_per_h"] == 2.0
    assert rows[0]["duration_s"] > 0
    assert history_rows(acting.job(), newest=1)[0]["time"] == rows[-1]["time"]
    acting.store.put(f"plans/demo/{rows[0]['time']}/steps.json", b"{}")
    damaged = history_rows(acting.job(), newest=10)[0]
    assert damaged["outcome"] == "damaged"
    assert "steps.json" in damaged["reason"]
    assert later.record.time == read_run(acting.store, FLEET.name, later.record.time).time


def test_markets_and_phases_come_back_from_a_recorded_plan():
    parts = (wanted(ONE, 2, market=Market.SPOT), wanted(THREE, 1, region="west"))
    assert wanted_of_plan(plan_document(*parts)) == parts
    assert wanted_of_plan(None) == ()


def test_a_job_takes_what_is_not_named_from_the_settings_and_the_fleet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(fleet="blue", provider="fake")
    job = open_job(settings, holder=holder_text("a test"))
    assert (job.fleet, job.provider.name, job.patience) == ("blue", "fake", Patience())
    assert job.holder.startswith("a test at ")
    assert apply_policy(job, {}).settle_s == 0.0
    with pytest.raises(InputError, match="CORAL_GCP_PROJECT"):
        open_job(settings, provider="gcp", holder="x")
