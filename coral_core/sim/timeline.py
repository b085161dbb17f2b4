"""From the plans of successive epochs to one fleet with its lifecycle.

Instances are kept where the next plan has the same template in the same region. What a plan adds begins to boot as its
epoch begins. What it drops is drained then too, unless an instance of the same model boots in its stead and the epoch's
supply holds both: then it serves until the new one is ready, or the epoch ends (make before break, as `reconcile` does).
Which of several equal instances is drained is decided in the run: the least loaded (`drain_one`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coral_core.errors import InputError
from coral_core.sim.inputs import LifecycleEvent, LifecycleKind, SimInstance

Key = tuple[str, str]
"""(template, region)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All instances that ever are, those of the first epoch ready at its start, and what befalls them, by time."""

    instances: tuple[SimInstance, ...]
    lifecycle: tuple[LifecycleEvent, ...]


def timeline(
    plans: Sequence[Mapping[Key, int]],
    instance_of: Callable[[str, str], SimInstance],
    *,
    supply: NDArray[np.int64],
    nodes: Mapping[str, NDArray[np.int64]],
    regions: Sequence[str],
    epoch_s: float,
    boot_s: float,
) -> Timeline:
    """The fleet of `plans`, instances by (template, region), one mapping per epoch of `epoch_s` seconds.

    `instance_of(template, region)` makes one; `nodes` are its (C,) by template, `supply` is (epochs, R, C). Raises
    InputError where there is not one supply per plan.
    """
    if len(plans) != len(supply):
        raise InputError(f"{len(plans)} plans, supply of {len(supply)} epochs", where="timeline")
    models = {template: instance_of(template, region).model for plan in plans for template, region in plan}
    instances: list[SimInstance] = []
    events: list[LifecycleEvent] = []
    made: Counter[Key] = Counter()
    before: Counter[Key] = Counter()
    for epoch, plan in enumerate(plans):
        wanted, at_s = Counter(dict(plan)), epoch * epoch_s
        added = sorted((wanted - before).items())
        for key, count in added:
            for _ in range(count):
                one = replace(
                    instance_of(*key),
                    name=f"{key[0]}@{key[1]}#{made[key]}",
                    boot_s=boot_s,
                    ready_at_start=epoch == 0,
                )
                made[key] += 1
                instances.append(one)
                if epoch > 0:
                    events.append(LifecycleEvent(at_s=at_s, kind=LifecycleKind.START, instance=one.name))
        booting = {models[template] for (template, _), _ in added}
        spare = supply[epoch] - held_nodes(wanted, nodes, regions, shape=supply[epoch].shape)
        for (template, region), count in sorted((before - wanted).items()):
            r = regions.index(region)
            for _ in range(count):
                stays = models[template] in booting and bool((nodes[template] <= spare[r]).all())
                if stays:
                    spare[r] -= nodes[template]
                events.append(
                    LifecycleEvent(
                        at_s=at_s + min(boot_s, epoch_s) * stays,
                        kind=LifecycleKind.DRAIN_ONE,
                        template=template,
                        region=region,
                    )
                )
        before = wanted
    return Timeline(instances=tuple(instances), lifecycle=tuple(sorted(events, key=lambda event: event.at_s)))


def held_nodes(
    counts: Mapping[Key, int], nodes: Mapping[str, NDArray[np.int64]], regions: Sequence[str], *, shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """(R, C) nodes that instances by (template, region) take."""
    held = np.zeros(shape, dtype=np.int64)
    for (template, region), count in counts.items():
        held[regions.index(region)] += count * nodes[template]
    return held
