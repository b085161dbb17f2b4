"""A profile's points beside another profile, or beside what estimates say: quantiles of the relative error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from coral_core.catalog import find_model, load_models
from coral_core.config.settings import load_settings
from coral_core.domain.hardware import Gpu
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Lengths, Phase
from coral_core.errors import InputError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import load_factors
from coral_core.perf.profile import Profile, ProfilePoint
from coral_core.perf.roofline import Step, layer_time
from tasks.ledger import quantiles
from tasks.profile_import import profiled_config


def against_profile(profile: Profile, other: Profile) -> list[dict[str, Any]]:
    """`other`, read between its points, against the points of `profile`; TP sizes and phases that both have.

    Raises InputError for profiles of different models, DataGapError where they have no phase and TP in common.
    """
    if profile.key.model != other.key.model:
        raise InputError(
            f"layers of {other.key.model} say nothing of those of {profile.key.model}",
            fix="compare profiles of one model",
        )

    def seconds(point: ProfilePoint) -> tuple[float, CapacitySource] | None:
        curves = other.curves(point.phase, point.tp)
        if curves is None:
            return None
        found = curves.layer_times(np.array([point.requests]), point.tokens)
        return float(found.seconds[0]), found.sources[0]

    rows = _compared(profile, seconds)
    if not rows:
        other.require(profile.points[0].phase, profile.points[0].tp)
    return rows


def against_estimates(profile: Profile, *, catalog: str) -> list[dict[str, Any]]:
    """The analytic estimate against the points of `profile`. Raises InputError for a configuration that the catalogue lacks."""
    shape = find_model(load_models(load_settings().models), profile.key.model)
    gpu, variant = profiled_config(catalog, profile.key.config).gpu, profile.key.variant
    return _compared(profile, lambda point: (estimated_layer_s(point, shape, variant, gpu), CapacitySource.ESTIMATED))


def estimated_layer_s(point: ProfilePoint, shape: ModelShape, variant: str, gpu: Gpu) -> float:
    """What estimates say of a measured point: one layer by itself, without its share of the LM head."""
    count, none = np.array([point.requests]), np.zeros(1)
    prefill = point.phase is Phase.PREFILL
    time = layer_time(
        shape=shape,
        variant=variant,
        gpu=gpu,
        tp=point.tp,
        step=Step(
            decode_requests=none if prefill else count,
            prefill_tokens=count * point.tokens if prefill else none,
            prompts=count if prefill else none,
            produced=count,
        ),
        # A decode time holds for one context, so that is its whole context here: no output adds to it.
        lengths=Lengths(mean_input_tokens=point.tokens, mean_output_tokens=1e-9, source="measured with"),
        factors=load_factors(),
        assumptions=CapacityAssumptions(),
    )
    return float(time.total_s[0] - time.lm_head_s[0])


def _compared(
    profile: Profile, seconds: Callable[[ProfilePoint], tuple[float, CapacitySource] | None]
) -> list[dict[str, Any]]:
    groups: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
    for point in profile.points:
        if found := seconds(point):
            groups[point.phase.value, point.tp].append((found[0] / point.layer_s - 1, found[1].value))
    return [
        {
            "phase": phase,
            "tp": tp,
            **quantiles([error for error, _ in compared]),
            "median_error_frac": float(np.median([error for error, _ in compared])),
            "sources": dict(Counter(source for _, source in compared)),
        }
        for (phase, tp), compared in groups.items()
    ]
