"""Forecast: how much will be asked of each model, from a history of measured rates; and how fast capacity follows. Pure."""

from coral_core.forecast.history import DemandSample, RateSeries, demand_history, samples_from_trace
from coral_core.forecast.hysteresis import hysteresis
from coral_core.forecast.methods import (
    DemandForecast,
    DemandUnknown,
    ForecastMethod,
    ForecastTuning,
    forecast_demand,
    needed_windows,
)

__all__ = [
    "DemandForecast",
    "DemandSample",
    "DemandUnknown",
    "ForecastMethod",
    "ForecastTuning",
    "RateSeries",
    "demand_history",
    "forecast_demand",
    "hysteresis",
    "needed_windows",
    "samples_from_trace",
]
