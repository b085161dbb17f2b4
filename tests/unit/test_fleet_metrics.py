"""What fleets' records say to Prometheus: known figures with their labels, nothing for what is not known."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from artifacts.fleets import Outcome, RunResult, RunSteps, write_result, write_steps
from artifacts.keys import plan_group
from artifacts.leases import LeaseTerms, take_lease
from artifacts.plans import PLAN, write_plan
from artifacts.store import open_store
from coral_core.cli.fleet_metrics import metrics
from coral_core.errors import InputError
from tasks.fleet_metrics import METRICS, FleetMetrics, exposition

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


class Noon:
    def now(self):
        return NOW

    def monotonic_s(self):
        return 0.0


def plan(store, fleet, time):
    document = {
        "scenario": "tiny",
        "status": "optimal",
        "cost_usd_per_h": 20.5,
        "churn_usd_per_h": 1.0,
        "objective_usd_per_h": 21.5,
        "gap_frac": 0.001,
        "instances": [
            {"template": "d-1", "model": "m", "phase": "decode", "region": "east", "market": "spot", "count": 2},
            {"template": "d-2", "model": "m", "phase": "decode", "region": "east", "market": "spot", "count": 1},
        ],
        "shortfall": [{"model": "m", "phase": "decode", "frac": 0.25}],
        "coverage": [{"model": "m", "phase": "decode", "unit": "tokens/s", "demand": 100.0, "capacity": 75.0}],
    }
    decision = {"library": {"name": "tiny", "version": 1}, "explanation": {}}
    write_plan(store, fleet, time, plan=document, decision=decision, report_md="")


def steps(store, fleet, time):
    record = RunSteps(
        mode="apply",
        holder="me",
        provider="fake",
        account="1",
        plan_id="p",
        epoch=1,
        begun_at=time,
        cost_before_usd_per_h=None,
        steps=(),
    )
    write_steps(store, fleet, time, record)


def result(store, fleet, time, **changes):
    node = {"region": "east", "market": "spot", "tags": {"config": "1xL4"}}
    refused = {"region": "east", "config": "1xL4", "code": "InsufficientInstanceCapacity"}
    given = {"cost_usd_per_h": 12.5, "nodes": (node, node), "failures": (refused,), **changes}
    write_result(store, fleet, time, RunResult(outcome=Outcome.UNMET, reason="r", ended_at=time, **given))


def samples(store, *fleets):
    found = {}
    for family in text_string_to_metric_families(exposition(FleetMetrics(store, Noon(), fleets))):
        assert family.documentation == METRICS[family.name][0]
        for sample in family.samples:
            assert set(sample.labels) == {"fleet", *METRICS[family.name][1]}
            names = ("fleet", *METRICS[family.name][1])
            found[(sample.name, *(sample.labels[name] for name in names))] = sample.value
    return found


def test_a_fleet_that_acted_tells_what_was_planned_and_what_is_held():
    store = open_store("memory://metrics")
    earlier, later = NOW - timedelta(hours=2), NOW - timedelta(hours=1)
    plan(store, "blue", earlier)
    steps(store, "blue", earlier)
    result(store, "blue", earlier)
    plan(store, "blue", later)
    take_lease(store, "blue", holder="me", terms=LeaseTerms(duration_s=600), clock=Noon())
    found = samples(store)
    assert found["coral_records_readable", "blue"] == 1
    assert found["coral_plan_time_seconds", "blue"] == later.timestamp()
    assert found["coral_plan_cost_usd_per_h", "blue"] == 20.5
    assert found["coral_plan_instances", "blue", "m", "decode", "east", "spot"] == 3
    assert found["coral_plan_demand", "blue", "m", "decode", "tokens/s"] == 100
    assert found["coral_plan_capacity", "blue", "m", "decode", "tokens/s"] == 75
    assert found["coral_plan_shortfall_frac", "blue", "m", "decode"] == 0.25
    assert found["coral_run_time_seconds", "blue"] == earlier.timestamp()
    assert found["coral_fleet_cost_usd_per_h", "blue"] == 12.5
    assert found["coral_fleet_nodes", "blue", "east", "1xL4", "spot"] == 2
    assert found["coral_fleet_refused_starts", "blue", "east", "1xL4", "InsufficientInstanceCapacity"] == 1
    assert found["coral_runs", "blue", "unmet"] == 1
    assert found["coral_runs", "blue", "planned"] == 1
    assert found["coral_run_unfinished", "blue"] == 0
    assert found["coral_lease_until_seconds", "blue"] == NOW.timestamp() + 600


def test_what_is_not_known_has_no_sample():
    store = open_store("memory://metrics-unknown")
    plan(store, "green", NOW)
    found = samples(store)
    assert ("coral_fleet_cost_usd_per_h", "green") not in found
    assert ("coral_run_time_seconds", "green") not in found
    assert found["coral_lease_until_seconds", "green"] == 0
    steps(store, "green", NOW)
    result(store, "green", NOW, cost_usd_per_h=None, nodes=())
    found = samples(store)
    assert ("coral_fleet_cost_usd_per_h", "green") not in found
    assert found["coral_run_time_seconds", "green"] == NOW.timestamp()


def test_a_fleet_at_rest_for_days_still_tells_what_it_holds():
    store = open_store("memory://metrics-rest")
    long_ago = NOW - timedelta(days=9)
    plan(store, "blue", long_ago)
    steps(store, "blue", long_ago)
    result(store, "blue", long_ago)
    found = samples(store)
    assert found["coral_fleet_cost_usd_per_h", "blue"] == 12.5
    assert not [key for key in found if key[0] in {"coral_runs", "coral_fleet_refused_starts"}]


def test_a_run_that_died_and_records_that_cannot_be_read_show():
    store = open_store("memory://metrics-broken")
    plan(store, "blue", NOW)
    steps(store, "blue", NOW)
    store.put_if_absent(f"{plan_group('red', NOW)}/{PLAN}", b"{")
    found = samples(store)
    assert found["coral_run_unfinished", "blue"] == 1
    assert [key for key in found if key[1] == "red"] == [("coral_records_readable", "red")]
    assert found["coral_records_readable", "red"] == 0
    assert set(samples(store, "blue")) == {key for key in found if key[1] == "blue"}


def test_the_command_prints_once_and_refuses_what_is_no_address(capsys, tmp_path):
    store = open_store(tmp_path.as_uri())
    plan(store, "blue", NOW)
    metrics(once=True, store=tmp_path.as_uri())
    assert 'coral_plan_cost_usd_per_h{fleet="blue"} 20.5' in capsys.readouterr().out
    for text in ("here", ":1", "127.0.0.1:", "127.0.0.1:70000"):
        with pytest.raises(InputError, match="is no address"):
            metrics(listen=text, once=True, store=tmp_path.as_uri())


@pytest.mark.servers
def test_prometheus_is_answered_over_http(tmp_path):
    plan(open_store(tmp_path.as_uri()), "blue", NOW)
    coral = str(Path(sys.executable).parent / "coral")
    command = [coral, "fleet", "metrics", "--listen", "127.0.0.1:0", "--store", tmp_path.as_uri()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stderr.readline().split()[2].rstrip(";")
            with urllib.request.urlopen(url, timeout=120) as answer:
                text = answer.read().decode()
        finally:
            process.terminate()
        assert process.wait(timeout=120) == 143
    assert 'coral_plan_cost_usd_per_h{fleet="blue"} 20.5' in text
