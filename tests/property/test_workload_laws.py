"""Laws of traces: what is written is read back, statistics scale as they must, synthesis has the stated statistics."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.domain.workload import Trace
from coral_core.workload import (
    TokenMoments,
    TokenQuantiles,
    length_statistics,
    read_trace,
    scale_rate,
    synthesize,
)

REQUESTS = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(1, 200_000), st.integers(0, 50_000)), min_size=2, max_size=40
).filter(lambda rows: any(gap > 0 for gap, _, _ in rows[1:]))


def make_trace(rows: list[tuple[int, int, int]]) -> Trace:
    gaps_ms, prompts, responses = (np.array(column) for column in zip(*rows, strict=True))
    arrival_ms = np.cumsum(gaps_ms)
    return Trace(
        name="t",
        arrival_s=(arrival_ms - arrival_ms[0]) / 1000,
        input_tokens=prompts.astype(np.int64),
        output_tokens=responses.astype(np.int64),
        source="made",
    )


def as_azure(trace: Trace) -> str:
    stamps = np.datetime64("2023-11-16T18:15:46.680590", "us") + np.round(trace.arrival_s * 1e6).astype(
        "timedelta64[us]"
    )
    lines = zip(stamps, trace.input_tokens, trace.output_tokens, strict=True)
    body = "".join(f"{str(stamp).replace('T', ' ')},{prompt},{response}\n" for stamp, prompt, response in lines)
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + body


def as_plain(trace: Trace) -> str:
    lines = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    return "arrival_s,input_tokens,output_tokens\n" + "".join(f"{a},{i},{o}\n" for a, i, o in lines)


def as_mooncake(trace: Trace) -> str:
    lines = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    return "".join(
        json.dumps({"timestamp": a * 1000, "input_length": i, "output_length": o, "hash_ids": [1]}) + "\n"
        for a, i, o in lines
    )


@given(rows=REQUESTS, writer=st.sampled_from([as_azure, as_plain, as_mooncake]))
def test_what_is_written_is_read_back(rows, writer):
    trace = make_trace(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.trace"
        path.write_text(writer(trace))
        found = read_trace(path)
    np.testing.assert_allclose(found.arrival_s, trace.arrival_s, rtol=1e-12, atol=1e-9)
    np.testing.assert_array_equal(found.input_tokens, trace.input_tokens)
    np.testing.assert_array_equal(found.output_tokens, trace.output_tokens)


@given(rows=REQUESTS, rate=st.floats(1e-3, 1e4))
def test_scaling_sets_the_rate_and_leaves_all_else(rows, rate):
    trace = make_trace(rows)
    scaled = scale_rate(trace, rate)
    before, after = length_statistics(trace), length_statistics(scaled)
    assert after.requests_per_s == pytest.approx(rate, rel=1e-9)
    assert after.burstiness == pytest.approx(before.burstiness, rel=1e-6, abs=1e-9)
    assert (after.n, after.mean_input_tokens, after.p99_output_tokens) == (
        before.n,
        before.mean_input_tokens,
        before.p99_output_tokens,
    )
    assert (np.diff(scaled.arrival_s) >= 0).all()


@given(rows=REQUESTS)
def test_statistics_lie_where_they_must(rows):
    found = length_statistics(make_trace(rows))
    prompts = sorted(prompt for _, prompt, _ in rows)
    assert prompts[0] <= found.p50_input_tokens <= found.p90_input_tokens <= found.p99_input_tokens <= prompts[-1]
    assert found.mean_input_tokens == pytest.approx(sum(prompts) / len(prompts))
    assert found.duration_s * found.requests_per_s == pytest.approx(len(rows) - 1)


@given(seed=st.integers(0, 2**32), burstiness=st.floats(0, 1000), cv=st.floats(0, 1000))
@settings(max_examples=20)
def test_the_same_seed_gives_the_same_trace(seed, burstiness, cv):
    def make():
        return synthesize(
            name="s",
            requests=50,
            requests_per_s=4.0,
            input_tokens=TokenMoments(mean_tokens=300, cv=cv),
            output_tokens=TokenQuantiles(points=((0, 1), (0.5, 20), (1, 400))),
            rng=np.random.default_rng(seed),
            burstiness=burstiness,
        )

    first, second = make(), make()
    np.testing.assert_array_equal(first.arrival_s, second.arrival_s)
    np.testing.assert_array_equal(first.input_tokens, second.input_tokens)
    assert first.input_tokens.min() >= 1
    assert first.output_tokens.min() >= 1
    assert first.output_tokens.max() <= 400
    assert (np.diff(first.arrival_s) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize(("mean", "cv"), [(1155.0, 0.96), (28.3, 1.5), (2.5, 0.5), (7.0, 0.0)])
def test_a_synthetic_trace_has_the_stated_statistics(burstiness, mean, cv):
    n = 200_000
    trace = synthesize(
        name="s",
        requests=n,
        requests_per_s=5.5,
        input_tokens=TokenMoments(mean_tokens=mean, cv=cv),
        output_tokens=TokenMoments(mean_tokens=mean, cv=cv),
        rng=np.random.default_rng(7),
        burstiness=burstiness,
    )
    found = length_statistics(trace)
    # Six standard errors of a mean over n draws.
    assert found.requests_per_s == pytest.approx(5.5, rel=6 * burstiness / n**0.5 + 1e-9)
    assert found.burstiness == pytest.approx(burstiness, rel=0.05, abs=1e-6)
    for tokens in (trace.input_tokens, trace.output_tokens):
        assert tokens.mean() == pytest.approx(mean, rel=6 * (cv + 0.5 / mean) / n**0.5)
        # Rounding adds at most 1/4 to the variance.
        assert (cv * mean) ** 2 * 0.85 <= tokens.var() <= ((cv * mean) ** 2 + 0.25) * 1.15


def test_a_poisson_process_has_exponential_gaps():
    trace = synthesize(
        name="s",
        requests=100_000,
        requests_per_s=2.0,
        input_tokens=TokenMoments(mean_tokens=10, cv=1),
        output_tokens=TokenMoments(mean_tokens=10, cv=1),
        rng=np.random.default_rng(3),
    )
    gaps = np.sort(np.diff(trace.arrival_s))
    expected = 1 - np.exp(-2.0 * gaps)
    # Kolmogorov-Smirnov distance; 1.95 / sqrt(n) is passed once in a thousand seeds.
    assert np.abs(expected - (np.arange(len(gaps)) + 0.5) / len(gaps)).max() < 1.95 / len(gaps) ** 0.5


def test_quantiles_given_are_quantiles_found():
    points = ((0.0, 1.0), (0.5, 100.0), (0.9, 900.0), (0.99, 3000.0), (1.0, 8000.0))
    trace = synthesize(
        name="s",
        requests=200_000,
        requests_per_s=2.0,
        input_tokens=TokenQuantiles(points=points),
        output_tokens=TokenQuantiles(points=points),
        rng=np.random.default_rng(5),
    )
    for frac, tokens in points[1:-1]:
        assert np.quantile(trace.input_tokens, frac) == pytest.approx(tokens, rel=0.03)
