"""Forecasts of demand from its history.

`last`      the newest sample's rate.
`ewma`      the exponential mean of the samples: s_i = s_(i-1) e^(-d_i/tau) + x_i (1 - e^(-d_i/tau)), d_i the sample's
            duration, s_0 = x_0. For samples without gaps this is the exact answer of ds/dt = (x - s) / tau, so it does
            not matter how finely the history was sampled. Stretches without samples change nothing.
`seasonal`  the peak, over the horizon, of the mean of the same time in the last periods (a day, or a week), plus what
            the last `level_s` seconds lie above or below the mean of their own times then; at least 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from coral_core.errors import InputError
from coral_core.forecast.history import RateSeries

DAY_S: Final = 86_400.0
WEEK_S: Final = 7 * DAY_S


class ForecastMethod(StrEnum):
    """How the next rate is told from the past ones."""

    LAST = "last"
    EWMA = "ewma"
    SEASONAL = "seasonal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastTuning:
    """Constants of the methods.

    `max_age_s`: a history whose newest sample is older is stale. `step_s` is the width of the stretches whose highest
    mean is the seasonal peak. `skew_s`: samples may be dated so far into the future (clocks differ), later ones are left out.
    """

    max_age_s: float = 900.0
    ewma_s: float = 600.0
    period_s: float = DAY_S
    periods: int = 4
    level_s: float = 3600.0
    step_s: float = 300.0
    skew_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_age_s", "ewma_s", "period_s", "level_s", "step_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InputError(f"is {getattr(self, name)}, must be above 0", where=name)
        if self.periods < 1 or not self.skew_s >= 0:
            raise InputError("needs at least one period, and a skew of at least 0 s", where="forecast")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """What will be asked of a model. `method` is the one that was used; `as_of_s` the end of the newest sample.

    Mean tokens are those of the recent requests, None where there were none.
    """

    model: str
    requests_per_s: float
    method: ForecastMethod
    as_of_s: float
    mean_input_tokens: float | None
    mean_output_tokens: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandUnknown:
    """No forecast of a model, and why. It is not a demand of zero."""

    model: str
    reason: str


def forecast_demand(
    history: Mapping[str, RateSeries],
    method: ForecastMethod,
    now_s: float,
    horizon_s: float,
    *,
    models: Iterable[str] | None = None,
    tuning: ForecastTuning | None = None,
) -> dict[str, DemandForecast | DemandUnknown]:
    """The forecast for each model (default: all of the history) over the `horizon_s` seconds from `now_s` on.

    A model whose history is missing or stale is `DemandUnknown`. Where `seasonal` finds no earlier period on record it
    is `ewma`, and a note says so. Raises InputError for a time or horizon that is not finite or negative.
    """
    if not (math.isfinite(now_s) and math.isfinite(horizon_s) and horizon_s >= 0):
        raise InputError(f"now is {now_s} and the horizon {horizon_s} s", where="forecast")
    tuned = tuning or ForecastTuning()
    return {
        model: _forecast(
            model,
            history.get(model),
            ForecastMethod(method),
            now_s=now_s,
            horizon_s=horizon_s,
            tuning=tuned,
        )
        for model in (history if models is None else models)
    }


def needed_windows(
    method: ForecastMethod, now_s: float, horizon_s: float, tuning: ForecastTuning | None = None
) -> list[tuple[float, float]]:
    """The stretches (from, to) of the history that a forecast looks at, newest first: no need to read more of it."""
    tuned = tuning or ForecastTuning()
    recent_s = max(tuned.level_s, tuned.max_age_s, 5 * tuned.ewma_s)
    windows = [(now_s - recent_s, now_s + tuned.skew_s)]
    if method is ForecastMethod.SEASONAL:
        ahead_s = max(horizon_s, tuned.step_s)
        for k in range(1, tuned.periods + 1):
            back_s = now_s - k * tuned.period_s
            windows.append((back_s - tuned.level_s, min(back_s + ahead_s, now_s)))
    return windows


def _forecast(
    model: str,
    whole: RateSeries | None,
    method: ForecastMethod,
    *,
    now_s: float,
    horizon_s: float,
    tuning: ForecastTuning,
) -> DemandForecast | DemandUnknown:
    if whole is None or not len(whole):
        return DemandUnknown(model=model, reason="its demand was never recorded")
    series = whole.until(now_s + tuning.skew_s)
    notes = []
    if len(series) < len(whole):
        notes.append(f"{len(whole) - len(series)} samples are dated in the future and left out")
    if not len(series):
        return DemandUnknown(model=model, reason="all samples of its demand are dated in the future")
    age_s = now_s - series.end_s[-1]
    if age_s > tuning.max_age_s:
        return DemandUnknown(
            model=model,
            reason=f"the newest sample of its demand is {age_s:.0f} s old, older than the {tuning.max_age_s:.0f} s allowed",
        )
    used, rate = method, math.nan
    if method is ForecastMethod.LAST:
        rate = float(series.requests_per_s[-1])
    elif method is ForecastMethod.SEASONAL:
        rate = _seasonal(series, now_s, horizon_s, tuning)
        if math.isnan(rate):
            used = ForecastMethod.EWMA
            notes.append(f"no period of {tuning.period_s / DAY_S:g} days is on record yet: ewma instead of seasonal")
    if used is ForecastMethod.EWMA:
        rate = _ewma(series, tuning.ewma_s)
    inputs, outputs = series.mean_tokens(now_s - tuning.level_s)
    return DemandForecast(
        model=model,
        requests_per_s=rate,
        method=used,
        as_of_s=float(series.end_s[-1]),
        mean_input_tokens=inputs,
        mean_output_tokens=outputs,
        notes=tuple(notes),
    )


def _ewma(series: RateSeries, tau_s: float) -> float:
    """The recursion in closed form: sample i weighs (1 - e^(-d_i/tau)) e^(-(time of samples after it)/tau).

    The first takes all that is left, since s_0 = x_0. Weights sum to 1.
    """
    lasted = (series.end_s - series.start_s) / tau_s
    after = np.cumsum(lasted[::-1])[::-1] - lasted
    weights = -np.expm1(-lasted) * np.exp(-after)
    weights[0] = math.exp(-after[0])
    return float(weights @ series.requests_per_s)


def _seasonal(series: RateSeries, now_s: float, horizon_s: float, tuning: ForecastTuning) -> float:
    """NaN where no earlier period covers both the horizon's time and that of the recent level."""
    steps = max(1, math.ceil(horizon_s / tuning.step_s))
    ahead_s = now_s + tuning.step_s * np.arange(steps, dtype=np.float64)
    back_s = tuning.period_s * np.arange(1, tuning.periods + 1, dtype=np.float64)[:, None]
    ahead = series.mean(ahead_s - back_s, ahead_s + tuning.step_s - back_s)
    then = series.mean(now_s - tuning.level_s - back_s, now_s - back_s)
    now = float(series.mean(np.array([now_s - tuning.level_s]), np.array([now_s]))[0])
    usable = np.isfinite(ahead).any(axis=1) & np.isfinite(then[:, 0])
    if not usable.any():
        return math.nan
    known = ahead[usable]
    counted = np.isfinite(known).sum(axis=0)
    profile = np.nansum(known, axis=0)[counted > 0] / counted[counted > 0]
    shift = 0.0 if math.isnan(now) else now - float(then[usable, 0].mean())
    return max(0.0, float(profile.max()) + shift)
