"""Watch a fleet: look at what runs, what is asked and what can be had, and ask for a run where something cannot wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from artifacts.fleets import Outcome, list_runs, plan_in_force, used_regions
from artifacts.library import open_library
from artifacts.plans import StoredPlan, read_plan
from artifacts.store import Store
from coral_core.clock import Clock
from coral_core.cloud.engine_port import Engine, signals_of
from coral_core.cloud.events import Debounce, FleetCondition, Look, debounced, news, what_holds
from coral_core.cloud.fleet_view import Condition, Instance, gather, judge
from coral_core.cloud.steps import ReconcilePolicy
from coral_core.cloud.supply import Reading
from coral_core.config.demand import DemandSpec
from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.hardware import market_name, split_market
from coral_core.errors import CoralError, InputError
from coral_core.forecast import DemandForecast
from tasks.demand import length_factor, measured_demand
from tasks.observe import Observation, observe
from tasks.providers import Provider

_ACTED = {Outcome.CONVERGED, Outcome.UNMET, Outcome.DEADLINE}
"""Outcomes of runs that made the fleet what their plan wants, as far as it could be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is looked at, and through what."""

    resolved: ResolvedScenario
    store: Store
    fleet: str
    provider: Provider
    demand: DemandSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsSeen:
    """Whether a run is under way or due, and when the newest one began (seconds since 1970)."""

    running: bool
    last_start_s: float | None


class Runs(Protocol):
    """Where runs are started. Methods raise CoralError where it does not answer."""

    def seen(self, now_s: float) -> RunsSeen:
        """What the newest runs are up to, whoever started them."""
        ...

    def tell(self, found: Sequence[FleetCondition]) -> None:
        """Make news known."""
        ...

    def ask(self, found: Sequence[FleetCondition]) -> None:
        """Ask for a run because of these."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How often to look, how long runs are kept apart at least, and how much demand may pass what a plan holds."""

    poll_s: float = 30.0
    window_s: float = 120.0
    tolerance_frac: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (("poll_s", 0.1), ("window_s", 0.0), ("tolerance_frac", 0.0)):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise InputError(f"is {value}, must be at least {least:g}", where=name)


def keep_watch(
    look_once: Callable[[], tuple[Look, tuple[str, ...]]],
    runs: Runs,
    policy: WatchPolicy,
    *,
    clock: Clock,
    sleep: Callable[[float], None],
    say: Callable[[str], None],
    looks: int | None = None,
) -> None:
    """Look every `poll_s` (for ever, or so many times), and ask for a run on news, debounced.

    A look that fails, or a server that is away, is said once per cause and costs that look only: news stays pending.
    """
    before: tuple[FleetCondition, ...] = ()
    pending: dict[object, tuple[float, FleetCondition]] = {}
    state, said = Debounce(), ""
    done = 0
    while looks is None or done < looks:
        done += 1
        fresh: tuple[FleetCondition, ...] = ()
        trouble = ""
        try:
            seen, notes = look_once()
            holds = what_holds(seen, tolerance_frac=policy.tolerance_frac)
            fresh, before = news(holds, before), holds
            trouble = "; ".join(notes)
        except CoralError as error:
            trouble = f"could not look: {error}"
        for condition in fresh:
            pending[condition.key] = (clock.now().timestamp(), condition)
            say(f"{condition.kind}: {condition.detail}")
        try:
            state = _consider(runs, state, fresh, pending, policy, now_s=clock.now().timestamp(), say=say)
        except CoralError as error:
            trouble = f"{trouble}; {error}" if trouble else str(error)
            if fresh:  # not lost: it counts as news of now, whatever the server says when it is back
                state = Debounce(news_at_s=clock.now().timestamp(), asked_at_s=state.asked_at_s)
        if trouble != said and trouble:
            say(trouble)
        said = trouble
        if looks is None or done < looks:
            sleep(policy.poll_s)


def _consider(
    runs: Runs,
    state: Debounce,
    fresh: Sequence[FleetCondition],
    pending: dict[object, tuple[float, FleetCondition]],
    policy: WatchPolicy,
    *,
    now_s: float,
    say: Callable[[str], None],
) -> Debounce:
    """Ask for a run where one is due; `pending` holds news and when it came, until all of it is served."""
    if not fresh and state.news_at_s is None:
        return state
    runs.tell(fresh)
    seen = runs.seen(now_s)
    after, ask = debounced(
        state,
        now_s=now_s,
        news=bool(fresh),
        running=seen.running,
        last_start_s=seen.last_start_s,
        window_s=policy.window_s,
    )
    if ask:
        due = [found for at_s, found in pending.values() if seen.last_start_s is None or at_s >= seen.last_start_s]
        runs.ask(due)
        say(f"asked for a run because of {len(due)} piece{'s' if len(due) > 1 else ''} of news")
    if after.news_at_s is None:
        pending.clear()
    return after


def look(watched: Watched) -> tuple[Look, tuple[str, ...]]:
    """What holds now, and what could not be seen. Without a plan there is nothing to compare with: all is empty.

    Raises StoreError, ProvisionError and DataGapError where nothing can be seen at all.
    """
    store, fleet, resolved = watched.store, watched.fleet, watched.resolved
    now = watched.provider.clock.now()
    plan = plan_in_force(store, fleet, now=now)
    if plan is None:
        return _nothing(), (f"fleet {fleet} has no plan yet",)
    # Whoever releases a fleet must not have it rented again for being gone.
    if any(run.mode == "teardown" for run in list_runs(store, fleet, newest=1, acted=True)):
        return _nothing(), (f"fleet {fleet} was torn down: nothing is watched until a run acts again",)
    snapshot = open_library(store, resolved.scenario.library_name)
    seen = observe(watched.provider, store, fleet, resolved, snapshot, regions=used_regions(store, fleet))
    forecasts, notes = measured_demand(resolved, store, fleet, watched.demand, now=now)
    known = {model.shape.name: model for model in resolved.models}
    asked = {
        name: found.requests_per_s * (length_factor(known[name], found) or 1.0)
        for name, found in forecasts.items()
        if isinstance(found, DemandForecast)
    }
    unknown = [name for name in known if name not in asked]
    if unknown:
        notes.append(f"the demand of {', '.join(unknown)} is not watched: measurements are missing or stale")
    instances = gather(seen.nodes)
    conditions = {i.instance_id: _condition(i, watched.provider.engine, now) for i in instances}
    standing = {Condition.STARTING, Condition.UP, Condition.LEAVING, Condition.DEGRADED}
    return Look(
        instances=conditions,
        wanted=wanted_instances(store, fleet),
        live=Counter((i.template_id, i.region) for i in instances if conditions[i.instance_id][0] in standing),
        asked=asked,
        held=held_requests_per_s(plan.plan),
        lacked=lacked_nodes(plan),
        to_be_had=nodes_to_be_had(seen),
    ), tuple(notes)


def held_requests_per_s(plan: Mapping[str, Any]) -> dict[str, float]:
    """Requests/s of each model that a plan's capacity holds: its demand times capacity over demand, least over phases.

    A model without demand in the plan holds none.
    """
    rates = {row["model"]: row["requests_per_s"] for row in plan["demand"] if row["requests_per_s"] is not None}
    held = {}
    for model, rate in rates.items():
        rows = [row for row in plan["coverage"] if row["model"] == model]
        held[model] = rate * min((row["capacity"] / row["demand"] for row in rows if row["demand"] > 0), default=0.0)
    return held


def wanted_instances(store: Store, fleet: str) -> dict[tuple[str, str], int]:
    """Instances by (template, region) of the newest plan that was carried out; empty where none was.

    After a run that could not have all it wanted, what is missing is known: then only what is there is watched over.
    """
    runs = list_runs(store, fleet, newest=50, acted=True)
    acted = [run for run in runs if run.planned and run.outcome in _ACTED]
    if not acted or acted[-1].outcome is not Outcome.CONVERGED:
        return {}
    wanted: Counter[tuple[str, str]] = Counter()
    for item in read_plan(store, fleet, acted[-1].time).plan["instances"]:
        wanted[split_market(item["template"])[0], item["region"]] += item["count"]
    return dict(wanted)


def lacked_nodes(plan: StoredPlan) -> dict[tuple[str, str], int]:
    """Nodes by (region, configuration) that could be had for a plan that falls short; empty for one that does not."""
    if all(item["frac"] <= 0 for item in plan.plan["shortfall"]):
        return {}
    decision = plan.decision
    return {
        (region, config): decision["available"][r][c]
        for r, region in enumerate(decision["regions"])
        for c, config in enumerate(decision["configs"])
    }


def nodes_to_be_had(seen: Observation) -> dict[tuple[str, str], int]:
    """A_r(c) as observed, by the names that plans have for offers; what is not known is left out."""
    return {
        (region, market_name(config, market)): state.available.value
        for (region, config, market), state in seen.supply.offers.items()
        if isinstance(state.available, Reading)
    }


def _condition(instance: Instance, engine: Engine, now: datetime) -> tuple[Condition, str]:
    """By what the cloud and the serving side say; one that is slow is the business of runs."""
    policy = ReconcilePolicy(zones={})
    return judge(
        instance,
        signals_of(engine, instance),
        now=now,
        start_timeout_s=policy.start_timeout_s,
        unready_grace_s=policy.unready_grace_s,
        lost_grace_s=policy.lost_grace_s,
    )


def _nothing() -> Look:
    return Look(instances={}, wanted={}, live={}, asked={}, held={}, lacked={}, to_be_had={})
