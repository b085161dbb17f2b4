"""What to measure for a profile, and what the measured steps say: layer times from two depths, noise, budget. Pure.

Data: seconds of whole steps of the model cut to l1 < l2 layers, t(l, phase, tp, requests, tokens), several samples each.
A shot's time is the median of its samples, s its standard error 1.2533 x sd / sqrt(n).

    layer_s = (t2 - t1) / (l2 - l1)      fixed_s = t1 - l1 x layer_s, at least 0

Layers that are alike are assumed alike in time: depths are whole periods of the attention pattern beyond dense first
layers, which end up in the fixed part. Noise is refused, not averaged away: a shot whose samples' coefficient of variation
is above the stated bound, and a slope whose standard error is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.perf.profile import ProfilePoint
from coral_core.perf.profile_check import LARGEST_DROP
from coral_core.perf.search import tp_runs
from coral_core.units import SECONDS_PER_H

MEDIAN_ERROR: Final = math.sqrt(math.pi / 2)
"""Standard error of a median of normal samples over that of their mean."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shot:
    """One kind of step: `requests` of `tokens` each (prompt length, or context) on the model cut to `layers`."""

    tp: int
    layers: int
    phase: Phase
    requests: int
    tokens: int

    @property
    def kind(self) -> tuple[int, Phase, int, int]:
        """What it is at whatever number of layers: TP, phase, requests and tokens."""
        return (self.tp, self.phase, self.requests, self.tokens)

    @property
    def name(self) -> str:
        """The shot in one word, for keys and messages."""
        return f"tp{self.tp}-layers{self.layers}-{self.phase.value}-{self.requests}x{self.tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShotTimes:
    """Seconds of a shot's samples."""

    shot: Shot
    samples_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Their median."""
        return float(np.median(self.samples_s))

    @property
    def cv_frac(self) -> float:
        """Their standard deviation over their mean."""
        return float(np.std(self.samples_s, ddof=1) / np.mean(self.samples_s))

    @property
    def error_s(self) -> float:
        """Standard error of the median."""
        return float(MEDIAN_ERROR * np.std(self.samples_s, ddof=1) / math.sqrt(len(self.samples_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What an engine of a truncated model said when it had started: KV room in tokens, and seconds until then."""

    tp: int
    layers: int
    kv_tokens: int
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is measured at each TP. Raises InputError for values that make no sense.

    Prefill: every `batches` x `prompts` that fits `max_batched_tokens`; decode: every `batches` x `contexts`, all with at
    most `max_requests`. `max_cv_frac` refuses; a refused shot is measured up to `attempts` times.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (128, 512, 2048)
    contexts: tuple[int, ...] = (256, 1024, 4096)
    max_batched_tokens: int = 8192
    max_requests: int = 256
    samples: int = 12
    max_cv_frac: float = 0.1
    attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("batches", "prompts", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise InputError(f"{values} must be different whole numbers above 0", where=f"sweep.{name}")
        if self.samples < 3 or self.attempts < 1 or min(self.max_batched_tokens, self.max_requests) < 1:
            raise InputError("at least 3 samples, 1 attempt, 1 token and 1 request", where="sweep")
        if not 0 < self.max_cv_frac <= 1:
            raise InputError(f"is {self.max_cv_frac!r}, must be above 0 and at most 1", where="sweep.max_cv_frac")

    def shots(self, tp: int, layers: int) -> list[Shot]:
        """All shots of one engine: small ones first, so that a run cut short has the most."""
        batches = [count for count in self.batches if count <= self.max_requests]
        shots = [
            Shot(tp=tp, layers=layers, phase=phase, requests=count, tokens=tokens)
            for phase, lengths in ((Phase.PREFILL, self.prompts), (Phase.DECODE, self.contexts))
            for tokens in lengths
            for count in batches
            if phase is Phase.DECODE or count * tokens <= self.max_batched_tokens
        ]
        return sorted(shots, key=lambda shot: (shot.requests * shot.tokens, shot))


def tp_sizes(shape: ModelShape, config: NodeConfig) -> tuple[int, ...]:
    """Every TP that divides the node's GPUs and the model's heads, smallest first."""
    return tuple(tp for tp in range(1, config.gpu_count + 1) if config.gpu_count % tp == 0 and tp_runs(shape, tp))


def default_depths(shape: ModelShape) -> tuple[int, int]:
    """One and two whole periods of the attention pattern, at least two layers each, beyond dense layers at the beginning."""
    dense = 0 if shape.moe is None else shape.moe.dense_layers
    windowed = 0 if shape.sliding_window is None else shape.sliding_window.layers
    rarer = min(windowed, shape.layers - windowed)
    period = max(round(shape.layers / rarer), 2) if rarer else 2
    return checked_depths((dense + period, dense + 2 * period), shape)


def checked_depths(depths: Sequence[int], shape: ModelShape) -> tuple[int, int]:
    """Two depths that the model has, the smaller first. Raises InputError."""
    if len(depths) != 2 or not 1 <= depths[0] < depths[1] <= shape.layers:
        raise InputError(
            f"depths {', '.join(map(str, depths))} are not two rising numbers of layers up to {shape.layers}",
            where=f"profile of {shape.name}",
            fix="give two numbers of layers, such as 2 and 4",
        )
    return depths[0], depths[1]


def noise(times: ShotTimes, max_cv_frac: float) -> str:
    """Why a shot's samples are refused; empty where they are not."""
    values = np.array(times.samples_s)
    if len(values) < 2 or not np.isfinite(values).all() or values.min(initial=math.inf) <= 0:
        return f"{len(values)} samples, of which some are no times"
    if times.cv_frac > max_cv_frac:
        return f"coefficient of variation {times.cv_frac:.3f}, allowed {max_cv_frac:g}"
    return ""


def fitted_points(
    times: Mapping[Shot, ShotTimes], depths: tuple[int, int], *, max_cv_frac: float
) -> tuple[tuple[ProfilePoint, ...], dict[Shot, str]]:
    """Layer and fixed seconds of every shot that was measured at both depths, and why others of the larger depth were refused."""
    points: list[ProfilePoint] = []
    refused: dict[Shot, str] = {}
    low, high = depths
    for shot in sorted(times):
        if shot.layers != high:
            continue
        other = Shot(tp=shot.tp, layers=low, phase=shot.phase, requests=shot.requests, tokens=shot.tokens)
        if other not in times:
            refused[shot] = f"not measured at {low} layers"
            continue
        one, two = times[other], times[shot]
        layer_s = (two.seconds - one.seconds) / (high - low)
        error_s = math.hypot(one.error_s, two.error_s) / (high - low)
        if layer_s <= 0 or error_s / layer_s > max_cv_frac:
            refused[shot] = (
                f"a layer would take {layer_s:.3g} s with a standard error of {error_s:.3g}, allowed {max_cv_frac:g} of it"
            )
            continue
        points.append(
            ProfilePoint(
                phase=shot.phase,
                tp=shot.tp,
                requests=float(shot.requests),
                tokens=float(shot.tokens),
                layer_s=layer_s,
                fixed_s=max(one.seconds - low * layer_s, 0.0),
                samples=min(len(one.samples_s), len(two.samples_s)),
                cv_frac=max(one.cv_frac, two.cv_frac, error_s / layer_s),
            )
        )
    return tuple(points), refused


def falling(points: Sequence[ProfilePoint]) -> set[ProfilePoint]:
    """Both points of every pair of neighbours whose time falls by more than a profile may as the step grows: one is noise."""
    found: set[ProfilePoint] = set()
    groups: dict[tuple[object, ...], list[ProfilePoint]] = {}
    for point in points:
        groups.setdefault((point.phase, point.tp, "tokens", point.tokens), []).append(point)
        groups.setdefault((point.phase, point.tp, "requests", point.requests), []).append(point)
    for group in groups.values():
        ordered = sorted(group, key=lambda point: (point.requests, point.tokens))
        for before, after in pairwise(ordered):
            if after.layer_s < before.layer_s * (1 - LARGEST_DROP):
                found |= {before, after}
    return found


def whole_kv_tokens(starts: Iterable[EngineStart], layers: int) -> dict[int, float]:
    """KV tokens of the whole model by TP: room in token-layers is a straight line in the layers that hold weights.

    Left out where fewer than two depths started, or where the whole model leaves none.
    """
    found: dict[int, float] = {}
    for tp, (one, two) in _pairs(starts).items():
        room = [start.kv_tokens * start.layers for start in (one, two)]
        slope = (room[1] - room[0]) / (two.layers - one.layers)
        tokens = (room[0] + slope * (layers - one.layers)) / layers
        if tokens >= 1:
            found[tp] = float(math.floor(tokens))
    return found


def whole_start_s(starts: Iterable[EngineStart], layers: int) -> dict[int, float]:
    """Seconds to start the whole model with dummy weights by TP: a straight line in layers that does not fall."""
    return {
        tp: one.start_s + max(two.start_s - one.start_s, 0.0) / (two.layers - one.layers) * (layers - one.layers)
        for tp, (one, two) in _pairs(starts).items()
    }


def _pairs(starts: Iterable[EngineStart]) -> dict[int, tuple[EngineStart, EngineStart]]:
    by_tp: dict[int, dict[int, EngineStart]] = {}
    for start in starts:
        by_tp.setdefault(start.tp, {})[start.layers] = start
    return {tp: (both[min(both)], both[max(both)]) for tp, both in sorted(by_tp.items()) if len(both) > 1}


@dataclass(slots=True, kw_only=True)
class ProfileBudget:
    """What a run may take: seconds in all, USD in all. Raises InputError for values that are not above 0.

    A node's time is paid from its start to its release, which may take `release_s` after it was asked for.
    """

    max_s: float
    max_usd: float
    release_s: float = 60.0
    spent_usd: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_s", "max_usd"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"is {value!r}, must be a number above 0", where=name)

    def require(self, price_usd_per_h: float) -> None:
        """InputError where even all of it does not last for a node of this price: to run again would not help."""
        if (
            ProfileBudget(max_s=self.max_s, max_usd=self.max_usd, release_s=self.release_s).allowed_s(
                price_usd_per_h, 0
            )
            <= 0
        ):
            raise InputError(
                f"{self.max_s / 60:g} minutes and {self.max_usd:g} USD do not last for a node of {price_usd_per_h:g} USD/h and "
                f"the {self.release_s:g} s that its release may take",
                where="max_minutes, max_usd",
                fix="give more of what is short",
            )

    def allowed_s(self, price_usd_per_h: float, elapsed_s: float) -> float:
        """How long a node of this price may be held from now on, its release included; at most 0 where it may not be started."""
        left_s = self.max_s - elapsed_s
        if price_usd_per_h > 0:
            left_s = min(left_s, (self.max_usd - self.spent_usd) / price_usd_per_h * SECONDS_PER_H)
        return left_s - self.release_s

    def pay(self, price_usd_per_h: float, held_s: float) -> None:
        """A node was held for so long."""
        self.spent_usd += price_usd_per_h * held_s / SECONDS_PER_H

    def bound_usd(self, prices_usd_per_h: Sequence[float]) -> float:
        """No run over nodes of these prices, one after the other, costs more."""
        return min(self.max_usd, max(prices_usd_per_h, default=0.0) * self.max_s / SECONDS_PER_H)
