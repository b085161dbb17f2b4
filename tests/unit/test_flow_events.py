"""What the watch makes of the server's runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from prefect.client.schemas.objects import FlowRun
from prefect.states import Completed, Running

from flows.events import LEASE_HELD, runs_seen
from tasks.watch import RunsSeen

START = datetime(2030, 1, 1, tzinfo=UTC)


def flow_run(state, *, after_s: float) -> FlowRun:
    return FlowRun(flow_id=uuid4(), state=state, start_time=START + timedelta(seconds=after_s))


def test_a_run_that_found_the_lease_taken_has_seen_nothing():
    acted = flow_run(Completed(), after_s=0)
    kept_out = flow_run(Completed(name=LEASE_HELD), after_s=60)
    assert runs_seen([kept_out, acted]) == RunsSeen(running=False, last_start_s=START.timestamp())
    assert runs_seen([kept_out]) == RunsSeen(running=False, last_start_s=None)
    under_way = flow_run(Running(), after_s=90)
    assert runs_seen([under_way, kept_out, acted]) == RunsSeen(running=True, last_start_s=START.timestamp() + 90)
