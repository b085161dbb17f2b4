"""What befalls a fleet, as lifecycle events: spot losses with their notice, and seeded random failures."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coral_core.errors import InputError
from coral_core.sim.inputs import LifecycleEvent, LifecycleKind
from coral_core.units import SECONDS_PER_H


def spot_loss(instance: str, at_s: float, *, notice_s: float = 120.0) -> tuple[LifecycleEvent, LifecycleEvent]:
    """The provider takes an instance back at `at_s`; it drains from the notice on (AWS gives two minutes)."""
    return (
        LifecycleEvent(at_s=max(at_s - notice_s, 0.0), kind=LifecycleKind.DRAIN, instance=instance),
        LifecycleEvent(at_s=at_s, kind=LifecycleKind.FAIL, instance=instance),
    )


def random_failures(
    instances: Iterable[str], *, failures_per_h: float, repair_s: float, end_s: float, seed: int
) -> tuple[LifecycleEvent, ...]:
    """Independent Poisson failures of each instance, each followed by a start `repair_s` later, in order of time."""
    if not (0 <= failures_per_h < np.inf and 0 <= repair_s < np.inf):
        raise InputError("failure rate and repair time must be finite and not negative", where="random_failures")
    random = np.random.default_rng(seed)
    events: list[LifecycleEvent] = []
    for instance in instances:
        at_s = 0.0
        while failures_per_h > 0:
            at_s += float(random.exponential(SECONDS_PER_H / failures_per_h))
            if at_s >= end_s:
                break
            events.append(LifecycleEvent(at_s=at_s, kind=LifecycleKind.FAIL, instance=instance))
            at_s += repair_s
            if at_s < end_s:
                events.append(LifecycleEvent(at_s=at_s, kind=LifecycleKind.START, instance=instance))
    return tuple(sorted(events, key=lambda event: event.at_s))
