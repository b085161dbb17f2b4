"""A history of demand: measured mean rates over known stretches of time. What no sample covers is unknown, not zero."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.workload import Trace
from coral_core.errors import InputError

FULLEST_RATE_PER_S: Final = 1e6
"""More requests/s of one model than any gateway takes: a slip of the unit."""
LEAST_KNOWN_FRAC: Final = 0.5
"""A mean over a stretch is stated where samples cover at least this part of it."""
_OVERLAP_S: Final = 1e-3
"""Samples that overlap by less were cut by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSample:
    """What was asked of one model over the `duration_s` seconds up to `time_s` (seconds since 1970, UTC).

    Mean tokens are per request, None where there were none to take a mean of. Raises InputError for values that are no
    measurement: not finite, negative, no duration, rates beyond reason.
    """

    time_s: float
    duration_s: float
    model: str
    requests_per_s: float
    mean_input_tokens: float | None = None
    mean_output_tokens: float | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise InputError("names no model", where="model")
        bounds: dict[str, tuple[float | None, float, float]] = {
            "time_s": (self.time_s, 0.0, 1e11),
            "duration_s": (self.duration_s, math.ulp(0.0), 86_400.0),
            "requests_per_s": (self.requests_per_s, 0.0, FULLEST_RATE_PER_S),
            "mean_input_tokens": (self.mean_input_tokens, 0.0, 1e8),
            "mean_output_tokens": (self.mean_output_tokens, 0.0, 1e8),
        }
        for name, (value, least, most) in bounds.items():
            if value is not None and not least <= value <= most:
                raise InputError(f"{name} is {value!r}, must be between {least:g} and {most:g}", where=self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSeries:
    """One model's samples, in order of time and without overlap; equal-length arrays, NaN where tokens are unknown."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    requests_per_s: NDArray[np.float64]
    mean_input_tokens: NDArray[np.float64]
    mean_output_tokens: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.end_s)

    def until(self, time_s: float) -> RateSeries:
        """The samples that end at `time_s` or before."""
        kept = self.end_s <= time_s
        return RateSeries(**{name: getattr(self, name)[kept] for name in self.__slots__})

    def mean(self, from_s: NDArray[np.float64], to_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean requests/s over each stretch (`from_s`, `to_s`); NaN where under half of it is covered by samples.

        The rate is constant within a sample, so the mean is exact: the difference of the integral over that of time.
        """
        if not len(self):
            return np.full(np.shape(from_s), np.nan)
        times = np.column_stack((self.start_s, self.end_s)).ravel()
        lasted_s = self.end_s - self.start_s
        known_s = _over(times, _steps(lasted_s), from_s, to_s)
        requests = _over(times, _steps(lasted_s * self.requests_per_s), from_s, to_s)
        enough = known_s >= LEAST_KNOWN_FRAC * (to_s - from_s)
        return np.where(enough, requests / np.where(known_s > 0, known_s, 1.0), np.nan)

    def mean_tokens(self, from_s: float) -> tuple[float | None, float | None]:
        """Mean input and output tokens of the requests of samples that end after `from_s`; None where there were none."""
        requests = np.where(self.end_s > from_s, (self.end_s - self.start_s) * self.requests_per_s, 0.0)
        return _weighted(self.mean_input_tokens, requests), _weighted(self.mean_output_tokens, requests)


def demand_history(samples: Iterable[DemandSample]) -> tuple[dict[str, RateSeries], tuple[str, ...]]:
    """Samples in any order as one series per model, and what had to be left out.

    The same sample twice is one. Of two that overlap otherwise the one that ended first stays: two writers count the
    same requests, or one that counts twice; either way their sum is not known to be right.
    """
    by_model: dict[str, list[DemandSample]] = defaultdict(list)
    for sample in samples:
        by_model[sample.model].append(sample)
    series, notes = {}, []
    for model, found in sorted(by_model.items()):
        kept, overlapping = _apart(sorted(set(found), key=lambda s: (s.time_s, s.duration_s, s.requests_per_s)))
        series[model] = _series(kept)
        if overlapping:
            notes.append(
                f"{model}: {overlapping} samples overlap others and are left out; is more than one writer at work?"
            )
    return series, tuple(notes)


def samples_from_trace(trace: Trace, *, model: str, start_s: float, duration_s: float) -> list[DemandSample]:
    """The trace as samples of `duration_s` seconds each from `start_s` on; its last, incomplete one is left out.

    Stretches without requests are samples of rate 0: the trace covers them. InputError where it is shorter than one.
    """
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise InputError(f"is {duration_s} s, must be above 0", where="duration_s")
    count = int(trace.arrival_s[-1] // duration_s)
    if count < 1:
        raise InputError(
            f"spans less than one sample of {duration_s:g} s", where=trace.name, fix="take shorter samples"
        )
    number = (trace.arrival_s // duration_s).astype(np.int64)
    inside = number < count
    requests = np.bincount(number[inside], minlength=count)
    with np.errstate(invalid="ignore"):
        means = [
            np.bincount(number[inside], weights=tokens[inside], minlength=count) / requests
            for tokens in (trace.input_tokens, trace.output_tokens)
        ]
    return [
        DemandSample(
            time_s=start_s + (i + 1) * duration_s,
            duration_s=duration_s,
            model=model,
            requests_per_s=float(requests[i]) / duration_s,
            mean_input_tokens=float(means[0][i]) if requests[i] else None,
            mean_output_tokens=float(means[1][i]) if requests[i] else None,
        )
        for i in range(count)
    ]


def _apart(samples: Sequence[DemandSample]) -> tuple[list[DemandSample], int]:
    """Of samples in order of their ends, those that do not reach into the one kept before; and how many do."""
    kept: list[DemandSample] = []
    for sample in samples:
        if not kept or sample.time_s - sample.duration_s >= kept[-1].time_s - _OVERLAP_S:
            kept.append(sample)
    return kept, len(samples) - len(kept)


def _series(samples: Sequence[DemandSample]) -> RateSeries:
    end_s = np.array([s.time_s for s in samples], dtype=np.float64)
    start_s = end_s - np.array([s.duration_s for s in samples], dtype=np.float64)
    start_s[1:] = np.maximum(start_s[1:], end_s[:-1])
    columns: Mapping[str, list[float | None]] = {
        "requests_per_s": [s.requests_per_s for s in samples],
        "mean_input_tokens": [s.mean_input_tokens for s in samples],
        "mean_output_tokens": [s.mean_output_tokens for s in samples],
    }
    arrays = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    return RateSeries(start_s=start_s, end_s=end_s, **arrays)


def _steps(amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The integral at the start and the end of each sample."""
    after = np.cumsum(amounts)
    return np.column_stack((after - amounts, after)).ravel()


def _over(
    times: NDArray[np.float64], integral: NDArray[np.float64], from_s: NDArray[np.float64], to_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    return np.interp(to_s, times, integral) - np.interp(from_s, times, integral)


def _weighted(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float | None:
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else None
