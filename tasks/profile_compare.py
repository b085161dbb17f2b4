"""A profile's points beside another profile, or beside what estimates say: quantiles of the relative error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from coral_core.catalog import find_config, find_model, load_catalog, load_models
from coral_core.config.settings import load_settings
from coral_core.domain.hardware import Gpu
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths, Phase
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import load_factors
from coral_core.perf.profile import Profile, ProfilePoint
from coral_core.perf.roofline import Step, layer_time
from tasks.ledger import quantiles


def against_profile(profile: Profile, other: Profile) -> list[dict[str, Any]]:
    """`other`, read between its points, against the points of `profile`; TP sizes and phases that both have.

    Raises DataGapError where they have none in common.
    """

    def seconds(point: ProfilePoint) -> float | None:
        curves = other.curves(point.phase, point.tp)
        return (
            None if curves is None else float(curves.layer_times(np.array([point.requests]), point.tokens).seconds[0])
        )

    rows = _compared(profile, seconds)
    if not rows:
        other.require(profile.points[0].phase, profile.points[0].tp)
    return rows


def against_estimates(profile: Profile, *, catalog: str) -> list[dict[str, Any]]:
    """The analytic estimate against the points of `profile`. Raises InputError for a configuration that the catalogue lacks."""
    shape = find_model(load_models(load_settings().models), profile.key.model)
    gpu = find_config(load_catalog(catalog), profile.key.config).gpu
    return _compared(profile, lambda point: estimated_layer_s(point, shape, profile.key.variant, gpu))


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


def _compared(profile: Profile, seconds: Callable[[ProfilePoint], float | None]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for point in profile.points:
        found = seconds(point)
        if found is not None:
            groups[point.phase.value, point.tp].append(found / point.layer_s - 1)
    return [
        {"phase": phase, "tp": tp, **quantiles(errors), "median_error_frac": float(np.median(errors))}
        for (phase, tp), errors in groups.items()
    ]
