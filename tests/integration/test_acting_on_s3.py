"""Runs whose lease and records lie on a real S3 server."""

from __future__ import annotations

import uuid

import pytest

from artifacts.fleets import Outcome, list_runs
from artifacts.leases import LeaseTaken
from artifacts.store import open_store
from tasks.apply import carry_out, take
from tasks.fleet import history_rows, status_document
from tasks.teardown import release_of
from tests.fakes.acting_cases import PATIENCE, Acting
from tests.fakes.fleet_cases import FLEET, ONE, TWO, wanted
from tests.fakes.s3_servers import BUCKET, seaweedfs

pytestmark = pytest.mark.servers


class Crash(BaseException):
    """The process is gone."""


@pytest.fixture(scope="module")
def weed():
    with seaweedfs() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


def test_a_life_of_a_fleet_with_its_records_on_s3(weed):
    acting = Acting(store=open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}"))
    assert acting.run(wanted(ONE, 2)).outcome is Outcome.CONVERGED
    job = acting.job("mortal")
    lease, stored = acting.lease(job), acting.record(wanted(ONE, 1), wanted(TWO, 1))

    def die(operation):
        if operation == "start":
            raise Crash

    acting.world.cloud.after_call = die
    with pytest.raises(Crash):
        carry_out(job, lease, acting.goal(stored))
    acting.world.cloud.after_call = None
    assert isinstance(take(acting.job("early")), LeaseTaken)
    acting.world.clock.advance(lease.left_s + PATIENCE.lease.skew_s)
    assert acting.run(wanted(ONE, 1), wanted(TWO, 1)).outcome is Outcome.CONVERGED
    assert status_document(acting.job())["cost_usd_per_h"] == pytest.approx(1.0 + 1.0 + 2.5)
    closing = acting.job()
    lease = acting.lease(closing)
    assert carry_out(closing, lease, release_of(closing).goal).outcome is Outcome.CONVERGED
    lease.give_back()
    outcomes = [run.outcome for run in list_runs(acting.store, FLEET.name)]
    assert outcomes == [Outcome.CONVERGED, Outcome.INTERRUPTED, Outcome.CONVERGED, Outcome.CONVERGED]
    assert [row["cost_usd_per_h"] for row in history_rows(acting.job(), newest=9)] == [2.0, None, 4.5, 0.0]
    assert acting.world.cloud.held(also_ending=False) == []
