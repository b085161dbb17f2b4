"""The flows that act, on a Prefect server: on an EC2 API server, and on a rehearsal whose runs are killed."""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from artifacts.fleets import FleetIdentity, Outcome, claim_fleet, list_runs
from artifacts.leases import Lease, LeaseTerms, take_lease
from artifacts.plans import list_plans, read_plan
from artifacts.store import open_store
from coral_core.clock import SystemClock
from coral_core.cloud.aws import Boto3Api
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import Settings
from coral_core.domain.fleet import FleetId
from tasks.apply import open_job, wanted_of_plan, whole_instances
from tasks.executor import InlineExecutor
from tasks.fleet import status_document
from tasks.library import build_library, build_spec_from_scenario
from tasks.observe import list_fleet
from tests.fakes.ec2_server import ACCOUNT, TEMPLATE, Rule, ec2_server
from tests.fakes.mortal_flow import AWAKE, Nursery
from tests.fakes.two_regions import both_runtimes
from tests.fakes.waiting import until

pytestmark = [
    pytest.mark.servers,
    # Prefect leaves sockets to the garbage collector, and in 3.9 uses what its own dependencies deprecate.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

REGIONS = ("us-east-1", "us-west-2")
QUICK = {"lease_s": 130.0, "clock_skew_s": 1.0, "poll_s": 0.05}
SPOT = "spot: {nodes: 4, default: {price_frac: 0.9, source: a guess, as_of: 2026-01-01}}\n"
LIMITS = {"max_nodes": 60, "max_usd_per_h": 60.0}


@pytest.fixture(scope="module")
def prefect():
    """A Prefect server of its own; the URL of its API."""
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=300):
        yield get_current_settings().api.url
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the scenario's library, to copy."""
    folder = tmp_path_factory.mktemp("library")
    resolved = resolve_scenario(load_scenario(both_runtimes(folder, 1)))
    build_library(build_spec_from_scenario(resolved), open_store(str(folder / "store")), InlineExecutor(processes=1))
    return folder / "store"


@pytest.fixture
def store(library, tmp_path):
    shutil.copytree(library, tmp_path / "store")
    return open_store(str(tmp_path / "store"))


@pytest.fixture(scope="module")
def ec2():
    with ec2_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def aws(ec2, monkeypatch):
    """The EC2 server with nothing on it, and settings that point to it."""
    ec2.clear()
    monkeypatch.setenv("CORAL_PROVIDER", "aws")
    monkeypatch.setenv("CORAL_AWS_LAUNCH_TEMPLATE", TEMPLATE)
    # The server lists at once what it has started, so there is no minute to wait for.
    monkeypatch.setattr("tasks.providers.AWS_SETTLE_S", 0.5)
    return ec2


@pytest.fixture
def rehearsal(store, tmp_path, monkeypatch):
    """The store of a fleet on the fake cloud, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORAL_PROVIDER", "fake")
    return store


def reallocate(store, scenario, **given):
    """The state in which a run ends."""
    from flows.parameters import ReallocateParameters
    from flows.reallocate import reallocate as flow

    params = {"store": store.url, "scenario": scenario, "fleet": "blue", "mode": "apply", "acting": QUICK, **LIMITS}
    return flow(ReallocateParameters(**{**params, **given}), return_state=True)


def teardown(store, **given):
    """The same of a teardown."""
    from flows.parameters import TeardownParameters
    from flows.teardown import teardown as flow

    params = {"store": store.url, "fleet": "blue", "acting": QUICK, **given}
    return flow(TeardownParameters(**{"confirm": params["fleet"], **params}), return_state=True)


def job_of(store, **settings):
    return open_job(Settings(**settings), store=store.url, fleet="blue", holder="a test")


def truth(store):
    """Whole instances by (template, region, market), and how many nodes there are besides."""
    job = job_of(store)
    fleet = FleetId(name="blue", account=job.provider.provisioner.account())
    nodes, _ = list_fleet(job.provider, fleet, REGIONS)
    live = [node for node in nodes if node.live]
    return whole_instances(live), len(live)


def wish(store):
    """The same of the newest plan."""
    wanted = wanted_of_plan(read_plan(store, "blue").plan)
    counts = {(w.spec.template_id, w.region, w.market): w.count for w in wanted}
    return counts, sum(len(w.spec.slots) * w.count for w in wanted)


def test_three_epochs_of_changing_demand_prices_and_capacity(prefect, store, aws, tmp_path):
    zones = [f"{region}{letter}" for region in REGIONS for letter in "abcdef"]
    costs = []

    def epoch(rate: float, more: str = "") -> None:
        state = reallocate(store, both_runtimes(tmp_path, rate, more))
        assert state.is_completed(), state
        assert truth(store) == wish(store)
        run = list_runs(store, "blue")[-1]
        assert run.outcome is Outcome.CONVERGED
        plan = read_plan(store, "blue").plan
        assert run.result.cost_usd_per_h == pytest.approx(plan["cost_usd_per_h"])
        assert all(row["frac"] == 0 for row in plan["shortfall"])
        costs.append(run.result.cost_usd_per_h)

    epoch(3)
    first = read_plan(store, "blue")
    assert {item["region"] for item in first.decision["supply"]["offers"]} == set(REGIONS)
    # g6 gets scarce and dearer, demand doubles: the same run is refused, plans again and gets what there is.
    aws.capacity.update({(zone, "g6.xlarge"): 1 for zone in zones})
    aws.price_factor["us-west-2", "g6.xlarge"] = 1.3
    aws.price_factor["us-east-1", "g5.xlarge"] = 0.9
    plans = len(list_plans(store, "blue"))
    epoch(6)
    runs = list_runs(store, "blue")
    assert len(list_plans(store, "blue")) > plans + 1
    assert Outcome.UNMET in {run.outcome for run in runs}
    refused = [failure for run in runs if run.result for failure in run.result.failures]
    assert {failure["refusal"] for failure in refused} == {"capacity"}
    aws.capacity.clear()
    aws.price_factor.clear()
    epoch(1, SPOT)  # spot nodes where EC2 quotes them
    assert {item["market"] for item in read_plan(store, "blue").plan["instances"]} == {"spot"}
    assert costs[2] < costs[0] < costs[1]

    assert "fleet blue is not confirmed" in teardown(store, confirm="").message
    assert teardown(store, dry_run=True, confirm="").result().message.startswith("dry run: ")
    assert status_document(job_of(store))["cost_usd_per_h"] == pytest.approx(costs[2])
    state = teardown(store)
    assert state.is_completed(), state
    assert [aws.machines(region) for region in REGIONS] == [[], []]
    assert aws.groups == {}
    assert "nothing is left in us-east-1, us-west-2" in state.message


def test_bad_credentials_are_named_and_change_nothing(prefect, store, aws, tmp_path):
    assert reallocate(store, both_runtimes(tmp_path, 1)).is_completed()
    before = {m.id for region in REGIONS for m in aws.machines(region)}
    for action, code, status, fix in (
        ("*", "AuthFailure", 401, "access key"),
        ("*", "ExpiredToken", 400, "renew"),
        ("RunInstances", "UnauthorizedOperation", 403, "grant"),  # found out in the middle of a run
    ):
        aws.rules[:] = [Rule(action=action, code=code, status=status, times=1000)]
        state = reallocate(store, both_runtimes(tmp_path, 6))
        assert state.is_failed()
        assert code in state.message
        assert fix in state.message
        assert {m.id for region in REGIONS for m in aws.machines(region)} == before
    failed = list_runs(store, "blue")[-1]
    assert (failed.outcome, "UnauthorizedOperation" in failed.result.reason) == (Outcome.FAILED, True)


def test_unknown_regions_other_accounts_and_missing_limits_are_refused(prefect, store, aws, tmp_path):
    one = both_runtimes(tmp_path, 1)
    state = teardown(store, regions=("us-esat-1",))
    assert state.is_failed()
    assert "did you mean" in state.message
    assert "us-east-1" in state.message
    state = reallocate(store, one, max_usd_per_h=None)
    assert "CORAL_MAX_USD_PER_H" in state.message
    state = reallocate(store, one, acting={**QUICK, "lease_s": 60.0})
    assert "too short" in state.message
    state = reallocate(store, one, max_nodes=1)
    assert "the plan passes the limit of 1 nodes" in state.message
    claim_fleet(store, FleetIdentity(fleet="red", provider="aws", account="999999999999"))
    claim_fleet(store, FleetIdentity(fleet="green", provider="gcp", account="project"))
    for state in (reallocate(store, one, fleet="red"), teardown(store, fleet="red", regions=REGIONS)):
        assert f"the credentials belong to account {ACCOUNT}, the fleet to 999999999999" in state.message
    assert "the fleet is on gcp, not on aws" in reallocate(store, one, fleet="green", provider="aws").message
    assert aws.count("RunInstances") == 0
    # Nothing was changed, so nobody has to wait for a lease to run out.
    for fleet in ("blue", "red", "green"):
        assert isinstance(take_lease(store, fleet, holder="x", terms=LeaseTerms(), clock=SystemClock()), Lease)


def test_machines_of_others_with_our_name_are_reported_and_stay(prefect, store, aws, tmp_path):
    api = Boto3Api(read_timeout_s=60.0)
    for tags in ({"coral:fleet": "blue"}, {"coral:fleet": "blue", "coral:node": "first", "coral:epoch": "-1"}):
        api.call(
            "ec2",
            "us-east-1",
            "run_instances",
            ImageId="ami-12345678",
            InstanceType="g5.xlarge",
            MinCount=1,
            MaxCount=1,
            TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}],
        )
    theirs = {m.id for m in aws.machines("us-east-1")}
    assert reallocate(store, both_runtimes(tmp_path, 1)).is_completed()
    assert {node["node_id"] for node in list_runs(store, "blue")[-1].result.foreign} == theirs
    assert teardown(store).is_completed()
    assert {m.id for region in REGIONS for m in aws.machines(region)} == theirs


def test_a_dry_run_lists_steps_and_costs_and_leaves_no_trace(prefect, store, aws, tmp_path):
    state = reallocate(store, both_runtimes(tmp_path, 1), dry_run=True)
    assert state.result().outcome == "dry_run"
    assert state.result().message == "dry run: 2 steps, from 0.00 USD/h (measured) to 3.22 USD/h (predicted)"
    assert aws.count("RunInstances") == 0
    assert list_runs(store, "blue") == []
    assert store.list_keys("leases") == store.list_keys("fleets") == []


def test_a_run_beside_another_ends_saying_who_acts(prefect, store, aws, tmp_path):
    lease = take_lease(store, "blue", holder="the night shift", terms=LeaseTerms(), clock=SystemClock())
    for state in (reallocate(store, both_runtimes(tmp_path, 1)), teardown(store, regions=REGIONS)):
        assert (state.name, state.is_completed()) == ("LeaseHeld", True)
        assert "fleet blue is being changed by the night shift since" in state.message
        assert state.result().outcome == "lease_held"
    assert aws.count("RunInstances") == 0
    lease.give_back()
    assert reallocate(store, both_runtimes(tmp_path, 1)).is_completed()


def test_the_command_line_runs_the_flow(prefect, rehearsal, tmp_path, capsys):
    from coral_core.cli.entry import run

    command = ["reallocate", "--scenario", both_runtimes(tmp_path, 1), "--store", rehearsal.url, "--fleet", "blue"]
    limits = ["--max-nodes", "20", "--max-usd-per-h", "20", "--json"]
    assert run([*command, *limits]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "planned"
    assert run([*command, *limits, "--mode", "apply"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "converged"
    assert truth(rehearsal) == wish(rehearsal)
    take_lease(rehearsal, "blue", holder="the night shift", terms=LeaseTerms(), clock=SystemClock())
    assert run([*command, "--mode", "apply", *limits[:-1]]) == 7
    assert "fleet blue is being changed by the night shift" in capsys.readouterr().out
    assert run([*command, "--mode", "apply"]) == 2
    assert "max_nodes is not set" in capsys.readouterr().err


# Approval ------------------------------------------------------------------------------------------------------------


def paused_run(known, run):
    """The id of the newest paused run that is not known yet; None where `run` ends first."""
    from prefect.client.orchestration import get_client

    def newest():
        for found in client.read_flow_runs():
            if found.state.is_paused() and (found.id, found.state.id) not in known:
                known.add((found.id, found.state.id))
                return [found.id]
        return [None] if run.done() else []

    with get_client(sync_client=True) as client:
        return until(newest, "a run is paused", look_s=0.2)[0]


def form_of(run_id):
    """What the page of a paused run shows in its form."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        keys = client.read_flow_run(run_id).state.state_details.run_input_keyset
        texts = client.request("GET", f"/flow_runs/{run_id}/input/{keys['description']}").json()
    return {"description": texts}


def answer(run_id, **given):
    from prefect.flow_runs import resume_flow_run

    resume_flow_run(run_id, run_input={"comment": "seen", **given})


ASKED = {"mode": "approve", "acting": QUICK}


def test_a_plan_is_carried_out_once_it_is_approved(prefect, rehearsal, tmp_path):
    known = set()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(reallocate, rehearsal, both_runtimes(tmp_path, 1), **ASKED)
        paused = paused_run(known, run)
        assert truth(rehearsal) == ({}, 0)
        assert rehearsal.list_keys("leases") == []  # nobody is kept waiting by a question
        question = form_of(paused)["description"]
        assert question.startswith("Plan of fleet blue: 3.22 USD/h")
        assert "The fleet costs 0.00 USD/h now (measured). 2 steps:" in question
        assert question.count("\n- start ") == 2
        answer(paused, approve=True)
        assert run.result().is_completed(), run.result()
    assert truth(rehearsal) == wish(rehearsal)
    (done,) = list_runs(rehearsal, "blue")
    assert (done.mode, done.outcome) == ("approve", Outcome.CONVERGED)


def test_declined_and_unanswered_plans_change_nothing(prefect, rehearsal, tmp_path):
    known = set()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(reallocate, rehearsal, both_runtimes(tmp_path, 1), **ASKED)
        answer(paused_run(known, run), approve=False)
        assert (run.result().name, run.result().message) == ("Declined", "declined: seen")
    state = reallocate(rehearsal, both_runtimes(tmp_path, 1), approval_timeout_s=1, **ASKED)
    # The server's own words, whatever a run says that was paused for too long.
    assert (state.is_failed(), state.message) == (True, "The flow was unanswered and never resumed.")
    assert list_runs(rehearsal, "blue")[-1].result.reason == "nobody answered within 1 s"
    assert [run.outcome for run in list_runs(rehearsal, "blue")] == [Outcome.DECLINED, Outcome.UNANSWERED]
    assert truth(rehearsal) == ({}, 0)


def test_nobody_is_asked_about_a_plan_beyond_the_limits(prefect, rehearsal, tmp_path):
    state = reallocate(rehearsal, both_runtimes(tmp_path, 1), **{**ASKED, "max_nodes": 1})
    assert state.is_failed()
    assert "the plan passes the limit of 1 nodes" in state.message


def test_a_plan_approved_too_late_is_made_and_asked_about_again(prefect, rehearsal, tmp_path):
    known = set()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(reallocate, rehearsal, both_runtimes(tmp_path, 1), plan_max_age_s=6.0, **ASKED)
        late = paused_run(known, run)
        time.sleep(6.0)
        answer(late, approve=True)
        while (asked := paused_run(known, run)) is not None:  # on a slow machine other answers, too, may be late
            answer(asked, approve=True)
        assert run.result().is_completed(), run.result()
    *outdated, last = [run.outcome for run in list_runs(rehearsal, "blue")]
    assert (set(outdated), last) == ({Outcome.OUTDATED}, Outcome.CONVERGED)
    assert truth(rehearsal) == wish(rehearsal)


# Killed runs ---------------------------------------------------------------------------------------------------------

MORTAL = {"lease_s": 15.0, "clock_skew_s": 0.2, "poll_s": 0.1}


@pytest.fixture(scope="module")
def nursery(prefect, tmp_path_factory):
    with Nursery({"PREFECT_API_URL": prefect, "CORAL_PROVIDER": "fake"}, tmp_path_factory.mktemp("nursery")) as running:
        yield running


def mortal_params(folder, rate):
    given = {"scenario": both_runtimes(folder, rate), "fleet": "blue", "mode": "apply", "acting": MORTAL, **LIMITS}
    return {**given, "store": str(folder / "store")}


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_run_killed_at_any_step_is_continued_by_the_next(nursery, store, tmp_path, monkeypatch, stride):
    """Around every call that starts or stops nodes, on the way from three instances to one; each on a copy of its own."""
    base = tmp_path / "base"
    base.mkdir()
    shutil.copytree(tmp_path / "store", base / "store")
    assert nursery.run(mortal_params(base, 3), cwd=base)["name"] == "Completed"
    folders = []
    for step in range(1, 100, stride):
        folder = tmp_path / f"step-{step}"
        shutil.copytree(base, folder)
        first = nursery.run(mortal_params(folder, 1), cwd=folder, die_at=step)
        if first["code"] == 0:
            assert first["name"] == "Completed"
            break
        assert first["code"] == -signal.SIGKILL
        assert list_runs(open_store(str(folder / "store")), "blue")[-1].outcome is Outcome.UNFINISHED
        folders.append(folder)
    assert len(folders) >= 2
    time.sleep(MORTAL["lease_s"] + MORTAL["clock_skew_s"])
    for folder in folders:
        second = nursery.run(mortal_params(folder, 1), cwd=folder)
        assert second["name"] == "Completed", second
        monkeypatch.chdir(folder)
        here = open_store(str(folder / "store"))
        assert truth(here) == wish(here)
        assert [run.outcome for run in list_runs(here, "blue")][-2:] == [Outcome.INTERRUPTED, Outcome.CONVERGED]


def test_a_run_that_hangs_keeps_others_out_for_its_lease_only_and_stops_when_it_wakes(
    nursery, store, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    params = mortal_params(tmp_path, 1)
    nursery.begin(params, cwd=tmp_path, hang_at=2)  # just after it has started a node
    until(lambda: truth(store)[1], "a node is started")
    hung_at = time.monotonic()
    early = nursery.run(params, cwd=tmp_path)
    assert early["name"] == "LeaseHeld"
    time.sleep(max(0.0, hung_at + MORTAL["lease_s"] + MORTAL["clock_skew_s"] - time.monotonic()))
    assert nursery.run(params, cwd=tmp_path)["name"] == "Completed"
    (tmp_path / AWAKE).touch()
    woken = nursery.ended()
    assert woken["name"] == "LeaseLost"
    assert "holds it since" in woken["message"]
    assert truth(store) == wish(store)
    assert [run.outcome for run in list_runs(store, "blue")] == [Outcome.INTERRUPTED, Outcome.CONVERGED]


def test_of_two_runs_at_once_one_acts_and_the_other_says_why_not(nursery, store, tmp_path, monkeypatch):
    params = mortal_params(tmp_path, 3)
    params["acting"] = {**MORTAL, "lease_s": 130.0}
    for _ in range(2):
        nursery.begin(params, cwd=tmp_path, hang_at=1)
    loser = nursery.ended()
    (tmp_path / AWAKE).touch()  # the other has come by
    assert (nursery.ended()["name"], loser["name"]) == ("Completed", "LeaseHeld")
    assert re.search(r"being changed by flow run reallocate-rate-3 at .* \(process \d+\) since", loser["message"])
    monkeypatch.chdir(tmp_path)
    assert truth(store) == wish(store)
