"""Forecasts against closed forms, and what is not known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coral_core.domain.workload import Trace
from coral_core.errors import InputError
from coral_core.forecast import (
    DemandForecast,
    DemandSample,
    DemandUnknown,
    ForecastMethod,
    ForecastTuning,
    demand_history,
    forecast_demand,
    hysteresis,
    needed_windows,
    samples_from_trace,
)

DAY_S = 86_400.0
T0 = 1.8e9


def sample(time_s, rate, *, duration_s=60.0, model="m", tokens=(None, None)):
    return DemandSample(
        time_s=time_s,
        duration_s=duration_s,
        model=model,
        requests_per_s=rate,
        mean_input_tokens=tokens[0],
        mean_output_tokens=tokens[1],
    )


def history(samples):
    series, notes = demand_history(samples)
    assert notes == ()
    return series


def forecast(samples, method, now_s, horizon_s=600.0, **tuning):
    return forecast_demand(history(samples), method, now_s, horizon_s, tuning=ForecastTuning(**tuning))["m"]


def test_last_is_the_newest_sample_whatever_the_order():
    samples = [sample(T0 + 60, 5.0), sample(T0 + 180, 7.0), sample(T0 + 120, 6.0)]
    found = forecast(samples, ForecastMethod.LAST, T0 + 200)
    assert (found.requests_per_s, found.as_of_s, found.method) == (7.0, T0 + 180, ForecastMethod.LAST)


@pytest.mark.parametrize("width_s", [1.0, 60.0, 300.0])
def test_ewma_answers_a_step_as_the_filter_does_however_finely_it_is_sampled(width_s):
    tau_s, after_s = 600.0, 900.0
    before = [sample(T0 - i * width_s, 2.0, duration_s=width_s) for i in range(30)]
    since = [sample(T0 + (i + 1) * width_s, 10.0, duration_s=width_s) for i in range(int(after_s / width_s))]
    found = forecast([*before, *since], ForecastMethod.EWMA, T0 + after_s, ewma_s=tau_s)
    assert found.requests_per_s == pytest.approx(10 - 8 * math.exp(-after_s / tau_s), rel=1e-9)


def test_ewma_is_its_recursion_over_uneven_samples_and_gaps():
    durations, rates, gaps = [60.0, 5.0, 600.0, 61.0], [3.0, 0.0, 9.0, 1.0], [0.0, 30.0, 0.0, 200.0]
    tau_s, level, time_s, samples = 123.0, rates[0], T0, []
    for duration, rate, gap in zip(durations, rates, gaps, strict=True):
        time_s += gap + duration
        samples.append(sample(time_s, rate, duration_s=duration))
        keep = math.exp(-duration / tau_s) if len(samples) > 1 else 0.0
        level = keep * level + (1 - keep) * rate
    assert forecast(samples, ForecastMethod.EWMA, time_s, ewma_s=tau_s).requests_per_s == pytest.approx(level)


def daily(time_s):
    """A day of 20-minute plateaus, highest at noon."""
    slot = math.floor((time_s % DAY_S) / 1200)
    return 5 + 4 * math.sin(math.pi * slot / 72) ** 2


def days(count, *, until_s, shift=lambda _: 0.0, step_s=300.0):
    ends = until_s - step_s * np.arange(int(count * DAY_S / step_s))
    return [sample(float(e), daily(e - step_s / 2) + shift(e), duration_s=step_s) for e in ends]


@pytest.mark.parametrize("hour", [0, 5, 9, 12, 20])
@pytest.mark.parametrize("horizon_s", [0.0, 600.0, 7200.0])
def test_seasonal_tells_a_periodic_demand_exactly(hour, horizon_s):
    now_s = math.floor(T0 / DAY_S) * DAY_S + hour * 3600
    found = forecast(days(3, until_s=now_s), ForecastMethod.SEASONAL, now_s, horizon_s)
    peak = max(daily(now_s + ahead + 150) for ahead in np.arange(0, max(horizon_s, 300), 300))
    assert found.requests_per_s == pytest.approx(peak, rel=1e-9)
    assert found.method is ForecastMethod.SEASONAL


def test_seasonal_adds_what_today_lies_above_the_days_before():
    now_s = math.floor(T0 / DAY_S) * DAY_S + 9 * 3600
    found = forecast(
        days(3, until_s=now_s, shift=lambda e: 2.5 if e > now_s - 7200 else 0.0),
        ForecastMethod.SEASONAL,
        now_s,
        300.0,
    )
    assert found.requests_per_s == pytest.approx(daily(now_s) + 2.5, rel=1e-9)


def test_seasonal_follows_the_week_where_the_period_is_a_week():
    now_s = math.floor(T0 / DAY_S) * DAY_S
    rates = {False: 8.0, True: 1.0}  # nothing is asked on two days of seven
    ends = now_s - 3600 * np.arange(24 * 15)
    samples = [
        sample(
            float(e), rates[(math.floor((e - 1) / DAY_S) - math.floor(now_s / DAY_S)) % 7 in {0, 1}], duration_s=3600
        )
        for e in ends
    ]
    found = forecast(samples, ForecastMethod.SEASONAL, now_s, 300.0, period_s=7 * DAY_S, level_s=3600.0)
    assert found.requests_per_s == pytest.approx(1.0)
    daily_period = forecast(samples, ForecastMethod.SEASONAL, now_s, 300.0, periods=3)
    assert daily_period.requests_per_s > 5


def test_a_first_day_is_ewma_and_says_so():
    samples = days(0.5, until_s=T0)
    found = forecast(samples, ForecastMethod.SEASONAL, T0)
    assert found.method is ForecastMethod.EWMA
    assert found.requests_per_s == forecast(samples, ForecastMethod.EWMA, T0).requests_per_s
    assert "no period of 1 days is on record yet" in found.notes[0]


def test_a_day_that_was_not_recorded_counts_as_unknown_and_not_as_quiet():
    now_s = math.floor(T0 / DAY_S) * DAY_S + 12 * 3600
    whole = days(4, until_s=now_s)
    holed = [s for s in whole if not now_s - 2.2 * DAY_S < s.time_s < now_s - 1.8 * DAY_S]
    want = forecast(whole, ForecastMethod.SEASONAL, now_s).requests_per_s
    assert len(holed) < len(whole)
    assert forecast(holed, ForecastMethod.SEASONAL, now_s).requests_per_s == pytest.approx(want)


def test_no_more_is_read_than_the_windows_and_it_is_enough():
    now_s = math.floor(T0 / DAY_S) * DAY_S + 7 * 3600
    samples = days(4, until_s=now_s)
    for method in ForecastMethod:
        windows = needed_windows(method, now_s, 900.0)
        read = [s for s in samples if any(a <= s.time_s and s.time_s - s.duration_s <= b for a, b in windows)]
        assert forecast(read, method, now_s, 900.0).requests_per_s == pytest.approx(
            forecast(samples, method, now_s, 900.0).requests_per_s, rel=1e-2
        )
        assert len(read) < len(samples) / 5


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "never recorded"),
        ([sample(T0 - 901, 3.0)], "901 s old, older than the 900 s"),
        ([sample(T0 + 4000, 3.0)], "dated in the future"),
    ],
)
@pytest.mark.parametrize("method", list(ForecastMethod))
def test_missing_and_stale_history_is_unknown_and_never_zero(samples, reason, method):
    found = forecast_demand(history(samples), method, T0, 600.0, models=["m"])["m"]
    assert isinstance(found, DemandUnknown)
    assert reason in found.reason


def test_a_measured_zero_is_a_forecast_of_zero_and_the_future_is_left_out():
    found = forecast([sample(T0, 0.0), sample(T0 + 500, 9.0)], ForecastMethod.LAST, T0)
    assert isinstance(found, DemandForecast)
    assert (found.requests_per_s, found.notes) == (0.0, ("1 samples are dated in the future and left out",))


def test_lengths_are_weighted_by_requests_and_unknown_without_any():
    samples = [sample(T0 - 60, 1.0, tokens=(100.0, 10.0)), sample(T0, 3.0, tokens=(500.0, 50.0))]
    found = forecast(samples, ForecastMethod.LAST, T0)
    assert (found.mean_input_tokens, found.mean_output_tokens) == (400.0, 40.0)
    quiet = forecast([sample(T0, 0.0)], ForecastMethod.LAST, T0)
    assert (quiet.mean_input_tokens, quiet.mean_output_tokens) == (None, None)


def test_repeated_samples_count_once_and_overlapping_ones_are_told():
    once = sample(T0, 3.0)
    series, notes = demand_history([once, once, sample(T0 + 30, 4.0), sample(T0 + 60, 5.0)])
    assert list(series["m"].requests_per_s) == [3.0, 5.0]
    assert "1 samples overlap" in notes[0]


@pytest.mark.parametrize(
    "change",
    [
        {"requests_per_s": -1.0},
        {"requests_per_s": math.nan},
        {"requests_per_s": math.inf},
        {"requests_per_s": 1e9},
        {"duration_s": 0.0},
        {"time_s": math.nan},
        {"mean_input_tokens": -1.0},
        {"mean_output_tokens": math.nan},
        {"model": ""},
    ],
)
def test_a_sample_that_is_no_measurement_is_refused(change):
    values = {"time_s": T0, "duration_s": 60.0, "model": "m", "requests_per_s": 1.0}
    with pytest.raises(InputError, match=f"{next(iter(change))}"):
        DemandSample(**values | change)


@pytest.mark.parametrize("tuning", [{"ewma_s": 0.0}, {"period_s": math.inf}, {"periods": 0}, {"skew_s": math.nan}])
def test_tuning_that_makes_no_sense_is_refused(tuning):
    with pytest.raises(InputError):
        ForecastTuning(**tuning)


@pytest.mark.parametrize(("now_s", "horizon_s"), [(math.nan, 1.0), (T0, -1.0), (T0, math.inf)])
def test_times_that_make_no_sense_are_refused(now_s, horizon_s):
    with pytest.raises(InputError):
        forecast_demand({}, ForecastMethod.LAST, now_s, horizon_s)


def test_a_series_without_samples_has_no_mean():
    series = history([sample(T0, 3.0)])["m"]
    assert np.isnan(series.until(T0 - 1).mean(np.array([T0 - 60]), np.array([T0]))).all()
    assert series.mean(np.array([T0 - 90]), np.array([T0 + 29.0]))[0] == 3.0
    assert np.isnan(series.mean(np.array([T0 - 90]), np.array([T0 + 31.0]))[0])


def trace(arrivals):
    count = len(arrivals)
    return Trace(
        name="t",
        arrival_s=np.array(arrivals, dtype=np.float64),
        input_tokens=np.arange(1, count + 1),
        output_tokens=np.full(count, 7),
        source="made up",
    )


def test_a_trace_becomes_samples_that_keep_its_requests():
    found = samples_from_trace(trace([0.0, 1.0, 25.0, 29.0, 31.0]), model="m", start_s=T0, duration_s=10.0)
    assert [(s.time_s, s.requests_per_s, s.mean_input_tokens) for s in found] == [
        (T0 + 10, 0.2, 1.5),
        (T0 + 20, 0.0, None),
        (T0 + 30, 0.2, 3.5),
    ]
    with pytest.raises(InputError, match="spans less than one sample"):
        samples_from_trace(trace([0.0, 1.0]), model="m", start_s=T0, duration_s=10.0)
    with pytest.raises(InputError, match="duration_s"):
        samples_from_trace(trace([0.0, 1.0]), model="m", start_s=T0, duration_s=0.0)


def test_hysteresis_follows_the_exponential_and_its_ends():
    assert hysteresis(10.0, 4.0, 300.0, 0.0, 600.0) == pytest.approx(4 + 6 * math.exp(-0.5))
    assert hysteresis(4.0, 10.0, 300.0, 600.0, 0.0) == pytest.approx(10 - 6 * math.exp(-0.5))
    assert hysteresis(4.0, 10.0, 0.0, 0.0, 600.0) == 10.0
    assert hysteresis(10.0, 4.0, 1e9, 0.0, math.inf) == 10.0
    assert hysteresis(10.0, 4.0, math.inf, 0.0, 600.0) == 4.0
    assert hysteresis(None, 4.0, 0.0, 600.0, 600.0) == 4.0


@pytest.mark.parametrize(
    "values",
    [(-1.0, 1, 1, 1, 1), (1, math.nan, 1, 1, 1), (1, math.inf, 1, 1, 1), (1, 1, -1, 1, 1), (1, 1, 1, 1, math.nan)],
)
def test_hysteresis_refuses_what_is_no_rate_or_time(values):
    with pytest.raises(InputError):
        hysteresis(*values)
