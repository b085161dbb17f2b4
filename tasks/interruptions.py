"""Spot nodes that are taken back while a fleet is simulated, at the rates that the scenario states."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.hardware import Market, split_market
from coral_core.domain.templates import ServingTemplate
from coral_core.sim import LifecycleEvent, LifecycleKind, SimInstance, spot_loss
from coral_core.sim.timeline import Key, Timeline
from coral_core.units import SECONDS_PER_H

NOTICE_S: Final = 120.0
"""AWS's two minutes, for all clouds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """Losses with their notice, each followed at once by the start of the node that replaces it; and what is left out."""

    events: tuple[LifecycleEvent, ...]
    notes: tuple[str, ...]


def interruptions(
    resolved: ResolvedScenario,
    line: Timeline,
    templates: Mapping[str, ServingTemplate],
    *,
    end_s: float,
    seed: int,
) -> Interruptions:
    """Independent Poisson losses of each spot instance from when it is ready; the same seed, the same losses.

    An instance is lost with the first of its nodes. Which one of a group is drained is decided in the run, so a group
    loses none any more once the plans drain some of it. Rates that are not known give no losses, and a note.
    """
    first_drain = _first_drain(line)
    begun = {event.instance: event.at_s for event in line.lifecycle if event.kind is LifecycleKind.START}
    events: list[LifecycleEvent] = []
    notes: dict[str, None] = {}
    for one in line.instances:
        if resolved.spot is None or split_market(one.template)[1] is Market.ON_DEMAND:
            continue
        rate = resolved.spot.losses_per_h(one.region, templates[one.template].placement.combination)
        until_s = first_drain.get((one.template, one.region), end_s)
        if rate is None:
            notes[f"how often {one.template} is interrupted in {one.region} is not known: it never is"] = None
        elif rate > 0:
            ready_s = 0.0 if one.ready_at_start else begun[one.name] + one.boot_s
            random = np.random.default_rng([seed, zlib.crc32(one.name.encode())])
            events += _losses(one, rate, ready_s, until_s, random)
            if until_s < end_s:
                notes[
                    f"{one.template} in {one.region} is not interrupted after {until_s:g} s, when some is drained"
                ] = None
    return Interruptions(events=tuple(sorted(events, key=lambda event: event.at_s)), notes=tuple(notes))


def _losses(
    one: SimInstance, rate_per_h: float, ready_s: float, until_s: float, random: np.random.Generator
) -> Iterator[LifecycleEvent]:
    while True:
        lost_s = ready_s + float(random.exponential(SECONDS_PER_H / rate_per_h))
        if lost_s >= until_s:
            return
        notice_s = min(NOTICE_S, lost_s - ready_s)
        yield from spot_loss(one.name, lost_s, notice_s=notice_s)
        yield LifecycleEvent(at_s=lost_s, kind=LifecycleKind.START, instance=one.name)
        ready_s = lost_s + one.boot_s


def _first_drain(line: Timeline) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for event in line.lifecycle:
        if event.kind is LifecycleKind.DRAIN_ONE:
            found.setdefault((event.template, event.region), event.at_s)
    return found
