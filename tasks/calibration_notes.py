"""What makes the headroom that was found a matter of chance: too few requests, or the same ones for every seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from coral_core.config.resolve import ResolvedScenario
from coral_core.config.scenario import TraceSpec

ENOUGH_REQUESTS: Final = 1000
"""Of a model and seed: with fewer, fewer than five late requests of mean length decide about half a percent."""


def calibration_notes(resolved: ResolvedScenario, seeds: Sequence[int]) -> tuple[str, ...]:
    """By model with demand, why other requests may fare worse than those it is calibrated with; empty where nothing is amiss."""
    duration_s = resolved.scenario.epochs.duration_s
    notes = []
    for spec, model in zip(resolved.scenario.models, resolved.models, strict=True):
        expected = model.demand.requests_per_s * duration_s
        if 0 < expected < ENOUGH_REQUESTS:
            notes.append(
                f"{spec.model}: about {expected:.3g} requests in an epoch of {duration_s:g} s are few, and others may fare"
                " worse; calibrate with a longer `epochs.duration_s`"
            )
        if expected > 0 and len(seeds) > 1 and isinstance(spec.lengths, TraceSpec):
            notes.append(f"{spec.model}: its trace is replayed, so that all {len(seeds)} seeds try the same requests")
    return tuple(notes)
