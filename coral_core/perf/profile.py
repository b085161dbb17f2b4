"""Measured layer times of one model on one node configuration by one engine, and what they say between the measured points.

A point: phase, TP, requests per step (prompts for prefill), tokens (prompt length, or context for decode), seconds of one
layer and of the step's fixed part. Times are straight lines in requests at each measured length, and in tokens between
lengths, so they never fall in either. Below the ends the first time holds; above, the last slope in requests (in
proportion where one number was measured), and in tokens the largest growth between the last two lengths, for all steps.
Every value says whether it is measured, interpolated or extrapolated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError

Floats = NDArray[np.float64]

CURVES_VERSION: Final = 2
"""Raise when the same points say something else: capacities from them are then not the same inputs."""

PHASES: Final = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What was measured on what by what: engine version and flags belong to it, since both change times."""

    model: str
    variant: str
    config: str
    engine: str
    version: str
    flags: tuple[str, ...] = ()

    @property
    def engine_name(self) -> str:
        """Engine, version, dtype and flags as one name: `vllm-0.32.0-bf16`, with a hash of the flags where there are any."""
        text = f"{self.engine}-{self.version}-{self.variant}"
        if not self.flags:
            return text
        return f"{text}-{hashlib.sha256(json.dumps(self.flags).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One measured time. `cv_frac` is the coefficient of variation over `samples`; what is None is not known.

    `fixed_s`: what a step takes besides its layers.
    """

    phase: Phase
    tp: int
    requests: float
    tokens: float
    layer_s: float
    fixed_s: float | None = None
    samples: int | None = None
    cv_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile; `kv_tokens` (of the whole model) and `start_s` by TP, where they were measured."""

    key: ProfileKey
    points: tuple[ProfilePoint, ...]
    source: str
    as_of: date
    kv_tokens: Mapping[int, float] = field(default_factory=dict)
    start_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def tps(self) -> tuple[int, ...]:
        """Sizes of tensor parallelism with times."""
        return tuple(sorted({point.tp for point in self.points}))

    def curves(self, phase: Phase, tp: int) -> ProfileCurves | None:
        """The times of one phase at one TP; None where none was measured."""
        chosen = [point for point in self.points if (point.phase, point.tp) == (phase, tp)]
        return ProfileCurves.of(chosen) if chosen else None

    def require(self, phase: Phase, tp: int) -> ProfileCurves:
        """The times of one phase at one TP; DataGapError says what there is where they were not measured."""
        found = self.curves(phase, tp)
        if found is None:
            known = sorted({f"{point.phase} at TP {point.tp}" for point in self.points})
            raise DataGapError(
                f"no {phase} times of {self.key.model} on {self.key.config} at TP {tp}",
                where=self.key.engine_name,
                fix=f"measured: {', '.join(known)}",
            )
        return found

    @property
    def content_hash(self) -> str:
        """Hash of all that capacities can depend on."""
        facts = [
            [point.phase.value, point.tp, point.requests, point.tokens, point.layer_s, point.fixed_s]
            for point in self.points
        ]
        return hashlib.sha256(json.dumps([CURVES_VERSION, self.key.engine_name, facts]).encode()).hexdigest()

    @property
    def error_frac(self) -> float | None:
        """The 90th percentile of the points' variation; None where it is not known."""
        known = [point.cv_frac for point in self.points if point.cv_frac is not None]
        return float(np.quantile(known, 0.9)) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds and where each comes from, (n,)."""

    seconds: Floats
    sources: tuple[CapacitySource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCurves:
    """Times of one phase at one TP: by length, requests rising, with layer seconds that never fall; `fixed_s` as far as known."""

    tokens: Floats
    requests: tuple[Floats, ...]
    layer_s: tuple[Floats, ...]
    fixed_s: float | None

    @classmethod
    def of(cls, points: Sequence[ProfilePoint]) -> ProfileCurves:
        """Curves through the points (at least one), small drops levelled out."""
        lengths = np.array(sorted({point.tokens for point in points}))
        curves = [sorted((p.requests, p.layer_s) for p in points if p.tokens == length) for length in lengths.tolist()]
        requests = tuple(np.array([x for x, _ in curve]) for curve in curves)
        layer_s = tuple(np.maximum.accumulate(np.array([time for _, time in curve])) for curve in curves)
        known = [point.fixed_s for point in points if point.fixed_s is not None]
        fixed_s = float(np.median(known)) if known else None
        return cls(tokens=lengths, requests=requests, layer_s=layer_s, fixed_s=fixed_s)

    @property
    def largest_requests(self) -> float:
        """The largest step measured at any length."""
        return max(float(x[-1]) for x in self.requests)

    def layer_times(self, requests: Floats, tokens: float) -> Timed:
        """Seconds of one layer for steps of so many requests, each of `tokens`; never falling in either."""
        low, high = self._around(tokens)
        curves = self._at(requests)
        weight = 0.0 if low == high else (tokens - self.tokens[low]) / (self.tokens[high] - self.tokens[low])
        seconds = curves[low] + min(max(weight, 0.0), 1.0) * (curves[high] - curves[low])
        if weight > 1:
            seconds *= 1 + (weight - 1) * self._growth(low, high)
        return Timed(seconds=seconds, sources=tuple(self._source(float(x), tokens, low, high) for x in requests))

    def _growth(self, low: int, high: int) -> float:
        """The largest share by which a time grew from one length to the next; one for all steps, so that none falls."""
        curves = self._at(self.requests[high])
        return float(np.max(1 - curves[low] / curves[high]))

    def _around(self, tokens: float) -> tuple[int, int]:
        """The measured lengths on either side; twice the same where it is one of them, or the only one."""
        above = int(np.searchsorted(self.tokens, tokens))
        if above < len(self.tokens) and self.tokens[above] == tokens:
            return above, above
        high = min(max(above, 1), len(self.tokens) - 1)
        return max(high - 1, 0), high

    def _at(self, requests: Floats) -> Floats:
        """Seconds at every measured length, (lengths, n), rising along both.

        Where a length was not measured so far but a longer one was, the longer one's time stands: it is no less.
        """
        curves = [_lines(requests, x, y) for x, y in zip(self.requests, self.layer_s, strict=True)]
        for index in range(len(curves) - 2, -1, -1):
            last = self.requests[index][-1]
            further = last < max(x[-1] for x in self.requests[index + 1 :])
            own = self.layer_s[index][-1] if further else curves[index]
            curves[index] = np.where(requests > last, np.maximum(own, curves[index + 1]), curves[index])
        return np.maximum.accumulate(np.array(curves), axis=0)

    def _source(self, requests: float, tokens: float, low: int, high: int) -> CapacitySource:
        if low == high and self.tokens[low] == tokens and requests in self.requests[low]:
            return CapacitySource.MEASURED
        inside = self.tokens[0] <= tokens <= self.tokens[-1] and all(
            self.requests[index][0] <= requests <= self.requests[index][-1] for index in (low, high)
        )
        return CapacitySource.INTERPOLATED if inside else CapacitySource.EXTRAPOLATED


def _lines(at: Floats, x: Floats, y: Floats) -> Floats:
    """Straight lines through (x, y); the first value below, the last slope above.

    Above a single point in proportion: two steps of half the requests take no less, so it is never too fast.
    """
    inside = np.interp(at, x, y)
    if len(x) == 1:
        alone: Floats = inside * np.maximum(at / x[0], 1.0)
        return alone
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.where(at > x[-1], y[-1] + slope * (at - x[-1]), inside)
