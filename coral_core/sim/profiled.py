"""A node's timing from a measured profile, in the place of estimates.

Data: layer seconds and fixed seconds of the profile's points at one TP: prefill of r prompts of n tokens, decode of r
requests at context c. Each of the two is fitted by
Variables: f(x) >= 0, never falling, on the grid of all measured tokens per step; a per sampled row, k per KV token read,
p per attended pair, all >= 0.

    prefill  f(r n) + r a + p r n (n + 1) / 2         decode  f(r) + r a + k r c

Objective: least sum of squared relative errors (non-negative least squares; f as a sum of steps up); of the fixed seconds
relative to layer and fixed part together. Times beyond the grid go on with its last slope.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError
from coral_core.perf.measured import profiled_tps
from coral_core.perf.profile import Profile, ProfilePoint
from coral_core.sim.inputs import NodeTiming

Floats = NDArray[np.float64]

_ROUNDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTiming:
    """Timing of one layer and of what a step takes besides; relative errors of the layer's at the profile's points.

    The largest steps measured: `most_requests` that decode, `most_prompt_tokens`.
    """

    layer: NodeTiming
    fixed: NodeTiming
    error_frac: tuple[float, ...]
    most_requests: float
    most_prompt_tokens: float

    def node(self, layers: int, *, first: bool = True) -> NodeTiming:
        """Timing of a node with so many layers; what a step takes besides is paid once, by the first stage's nodes."""
        once = float(first)
        layer, fixed = self.layer, self.fixed
        return NodeTiming(
            grid=layer.grid,
            token_s=tuple(layers * a + once * b for a, b in zip(layer.token_s, fixed.token_s, strict=True)),
            row_s=tuple(layers * a + once * b for a, b in zip(layer.row_s, fixed.row_s, strict=True)),
            kept_token_s=layers * layer.kept_token_s + once * fixed.kept_token_s,
            pair_s=layers * layer.pair_s + once * fixed.pair_s,
        )


def profiled_timing(profile: Profile, tp: int, *, assumed_fixed_s: float | None = None) -> ProfiledTiming:
    """The timing that fits the profile's points at one TP best. DataGapError where a phase was not measured.

    `assumed_fixed_s`: what a step takes besides its layers where the profile does not know it; DataGapError without.
    """
    for phase in (Phase.PREFILL, Phase.DECODE):
        profile.require(phase, tp)
    points = [point for point in profile.points if point.tp == tp]
    grid = np.unique([0.0, *(_tokens(point) for point in points)])
    matrix = np.array([_row(point, grid) for point in points])
    layer_s = np.array([point.layer_s for point in points])
    fixed_s = np.array([_fixed_s(point, profile, assumed_fixed_s) for point in points])
    layer = nonnegative_least_squares(matrix / layer_s[:, None], np.ones(len(points)))
    whole_s = layer_s + fixed_s
    fixed = nonnegative_least_squares(matrix / whole_s[:, None], fixed_s / whole_s)
    errors = matrix @ layer / layer_s - 1.0
    return ProfiledTiming(
        layer=_timing(grid, layer),
        fixed=_timing(grid, fixed),
        error_frac=tuple(errors.tolist()),
        most_requests=max(point.requests for point in points if point.phase is Phase.DECODE),
        most_prompt_tokens=max(_tokens(point) for point in points if point.phase is Phase.PREFILL),
    )


def profiled_timings(
    profiles: Mapping[str, Profile], phases: Collection[Phase], *, assumed_fixed_s: float | None = None
) -> dict[tuple[Phase, str, int], ProfiledTiming]:
    """By (phase, node configuration, TP), where capacities come from profiles (`perf.measured`).

    DataGapError for a profile that has no times of the other phase: a node that decodes computes prompts too, those of
    preempted requests; and a step of both takes what both take.
    """
    found: dict[tuple[Phase, str, int], ProfiledTiming] = {}
    for config, profile in profiles.items():
        of_phase = {phase: profiled_tps(profile, phase) for phase in phases}
        fitted = {
            tp: profiled_timing(profile, tp, assumed_fixed_s=assumed_fixed_s)
            for tp in sorted({tp for tps in of_phase.values() for tp in tps})
        }
        found |= {(phase, config, tp): fitted[tp] for phase, tps in of_phase.items() for tp in tps}
    return found


def _fixed_s(point: ProfilePoint, profile: Profile, assumed_s: float | None) -> float:
    found = assumed_s if point.fixed_s is None else point.fixed_s
    if found is None:
        raise DataGapError(
            f"what a step of {profile.key.model} on {profile.key.config} takes besides its layers is not known",
            where=profile.key.engine_name,
            fix="measure it, or import it as fixed_ms",
        )
    return found


def _timing(grid: Floats, found: Floats) -> NodeTiming:
    steps, (row_s, kept_token_s, pair_s) = found[: len(grid)], found[len(grid) :]
    return NodeTiming(
        grid=tuple(grid.tolist()),
        token_s=tuple(np.cumsum(steps).tolist()),
        row_s=tuple((row_s * grid).tolist()),
        kept_token_s=float(kept_token_s),
        pair_s=float(pair_s),
    )


def _tokens(point: ProfilePoint) -> float:
    return point.requests * (point.tokens if point.phase is Phase.PREFILL else 1.0)


def _row(point: ProfilePoint, grid: Floats) -> list[float]:
    """What each variable is multiplied by: the steps up of f to the point's tokens, rows, KV tokens, pairs."""
    tokens, requests = _tokens(point), point.requests
    steps = [1.0 if at <= tokens else 0.0 for at in grid.tolist()]
    kept = requests * point.tokens if point.phase is Phase.DECODE else 0.0
    pairs = requests * point.tokens * (point.tokens + 1) / 2 if point.phase is Phase.PREFILL else 0.0
    return [*steps, requests, kept, pairs]


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 with the least |matrix x - target|, by the active-set method of Lawson and Hanson (1974). DataGapError where it finds no end."""
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    x = np.zeros(scaled.shape[1])
    free = np.zeros(scaled.shape[1], dtype=bool)
    for _ in range(_ROUNDS):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= 1e-10:
            return x / np.where(scale > 0, scale, 1.0)
        free[int(gradient.argmax())] = True
        x = _on_free(scaled, target, x, free)
    raise DataGapError("no timing fits the profile's points", fix="measure more kinds of step")


def _on_free(matrix: Floats, target: Floats, x: Floats, free: NDArray[np.bool_]) -> Floats:
    """The best x on the free variables, those that would fall below 0 fixed there again."""
    while True:
        trial = np.zeros_like(x)
        trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        below = free & (trial <= 0)
        if not below.any():
            return trial
        shares = x[below] / (x[below] - trial[below])
        x = x + shares.min() * (trial - x)
        free &= x > 1e-14
        x[~free] = 0.0
