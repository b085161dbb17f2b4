"""Requests of a scenario: seeded, of the stated rate and lengths, each model for itself."""

from __future__ import annotations

import numpy as np
import pytest

from coral_core.config.requests import request_traces
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import Scenario, load_scenario


def traces(*, seed=0, models=None, **fields):
    data = load_scenario("tiny").model_dump()
    for index, change in (models or {}).items():
        data["models"][index].update(change)
    scenario = Scenario.model_validate({**data, "epochs": {"count": 5, "duration_s": 400}, **fields})
    return request_traces(resolve_scenario(scenario), seed=seed)


def same(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "input_tokens", "output_tokens")
    )


def test_rates_and_lengths_are_those_of_the_scenario():
    found = traces()
    assert list(found) == ["phi-4", "gpt-oss-20b", "qwen3-32b"]
    for name, (prompt, response) in {"phi-4": (1154.7, 211.1), "qwen3-32b": (600, 150)}.items():
        trace = found[name]
        # 20,000 requests: about 0.7% standard error of a Poisson count
        assert len(trace) == pytest.approx(20_000, rel=0.03)
        assert 1990 < trace.arrival_s[-1] < 2000
        assert (np.diff(trace.arrival_s) >= 0).all()
        assert trace.input_tokens.mean() == pytest.approx(prompt, rel=0.05)
        assert trace.output_tokens.mean() == pytest.approx(response, rel=0.05)


def test_a_seed_repeats_and_models_do_not_disturb_each_other():
    first = traces(seed=1)
    assert all(same(first[name], trace) for name, trace in traces(seed=1).items())
    assert not same(first["phi-4"], traces(seed=2)["phi-4"])
    faster = traces(seed=1, models={1: {"requests_per_s": 3}})
    assert same(first["phi-4"], faster["phi-4"])
    assert len(faster["gpt-oss-20b"]) == pytest.approx(6000, rel=0.06)


def test_burstiness_and_spread_are_the_workloads():
    given = {"mean_input_tokens": 900, "mean_output_tokens": 1}
    steady = traces(models={0: {"lengths": given}}, workload={"burstiness": 0, "cv_tokens": 0.5})["phi-4"]
    assert len(steady) in {20_000, 20_001}  # the last gap ends at the horizon, but for float noise
    assert np.diff(steady.arrival_s) == pytest.approx(0.1)
    assert steady.input_tokens.std() / steady.input_tokens.mean() == pytest.approx(0.5, rel=0.1)
    assert (steady.output_tokens == 1).all()


def test_no_demand_has_no_requests():
    assert len(traces(models={0: {"requests_per_s": 0}})["phi-4"]) == 0


def test_no_request_exceeds_the_models_context():
    long = {"mean_input_tokens": 15_000, "mean_output_tokens": 1000}
    trace = traces(models={0: {"lengths": long}}, workload={"cv_tokens": 3})["phi-4"]
    assert (trace.input_tokens + trace.output_tokens).max() == 16_384
    assert min(trace.input_tokens.min(), trace.output_tokens.min()) >= 1


def test_a_trace_is_replayed_at_the_rate_from_its_start_again(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0000000,100,10\n"
        "2023-11-16 18:00:01.0000000,200,20\n"
        "2023-11-16 18:00:04.0000000,300,30\n"
    )
    change = {"lengths": {"trace": file}, "requests_per_s": 1.0}
    trace = traces(models={0: change}, epochs={"count": 1, "duration_s": 7})["phi-4"]
    # two gaps in 4 s are 0.5 requests/s: at 1 request/s the times halve, and a period lasts 3 s
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.5, 2, 3, 3.5, 5, 6, 6.5])
    assert trace.input_tokens.tolist() == [100, 200, 300, 100, 200, 300, 100, 200]
    assert same(trace, traces(seed=9, models={0: change}, epochs={"count": 1, "duration_s": 7})["phi-4"])
