"""Whether the times of a profile can be true: values, rows that are there twice, physical bounds, and noise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from coral_core.domain import model_math
from coral_core.domain.hardware import Gpu
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.perf.profile import PHASES, ProfilePoint
from coral_core.perf.search import tp_runs

LARGEST_DROP: Final = 0.1
"""A time that falls by more than this share as a step grows is noise or a mistake: refused. Less is levelled out."""

SLOWEST_TIMES: Final = 1000.0
SLOWEST_S: Final = 0.1
"""A layer that takes more than SLOWEST_TIMES what the peaks allow, and more than SLOWEST_S, was given in another unit."""

LARGEST_FIXED_TIMES: Final = 10.0
LARGEST_FIXED_S: Final = 1.0
"""So was a step's fixed part that is more than so many times all the model's layers, and more than LARGEST_FIXED_S."""

LARGEST_COUNT: Final = 1e9
"""More samples than this were not taken."""


def checked_points(
    points: Sequence[ProfilePoint],
    shape: ModelShape,
    variant: str,
    gpu: Gpu,
    gpu_count: int,
    *,
    where: str,
    lines: Sequence[int] = (),
) -> tuple[ProfilePoint, ...]:
    """The points, if they can be true; every error names `where` and the points' `lines` there, without them the row from 1.

    Raises InputError for values that are not above 0, points that are there twice, TP that the model or the node cannot
    have, contexts longer than the model takes, times faster than the GPU's peaks allow or slower than any unit explains,
    and times that fall by more than LARGEST_DROP as steps grow.
    """
    check_values(points, where=where, lines=lines)
    for row, point in enumerate(points):
        place = _place(where, lines, row)
        if gpu_count % point.tp or not tp_runs(shape, point.tp):
            raise InputError(f"{shape.name} cannot run at TP {point.tp} on {gpu_count} GPUs", where=place)
        if point.phase is Phase.DECODE and point.tokens > shape.max_context_tokens:
            most = f"{shape.name} takes no more than {shape.max_context_tokens:g}"
            raise InputError(f"tokens is {point.tokens:g}, but {most}", where=place)
        _check_time(point, least_layer_s(point, shape, variant, gpu), gpu, place)
        layers_s = shape.layers * point.layer_s
        if point.fixed_s is not None and point.fixed_s > max(LARGEST_FIXED_TIMES * layers_s, LARGEST_FIXED_S):
            raise InputError(
                f"the fixed part of a step takes {point.fixed_s * 1e3:.4g} ms, over {LARGEST_FIXED_TIMES:g} times the "
                f"{layers_s * 1e3:.4g} ms of all layers",
                where=place,
                fix="check the unit: microseconds?",
            )
    _refuse_drops(points, where, lines)
    return tuple(points)


def check_values(points: Sequence[ProfilePoint], *, where: str, lines: Sequence[int] = ()) -> None:
    """InputError, with row or line numbers, unless there are points, all with values that make sense and none there twice."""
    if not points:
        raise InputError("there are no times", where=where)
    seen: dict[tuple[object, ...], int] = {}
    for row, point in enumerate(points):
        _check_point(point, _place(where, lines, row))
        identity = (point.phase, point.tp, point.requests, point.tokens)
        if identity in seen:
            raise InputError(
                f"{point.phase} at TP {point.tp}, {point.requests:g} requests of {point.tokens:g} tokens is there twice",
                where=_place(where, lines, seen[identity], row),
            )
        seen[identity] = row


def _place(where: str, lines: Sequence[int], *rows: int) -> str:
    if lines:
        return f"{where}:{' and '.join(str(lines[row]) for row in rows)}"
    return f"{where}: row{'s' if len(rows) > 1 else ''} {' and '.join(str(row + 1) for row in rows)}"


def _check_point(point: ProfilePoint, place: str) -> None:
    for name, value in (("requests", point.requests), ("tokens", point.tokens), ("layer_s", point.layer_s)):
        if not math.isfinite(value) or value <= 0:
            raise InputError(f"{name} is {value!r}, must be a number above 0", where=place)
    for name, known in (("fixed_s", point.fixed_s), ("cv_frac", point.cv_frac)):
        if known is not None and not (math.isfinite(known) and known >= 0):
            raise InputError(f"{name} is {known!r}, must be a number of at least 0", where=place)
    if point.cv_frac is not None and point.cv_frac > 1:
        fix = "it is a share: 0.05 for 5%; times that vary by more than themselves are none"
        raise InputError(f"cv_frac is {point.cv_frac:g}, must be at most 1", where=place, fix=fix)
    for name, count in (("tp", point.tp), ("samples", point.samples)):
        if count is not None and not 1 <= count <= LARGEST_COUNT:
            raise InputError(f"{name} is {count}, must be at least 1 and at most {LARGEST_COUNT:g}", where=place)
    if point.phase not in PHASES:
        raise InputError(f"phase {point.phase} has no times of its own", where=place, fix="prefill or decode")


def _check_time(point: ProfilePoint, least_s: float, gpu: Gpu, place: str) -> None:
    if point.layer_s < least_s:
        raise InputError(
            f"a layer takes {point.layer_s * 1e3:.4g} ms, but {gpu.name}'s peaks allow no less than {least_s * 1e3:.4g} ms",
            where=place,
            fix="check the unit, the model and its dtype, and that one layer was timed",
        )
    if point.layer_s > max(SLOWEST_TIMES * least_s, SLOWEST_S):
        raise InputError(
            f"a layer takes {point.layer_s * 1e3:.4g} ms, over {SLOWEST_TIMES:g} times the {least_s * 1e3:.4g} ms "
            f"that {gpu.name}'s peaks allow",
            where=place,
            fix="check the unit: microseconds?",
        )


def least_layer_s(point: ProfilePoint, shape: ModelShape, variant: str, gpu: Gpu) -> float:
    """No layer is faster: its dense weights and active experts once through memory, its FLOPs at the highest peak."""
    chosen, counts = model_math.variant_of(shape, variant), model_math.parameter_counts(shape)
    moe_layers = 0 if shape.moe is None else counts.moe_layers * shape.moe.top_k
    bits = counts.body * chosen.weight_bits + moe_layers * counts.expert * chosen.expert_bits
    tokens = point.requests * (point.tokens if point.phase is Phase.PREFILL else 1.0)
    flops = 2 * (counts.body + moe_layers * counts.expert) * tokens
    share = 1 / (shape.layers * point.tp)
    peak = max(gpu.compute_flops_per_s.values())
    return max(bits / 8 * share / gpu.memory_bandwidth_bytes_per_s, flops * share / peak)


def _refuse_drops(points: Sequence[ProfilePoint], where: str, lines: Sequence[int]) -> None:
    groups: dict[tuple[object, ...], list[tuple[float, float, int]]] = defaultdict(list)
    for row, point in enumerate(points):
        groups[point.phase, point.tp, "tokens", point.tokens].append((point.requests, point.layer_s, row))
        groups[point.phase, point.tp, "requests", point.requests].append((point.tokens, point.layer_s, row))
    for (phase, tp, _, _), group in groups.items():
        ordered = sorted(group)
        for (_, before_s, first), (_, after_s, second) in pairwise(ordered):
            if after_s < before_s * (1 - LARGEST_DROP):
                raise InputError(
                    f"{phase} at TP {tp} falls from {before_s:.4g} to {after_s:.4g} s as the step grows",
                    where=_place(where, lines, first, second),
                    fix="measure again: times are too noisy",
                )
