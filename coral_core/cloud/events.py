"""What calls for a plan before the next scheduled one, and when such a run is started. Pure.

A serving instance is dead or has lost a node, the cloud takes a spot node back, more is asked than the plan holds, or capacity that a short
plan lacked can be had: `what_holds` states which of these hold now. Those that did not hold at the last look are news, and
`debounced` turns news into runs:

    pending = there is news that no run has begun after
    ask for a run when news is pending, no run is under way, and the last one was asked for or began `window_s` ago or more

So at most one run begins per window, at most one is waiting, and whatever happens during a run leads to exactly one more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from coral_core.cloud.fleet_view import Condition
from coral_core.errors import InputError


class EventKind(StrEnum):
    """What may happen to a fleet."""

    INSTANCE_DEAD = "instance-dead"
    INSTANCE_DEGRADED = "instance-degraded"
    SPOT_NOTICE = "spot-notice"
    DEMAND_ABOVE_PLAN = "demand-above-plan"
    CAPACITY_BACK = "capacity-back"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FleetCondition:
    """Something that holds of a fleet now; (`kind`, `subject`) tells it apart, `detail` is for people."""

    kind: EventKind
    subject: str
    detail: str

    @property
    def key(self) -> tuple[EventKind, str]:
        """What makes it the same thing at two looks."""
        return (self.kind, self.subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at a fleet has found; what could not be seen is left out, which is no news of it.

    `instances`: condition and reason by instance id. `wanted` and `live`: serving instances by (template, region), as
    the plan in force has them and as there are. `asked` and `held`: requests/s by model, forecast and as the plan's
    capacity holds them. `lacked`: nodes by (region, configuration) that could be had when a plan was made that falls
    short (empty where it does not), `to_be_had`: now.
    """

    instances: Mapping[str, tuple[Condition, str]]
    wanted: Mapping[tuple[str, str], int]
    live: Mapping[tuple[str, str], int]
    asked: Mapping[str, float]
    held: Mapping[str, float]
    lacked: Mapping[tuple[str, str], int]
    to_be_had: Mapping[tuple[str, str], int]


def what_holds(look: Look, *, tolerance_frac: float) -> tuple[FleetCondition, ...]:
    """All that calls for a new plan, in a fixed order. Demand counts from (1 + `tolerance_frac`) x what is held."""
    found = [
        FleetCondition(kind=kind, subject=name, detail=f"{name}: {reason}")
        for name, (condition, reason) in look.instances.items()
        for kind in _KIND_OF.get(condition, ())
    ]
    for (template, region), count in look.wanted.items():
        live = look.live.get((template, region), 0)
        if live < count:
            subject = f"{template} in {region}"
            found.append(
                FleetCondition(
                    kind=EventKind.INSTANCE_DEAD, subject=subject, detail=f"{subject}: {live} of {count} are there"
                )
            )
    for model, asked in look.asked.items():
        held = look.held.get(model)
        if held is not None and asked > held * (1 + tolerance_frac):
            detail = f"{model}: {asked:.3g} requests/s are asked for, the plan holds {held:.3g}"
            found.append(FleetCondition(kind=EventKind.DEMAND_ABOVE_PLAN, subject=model, detail=detail))
    for (region, config), then in look.lacked.items():
        now = look.to_be_had.get((region, config))
        if now is not None and now > then:
            subject = f"{config} in {region}"
            detail = f"{subject}: {now} can be had, {then} when the plan fell short"
            found.append(FleetCondition(kind=EventKind.CAPACITY_BACK, subject=subject, detail=detail))
    return tuple(sorted(found))


_KIND_OF: Mapping[Condition, tuple[EventKind, ...]] = {
    Condition.FAILED: (EventKind.INSTANCE_DEAD,),
    Condition.DEGRADED: (EventKind.INSTANCE_DEGRADED,),
    Condition.LEAVING: (EventKind.SPOT_NOTICE,),
}


def news(now: tuple[FleetCondition, ...], before: tuple[FleetCondition, ...]) -> tuple[FleetCondition, ...]:
    """What holds now and did not at the look before."""
    known = {condition.key for condition in before}
    return tuple(condition for condition in now if condition.key not in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Debounce:
    """When the latest news came that no run has begun after (None: there is none), and when a run was last asked for."""

    news_at_s: float | None = None
    asked_at_s: float = -math.inf


def debounced(
    state: Debounce, *, now_s: float, news: bool, running: bool, last_start_s: float | None, window_s: float
) -> tuple[Debounce, bool]:
    """The next state, and whether to ask for a run now.

    `running`: a run is under way or due, whoever asked for it. `last_start_s`: when the newest run began, on the clock of
    `now_s`. A run that does not begin within the window is asked for again. Raises InputError for a negative window.
    """
    if not window_s >= 0:
        raise InputError(f"is {window_s} s, must be at least 0", where="window_s")
    begun_s = -math.inf if last_start_s is None else last_start_s
    pending_s = now_s if news else state.news_at_s
    if pending_s is None or (begun_s > pending_s and not running):  # one that runs may yet find that another one acts
        return Debounce(news_at_s=None, asked_at_s=state.asked_at_s), False
    if running or now_s - max(begun_s, state.asked_at_s) < window_s:
        return Debounce(news_at_s=pending_s, asked_at_s=state.asked_at_s), False
    return Debounce(news_at_s=pending_s, asked_at_s=now_s), True
