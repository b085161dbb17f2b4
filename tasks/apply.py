"""Apply: a recorded plan -> the fleet, under a lease; and what a run records before and after."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal, cast

from artifacts.fleets import (
    RESULT,
    FleetIdentity,
    FleetRun,
    Outcome,
    RunResult,
    RunSteps,
    claim_fleet,
    list_runs,
    mark_regions,
    read_identity,
    used_regions,
    write_result,
    write_steps,
)
from artifacts.keys import plan_group, time_text
from artifacts.leases import Lease, LeaseTaken, LeaseTerms, take_lease
from artifacts.plans import PLAN, StoredPlan, read_plan
from artifacts.store import Store, open_store
from coral_core.cloud.apply import apply_plan, preview_plan
from coral_core.cloud.budget import check_plan
from coral_core.cloud.fleet_view import gather
from coral_core.cloud.ports import ApplyPolicy, ApplyReport, ApplyStatus, FleetEvent, Ports, Preview
from coral_core.cloud.steps import Action, ReconcilePolicy, step_lines
from coral_core.cloud.tags import check_fleet_name
from coral_core.config.settings import ProviderName, Settings
from coral_core.domain.fleet import (
    FleetId,
    FleetLimits,
    FleetPlan,
    InstanceSpec,
    Node,
    NodeSlot,
    NodeState,
    Offer,
    Wanted,
)
from coral_core.domain.hardware import Market, split_market
from coral_core.domain.workload import Phase
from coral_core.errors import CoralError, InputError, StoreConflictError, StoreError, StoreUnreachableError
from tasks.observe import cost_usd_per_h, foreign_lines, list_fleet
from tasks.providers import Provider, open_provider

Zones = Mapping[Offer, Sequence[str]]
Mode = Literal["apply", "approve", "teardown"]

_HISTORY: Final = 20
"""Runs that acted among which one looks for those that did not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an acting run holds its lease, waits between looks, and goes on in all."""

    lease: LeaseTerms = field(default_factory=LeaseTerms)
    poll_s: float = 5.0
    deadline_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run's surroundings: whose fleet, in which store and cloud, how patient, and who it is."""

    store: Store
    fleet: str
    provider: Provider
    patience: Patience
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The fleet that a run is to reach: `time` is where it is recorded, `plan` the recorded plan (None: no node at all)."""

    time: datetime
    fleet: FleetId
    mode: Mode
    plan: Mapping[str, Any] | None
    limits: FleetLimits
    zones: Zones
    regions: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of a run, and where it is recorded. `lowered` is what could be had where the cloud refused."""

    outcome: Outcome
    reason: str
    cost_usd_per_h: float | None
    lowered: Mapping[Offer, int]
    plan_url: str
    result_url: str

    @property
    def again(self) -> bool:
        """Whether another plan may do better at once."""
        return self.outcome is Outcome.OUTDATED or (self.outcome is Outcome.UNMET and bool(self.lowered))


def open_job(
    settings: Settings,
    *,
    store: str = "",
    fleet: str = "",
    provider: ProviderName | None = None,
    patience: Patience | None = None,
    holder: str,
) -> Job:
    """What is named, with the settings where it is empty; the provider is the fleet's own where a run has acted already."""
    opened, name = open_store(store or settings.store_url), fleet or settings.fleet
    identity = read_identity(opened, name)
    known = cast("ProviderName", identity.provider) if identity else None
    return Job(
        store=opened,
        fleet=name,
        provider=open_provider(settings, provider or known),
        patience=patience or Patience(),
        holder=holder,
    )


def holder_text(what: str) -> str:
    """Who holds a lease, for people: the run, and the process it is in."""
    return f"{what} at {platform.node()} (process {os.getpid()})"


def take(job: Job) -> Lease | LeaseTaken:
    """The lease on the fleet, or who holds it."""
    return take_lease(job.store, job.fleet, holder=job.holder, terms=job.patience.lease, clock=job.provider.clock)


def check_patience(job: Job) -> None:
    """Raise InputError unless half a lease is enough for a cloud call and for the cloud to list what it has started."""
    check_fleet_name(job.fleet)
    least_s = 2 * (job.provider.settle_s + job.provider.provisioner.call_timeout_s)
    if job.patience.lease.duration_s < least_s:
        raise InputError(
            f"a lease of {job.patience.lease.duration_s:g} s is too short for the provider {job.provider.name}",
            where="lease_s",
            fix=f"give at least {least_s:g} s",
        )


def check_limits(goal: Goal) -> None:
    """Raise ProvisionError for a goal that passes its own limits; see `budget.check_plan`."""
    check_plan(_fleet_plan(goal, None, None), goal.limits)


def carry_out(job: Job, lease: Lease, goal: Goal) -> Done:
    """Bring the fleet to the goal, record it and give the lease back.

    Raises LeaseLostError where planning took so long that another run has the lease by now, and what `apply_plan` raises.
    Before the first change that gives the lease back; after it the run is recorded as failed, and the lease is left to
    run out, as it is where it became too short for a call: what was started last may not be listed yet.
    """
    with given_back_on_error(lease):
        lease.guard()  # only its holder may say of other runs that they are dead
        plan, policy = _begun(job, lease, goal)
    events: list[FleetEvent] = []
    ports = _ports(job, events.append, guard=lambda: _guarded(lease, job.provider.settle_s))
    try:
        report = apply_plan(plan, regions=goal.regions, limits=goal.limits, policy=policy, ports=ports)
        outcome, reason = verified(job, plan, report, goal.regions)
    except CoralError as error:
        _recorded(job, goal.time, _result(job, Outcome.FAILED, str(error), events=events, notes=goal.notes))
        raise
    cost = cost_usd_per_h(report.nodes, goal.limits.price_usd_per_h)
    result = _result(job, outcome, reason, report=report, cost=cost, events=events, notes=goal.notes)
    done = Done(
        outcome=outcome,
        reason=reason,
        cost_usd_per_h=cost,
        lowered=report.lowered,
        plan_url="" if goal.plan is None else job.store.url_of(f"{plan_group(job.fleet, goal.time)}/{PLAN}"),
        result_url=_recorded(job, goal.time, result),
    )
    if outcome is not Outcome.LEASE_LOST:
        lease.give_back()
    return done


@contextmanager
def given_back_on_error(lease: Lease) -> Iterator[None]:
    """A failure before the first change keeps nobody else waiting."""
    try:
        yield
    except CoralError:
        lease.give_back()
        raise


def _begun(job: Job, lease: Lease, goal: Goal) -> tuple[FleetPlan, ApplyPolicy]:
    """All that must be on record before the first change: whose fleet, where it may be, what is about to be done."""
    provider = job.provider
    claim_fleet(job.store, FleetIdentity(fleet=job.fleet, provider=provider.name, account=goal.fleet.account))
    mark_regions(job.store, job.fleet, goal.regions)
    dead = _unfinished(job)
    plan = _fleet_plan(goal, lease, _same(dead[-1], goal, job) if dead else None)
    policy = apply_policy(job, goal.zones)
    ports = _ports(job, lambda _: None, guard=lambda: math.inf)
    before = preview_plan(plan, regions=goal.regions, limits=goal.limits, policy=policy, ports=ports)
    write_steps(
        job.store,
        job.fleet,
        goal.time,
        RunSteps(
            mode=goal.mode,
            holder=job.holder,
            provider=provider.name,
            account=goal.fleet.account,
            plan_id=plan.plan_id,
            epoch=plan.epoch,
            begun_at=provider.clock.now(),
            cost_before_usd_per_h=cost_usd_per_h(before.nodes, goal.limits.price_usd_per_h),
            steps=change_lines(before),
        ),
    )
    for run in dead:
        _close(job, run)
    return plan, policy


def preview(job: Job, goal: Goal) -> Preview:
    """What `carry_out` would do now; reads only."""
    plan = _fleet_plan(goal, None, None)
    ports = _ports(job, lambda _: None, guard=lambda: math.inf)
    return preview_plan(
        plan, regions=goal.regions, limits=goal.limits, policy=apply_policy(job, goal.zones), ports=ports
    )


def change_lines(found: Preview) -> tuple[str, ...]:
    """The steps that change something, one line each: weights of what is up are only said again."""
    steps = tuple(s for s in found.todo.steps if not (s.action is Action.WEIGHT and s.weight > 0))
    return step_lines(replace(found.todo, steps=steps))


def verified(job: Job, plan: FleetPlan, report: ApplyReport, regions: Sequence[str]) -> tuple[Outcome, str]:
    """The outcome of a run; one that says it has converged is believed after another look at the cloud."""
    if report.status is not ApplyStatus.CONVERGED:
        return Outcome(report.status.value), report.reason
    nodes, _ = list_fleet(job.provider, plan.fleet, regions)
    found = whole_instances(nodes)
    wish = {(w.spec.template_id, w.region, w.market): w.count for w in plan.wanted if w.count}
    stray = sum(node.state not in {NodeState.ENDING, NodeState.GONE} for node in nodes) - sum(
        len(w.spec.slots) * w.count for w in plan.wanted
    )
    if found == wish and stray == 0:
        return Outcome.CONVERGED, report.reason if wish else f"nothing is left in {', '.join(sorted(regions))}"
    return Outcome.FAILED, f"looked at again, the fleet is not the plan: it has {_counts(found)}, not {_counts(wish)}"


def whole_instances(nodes: Iterable[Node]) -> dict[tuple[str, str, Market], int]:
    """Serving instances of which every node stands, by (template, region, market)."""
    counts: dict[tuple[str, str, Market], int] = {}
    for instance in gather(n for n in nodes if n.state not in {NodeState.ENDING, NodeState.GONE}):
        if instance.consistent and not instance.missing and all(node.live for node in instance.nodes):
            counts[instance.key] = counts.get(instance.key, 0) + 1
    return counts


def plan_or_damage(job: Job, time: datetime | None = None) -> StoredPlan | str:
    """A recorded plan (the newest), or what is wrong with its files. Raises StoreUnreachableError, and InputError for none."""
    try:
        return read_plan(job.store, job.fleet, time)
    except StoreUnreachableError:
        raise
    except StoreError as error:
        return str(error)


def wanted_of_plan(plan: Mapping[str, Any] | None) -> tuple[Wanted, ...]:
    """What a recorded plan wants of the fleet; nothing where there is none."""
    return () if plan is None else tuple(_wanted(item) for item in plan["instances"] if item["count"])


def limits_of(
    prices: Mapping[Offer, float], available: Mapping[Offer, int], *, max_nodes: int, max_usd_per_h: float
) -> FleetLimits:
    """The limits of a run: its own, and what there is of each offer."""
    return FleetLimits(max_nodes=max_nodes, max_usd_per_h=max_usd_per_h, price_usd_per_h=prices, max_by_offer=available)


def apply_policy(job: Job, zones: Zones) -> ApplyPolicy:
    """The executor's patience: within the lease, and as long as the provider needs."""
    poll_s = job.patience.poll_s
    return ApplyPolicy(
        reconcile=ReconcilePolicy(zones=zones),
        settle_s=job.provider.settle_s,
        poll_s=poll_s,
        max_backoff_s=max(poll_s, min(60.0, job.patience.lease.duration_s / 8)),
        deadline_s=job.patience.deadline_s,
    )


def all_regions(job: Job, more: Iterable[str] = ()) -> tuple[str, ...]:
    """Every region in which the fleet may have nodes, and `more`."""
    return tuple(sorted({*used_regions(job.store, job.fleet), *more}))


def _guarded(lease: Lease, settle_s: float) -> float:
    """Seconds of the lease that calls may use: after an exception it must outlive what the cloud takes to list a start."""
    return lease.guard() - settle_s


def _ports(job: Job, record: Callable[[FleetEvent], None], *, guard: Callable[[], float]) -> Ports:
    provider = job.provider
    return Ports(
        provisioner=provider.provisioner,
        engine=provider.engine,
        clock=provider.clock,
        sleep=provider.sleep,
        guard=guard,
        record=record,
    )


def _fleet_plan(goal: Goal, lease: Lease | None, same: RunSteps | None) -> FleetPlan:
    """The plan under its own id and the lease's epoch; those of an unfinished run where it wanted the same.

    Client tokens and tags follow from both, so what that run has started and no listing shows yet is found again.
    """
    return FleetPlan(
        fleet=goal.fleet,
        plan_id=same.plan_id if same else time_text(goal.time),
        epoch=same.epoch if same else lease.epoch if lease else 1,
        wanted=wanted_of_plan(goal.plan),
    )


def _unfinished(job: Job) -> list[FleetRun]:
    """Runs that acted and have not ended, oldest first. They are dead: whoever calls this holds the lease."""
    runs = list_runs(job.store, job.fleet, newest=_HISTORY, acted=True)
    return [run for run in runs if run.steps is not None and run.result is None]


def _same(run: FleetRun, goal: Goal, job: Job) -> RunSteps | None:
    """The record of a dead run if it was after the same fleet."""
    if run.steps is None or not run.planned or run.steps.account != goal.fleet.account:
        return None
    earlier = plan_or_damage(job, run.time)
    if isinstance(earlier, str):
        return None  # its lease has outlived what a cloud takes to list a start, so nothing of it is hidden by now
    return run.steps if wanted_of_plan(earlier.plan) == wanted_of_plan(goal.plan) else None


def _close(job: Job, run: FleetRun) -> None:
    """Say of a dead run that it has not ended by itself."""
    reason = f"it died or was stopped; {job.holder} went on from there"
    _recorded(job, run.time, _result(job, Outcome.INTERRUPTED, reason))


def _recorded(job: Job, time: datetime, result: RunResult) -> str:
    """The URL of the run's result: this one, or what was there first (a run that lost its lease was taken for dead)."""
    try:
        return write_result(job.store, job.fleet, time, result)
    except StoreConflictError:
        return job.store.url_of(f"{plan_group(job.fleet, time)}/{RESULT}")


def _result(
    job: Job,
    outcome: Outcome,
    reason: str,
    *,
    report: ApplyReport | None = None,
    cost: float | None = None,
    events: Sequence[FleetEvent] = (),
    notes: Sequence[str] = (),
) -> RunResult:
    return RunResult(
        outcome=outcome,
        reason=reason,
        ended_at=job.provider.clock.now(),
        cost_usd_per_h=cost,
        nodes=tuple(asdict(node) for node in report.nodes) if report else (),
        foreign=tuple(asdict(node) for node in report.foreign) if report else (),
        failures=tuple(asdict(failure) for failure in report.failures) if report else (),
        events=tuple(asdict(event) for event in events),
        notes=(*job.provider.notes, *notes, *(foreign_lines(report.foreign) if report else ())),
    )


def _wanted(item: Mapping[str, Any]) -> Wanted:
    template, market = split_market(item["template"])
    throughput = item["throughput_requests_per_s"] or item["throughput_tokens_per_s"]
    slots = tuple(
        NodeSlot(stage=stage, config=config)
        for stage, of in enumerate(item["stages"])
        for config in sorted(of["nodes"])
    )
    spec = InstanceSpec(
        template_id=template,
        model=item["model"],
        phase=Phase(item["phase"]),
        slots=slots,
        throughput=throughput,
    )
    return Wanted(spec=spec, region=item["region"], market=market, count=item["count"])


def _counts(counts: Mapping[tuple[str, str, Market], int]) -> str:
    parts = [
        f"{count} x {template} in {region} ({market})" for (template, region, market), count in sorted(counts.items())
    ]
    return ", ".join(parts) or "nothing"
