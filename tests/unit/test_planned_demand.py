"""Planned demand from what is stored: forecast, hysteresis, what is unknown, what is broken."""

from __future__ import annotations

import math
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from artifacts.demand import append_demand, read_demand
from artifacts.keys import demand_group, demand_key, demand_time
from artifacts.plans import StoredPlan, list_plans, read_plan, write_plan
from artifacts.store import Store, open_store
from coral_core.config.demand import DemandSpec
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.errors import DataGapError, InputError, StoreConflictError
from coral_core.forecast import DemandSample
from tasks.demand import planned_demand

NOW = datetime(2030, 1, 2, 12, 0, tzinfo=UTC)
MODELS = ("phi-4", "gpt-oss-20b", "qwen3-32b")


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def resolved():
    return resolve_scenario(load_scenario("tiny"))


def sample(model, rate, *, ago_s=0.0, tokens=(None, None)):
    return DemandSample(
        time_s=NOW.timestamp() - ago_s,
        duration_s=60.0,
        model=model,
        requests_per_s=rate,
        mean_input_tokens=tokens[0],
        mean_output_tokens=tokens[1],
    )


def stated_lengths(resolved, name):
    (lengths,) = [m.demand.lengths for m in resolved.models if m.shape.name == name]
    return lengths.mean_input_tokens, lengths.mean_output_tokens


def record_all(store, resolved, rates, **changes):
    append_demand(
        store,
        "blue",
        [sample(m, r, tokens=stated_lengths(resolved, m), **changes) for m, r in rates.items()],
        source="gw",
    )


def last_plan(store, rates, *, ago_s) -> StoredPlan:
    time = NOW - timedelta(seconds=ago_s)
    plan = {"scenario": "tiny", "status": "optimal", "instances": [], "shortfall": []}
    plan |= dict.fromkeys(("cost_usd_per_h", "churn_usd_per_h", "objective_usd_per_h"), 0.0)
    demand = [{"model": m, "phase": p, "requests_per_s": r} for m, r in rates.items() for p in ("prefill", "decode")]
    decision = {"library": {"name": "tiny", "version": 1}, "explanation": {}, "demand": demand}
    write_plan(store, "blue", time, plan=plan, decision=decision, report_md="")
    return read_plan(store, "blue", list_plans(store, "blue")[-1])


def rates_of(found):
    return {model.shape.name: model.demand.requests_per_s for model in found.resolved.models}


def test_the_scenario_alone_reads_nothing(resolved, store):
    found = planned_demand(resolved, store, "blue", DemandSpec(), now=NOW)
    assert (found.resolved, found.notes) == (resolved, ())
    assert {row["source"] for row in found.rows} == {"scenario"}


def test_a_rise_is_followed_at_once_and_a_fall_slowly(resolved, store):
    record_all(store, resolved, {"phi-4": 30.0, "gpt-oss-20b": 4.0, "qwen3-32b": 10.0})
    last = last_plan(store, dict.fromkeys(MODELS, 10.0), ago_s=600)
    found = planned_demand(resolved, store, "blue", DemandSpec(method="last", down_s=1200), now=NOW, last=last)
    want = {"phi-4": 30.0, "gpt-oss-20b": 4 + 6 * math.exp(-0.5), "qwen3-32b": 10.0}
    assert rates_of(found) == pytest.approx(want)
    assert found.notes == ()
    row = {r["model"]: r for r in found.rows}["gpt-oss-20b"]
    assert (row["source"], row["previous_requests_per_s"], row["forecast_requests_per_s"]) == ("last", 10.0, 4.0)
    assert found.resolved.models[0].demand.lengths == resolved.models[0].demand.lengths


@pytest.mark.parametrize(("ago_s", "reason"), [(None, "was never recorded"), (3600, "is 3600 s old")])
def test_unknown_demand_is_held_or_the_scenarios_or_refused_as_stated(resolved, store, ago_s, reason):
    record_all(store, resolved, {"phi-4": 3.0, "gpt-oss-20b": 4.0})
    if ago_s:
        record_all(store, resolved, {"qwen3-32b": 99.0}, ago_s=ago_s)
    last = last_plan(store, dict.fromkeys(MODELS, 17.0), ago_s=60)
    specs = {how: DemandSpec(method="last", when_unknown=how) for how in ("hold", "scenario", "refuse")}

    held = planned_demand(resolved, store, "blue", specs["hold"], now=NOW, last=last)
    assert rates_of(held)["qwen3-32b"] == 17.0
    assert [n for n in held.notes if reason in n and "17 requests/s that the last plan held" in n]
    stated = planned_demand(resolved, store, "blue", specs["scenario"], now=NOW, last=last)
    assert rates_of(stated)["qwen3-32b"] == 10.0
    assert [n for n in stated.notes if reason in n and "10 requests/s of the scenario" in n]
    with pytest.raises(DataGapError, match=f"demand/blue: qwen3-32b: .*{reason}.*when_unknown: scenario"):
        planned_demand(resolved, store, "blue", specs["refuse"], now=NOW, last=last)
    with pytest.raises(DataGapError, match=f"{reason}.*no earlier plan holds"):
        planned_demand(resolved, store, "blue", specs["hold"], now=NOW)


def test_longer_requests_count_for_more_and_are_told(resolved, store):
    prompt, response = stated_lengths(resolved, "phi-4")
    record_all(store, resolved, {"gpt-oss-20b": 4.0, "qwen3-32b": 4.0})
    append_demand(store, "blue", [sample("phi-4", 10.0, tokens=(prompt, 1.5 * response))], source="other")
    found = planned_demand(resolved, store, "blue", DemandSpec(method="last"), now=NOW)
    assert rates_of(found)["phi-4"] == pytest.approx(15.0)
    assert ["phi-4: responses have" in note for note in found.notes] == [True]


def test_unknown_lengths_are_the_scenarios_and_told(resolved, store):
    append_demand(store, "blue", [sample(model, 0.0) for model in MODELS], source="gw")
    found = planned_demand(resolved, store, "blue", DemandSpec(method="ewma"), now=NOW)
    assert set(rates_of(found).values()) == {0.0}
    assert all("lengths of recent requests are not known" in note for note in found.notes)
    assert len(found.notes) == 3


def test_broken_lines_cost_themselves_only_and_are_told(resolved, store):
    (key,) = append_demand(store, "blue", [sample(model, 5.0) for model in MODELS], source="gw")
    whole = store.get(key)
    store.put(demand_key("blue", NOW - timedelta(seconds=60), "torn"), whole[: len(whole) // 2])
    store.put(
        demand_key("blue", NOW, "wrong"),
        b'{"time":"2030-01-02T11:00:00Z","duration_s":60,"model":"phi-4","requests_per_s":-1}\n{"x":1}\n',
    )
    store.put(demand_key("blue", NOW, "empty"), b"")
    store.put(f"{demand_group('blue', NOW)}/notes.txt", b"somebody's")
    append_demand(store, "blue", [sample("unserved", 5.0)], source="more")
    found = planned_demand(resolved, store, "blue", DemandSpec(method="last"), now=NOW)
    assert set(rates_of(found).values()) == {5.0}
    text = "\n".join(found.notes)
    for part in (
        "-torn.jsonl:2: ",
        "-wrong.jsonl:1: phi-4: requests_per_s is -1.0",
        "-empty.jsonl: is empty",
        "unserved too",
    ):
        assert part in text
    assert "-wrong.jsonl:2: " in text


def test_many_faults_are_counted_not_listed(resolved, store):
    record_all(store, resolved, dict.fromkeys(MODELS, 5.0))
    store.put(demand_key("blue", NOW, "bad"), b"?\n" * 100)
    found = planned_demand(resolved, store, "blue", DemandSpec(method="last"), now=NOW)
    assert "95 more lines of measured demand cannot be read" in found.notes
    assert sum("bad.jsonl" in note for note in found.notes) == 5


def test_only_the_stretches_asked_for_are_read_over_midnight_too(store):
    midnight_s = datetime(2030, 1, 2, tzinfo=UTC).timestamp()
    ends = [midnight_s + 900 * i for i in range(-200, 200)]
    samples = [DemandSample(time_s=t, duration_s=900.0, model="m", requests_per_s=1.0) for t in ends]
    keys = append_demand(store, "blue", samples, source="gw")
    assert len(keys) == 80
    assert append_demand(store, "blue", samples, source="gw") == keys
    window = (midnight_s - 1800, midnight_s + 1800)
    found = read_demand(store, "blue", [window, window])
    assert {s.time_s for s in found.samples} >= {t for t in ends if window[0] <= t <= window[1]}
    assert found.objects <= 3
    assert found.faults == ()


def test_a_writer_cannot_tell_two_things_of_one_time(store):
    append_demand(store, "blue", [sample("m", 1.0)], source="gw")
    with pytest.raises(StoreConflictError):
        append_demand(store, "blue", [sample("m", 2.0)], source="gw")
    with pytest.raises(InputError, match="source"):
        append_demand(store, "blue", [sample("m", 2.0)], source="a/b")


def test_keys_of_demand_are_laid_out_as_designed():
    key = demand_key("blue", NOW, "gw-1")
    assert key == "demand/blue/20300102/20300102T120000.000000Z-gw-1.jsonl"
    assert demand_time(key) == NOW
    assert demand_time("demand/blue/20300102/x.jsonl") is None
    assert demand_time("demand/blue/20300102/index.md") is None


def test_the_form_refuses_what_makes_no_sense():
    for change in ({"up_s": -1}, {"horizon_s": math.nan}, {"season": "year"}, {"seasons": 0}, {"extra": 1}):
        with pytest.raises(ValueError, match=next(iter(change))):
            DemandSpec(**change)
    assert DemandSpec(season="week").tuning.period_s == 7 * DemandSpec().tuning.period_s
