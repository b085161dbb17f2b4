"""Laws of forecasts and of hysteresis."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.forecast import DemandSample, ForecastMethod, demand_history, forecast_demand, hysteresis

NOW_S = 1.8e9
rates = st.floats(0, 1e4)
times = st.floats(0, 1e6)
methods = st.sampled_from(list(ForecastMethod))


@st.composite
def samples(draw):
    """Samples back to back up to now, some left out, over up to three days."""
    step_s = draw(st.sampled_from([600.0, 1800.0, 3600.0]))
    values = draw(st.lists(st.tuples(rates, st.booleans()), min_size=1, max_size=100))
    kept = [(i, rate) for i, (rate, there) in enumerate(values) if there or i == 0]
    return [
        DemandSample(time_s=NOW_S - i * step_s, duration_s=step_s, model="m", requests_per_s=rate) for i, rate in kept
    ]


def rate(found, method):
    series, _ = demand_history(found)
    return forecast_demand(series, method, NOW_S, 1800.0)["m"].requests_per_s


@settings(max_examples=60)
@given(samples(), methods)
def test_a_forecast_is_never_negative_and_a_mean_never_outside_the_history(found, method):
    answer = rate(found, method)
    assert answer >= 0
    if method is not ForecastMethod.SEASONAL:
        low, high = min(s.requests_per_s for s in found), max(s.requests_per_s for s in found)
        assert low - 1e-9 * high <= answer <= high + 1e-9 * high


@settings(max_examples=60)
@given(samples(), methods, st.floats(0, 50))
def test_twice_the_traffic_is_twice_the_forecast(found, method, factor):
    scaled = [replace(s, requests_per_s=s.requests_per_s * factor) for s in found]
    biggest = max(s.requests_per_s for s in found)
    assert rate(scaled, method) == pytest.approx(factor * rate(found, method), rel=1e-9, abs=1e-9 * factor * biggest)


@settings(max_examples=60)
@given(samples(), methods, st.integers(2, 4))
def test_finer_samples_of_the_same_traffic_change_nothing(found, method, parts):
    finer = [
        replace(s, time_s=s.time_s - k * s.duration_s / parts, duration_s=s.duration_s / parts)
        for s in found
        for k in range(parts)
    ]
    biggest = max(s.requests_per_s for s in found)
    assert rate(finer, method) == pytest.approx(rate(found, method), rel=1e-6, abs=1e-6 * biggest)


@given(samples(), methods, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(found, method, random):
    mixed = list(found)
    random.shuffle(mixed)
    assert rate(mixed, method) == rate(found, method)


@given(rates, rates, times, times, times)
def test_planned_demand_lies_between_the_last_one_and_the_forecast(previous, demand, elapsed_s, up_s, down_s):
    planned = hysteresis(previous, demand, elapsed_s, up_s, down_s)
    assert min(previous, demand) <= planned <= max(previous, demand)
    assert planned >= 0


@given(rates, st.tuples(rates, rates), times, times, times)
def test_planned_demand_is_monotone_in_both(previous, others, elapsed_s, up_s, down_s):
    lower, higher = sorted(others)
    slack = 1e-9 * max(higher, previous)
    assert (
        hysteresis(previous, lower, elapsed_s, up_s, down_s)
        <= hysteresis(previous, higher, elapsed_s, up_s, down_s) + slack
    )
    assert (
        hysteresis(lower, previous, elapsed_s, up_s, down_s)
        <= hysteresis(higher, previous, elapsed_s, up_s, down_s) + slack
    )


@given(rates, rates, st.lists(st.floats(0, 5e3), min_size=1, max_size=20), times, times)
def test_many_small_steps_come_to_the_same_as_a_big_one(previous, demand, steps_s, up_s, down_s):
    planned = previous
    for step_s in steps_s:
        planned = hysteresis(planned, demand, step_s, up_s, down_s)
    at_once = hysteresis(previous, demand, math.fsum(steps_s), up_s, down_s)
    assert planned == pytest.approx(at_once, rel=1e-6, abs=1e-9 * (1 + previous))


@given(rates, rates, times, times)
def test_a_rise_is_followed_at_once_and_a_fall_is_not(previous, demand, elapsed_s, down_s):
    planned = hysteresis(previous, demand, elapsed_s, 0.0, down_s)
    assert planned >= demand
    if demand >= previous:
        assert planned == demand
