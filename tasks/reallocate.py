"""The work of a reallocation between its lease and its record: see, plan, say whether an approved plan still holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from artifacts.fleets import Outcome, RunResult, plan_in_force, read_identity, write_result
from artifacts.index import index_plans
from artifacts.library import LibrarySnapshot
from artifacts.plans import StoredPlan, list_plans, read_plan, write_plan
from coral_core.cloud.ports import Preview
from coral_core.cloud.supply import Reading
from coral_core.config.demand import DemandSpec
from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.allocation import AllocationProblem
from coral_core.domain.fleet import Offer
from coral_core.domain.launch import Runtime
from coral_core.errors import InputError
from tasks.apply import Goal, Job, Mode, all_regions, change_lines, check_patience, limits_of, preview, wanted_of_plan
from tasks.demand import planned_demand
from tasks.observe import (
    Observation,
    account_of,
    cost_usd_per_h,
    foreign_lines,
    gap_lines,
    observe,
    observed_problem,
    supply_document,
    with_observed_prices,
    zones_of,
)
from tasks.plan import PlanOutcome, make_plan, running_from_plan

RUNTIMES: Final = (Runtime.VLLM,)
"""What fleets on rented nodes are planned for where the scenario does not say."""
DEARER_FRAC: Final = 0.05
"""An approved plan that now costs more than this beyond what was approved is planned anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to plan: scenario, library snapshot, demand, and the limits that no plan may pass (infinite: none).

    `keep_running` takes the fleet's last recorded plan as what runs, instead of what was seen.
    """

    resolved: ResolvedScenario
    snapshot: LibrarySnapshot
    demand: DemandSpec = field(default_factory=DemandSpec)
    max_nodes: float = math.inf
    max_usd_per_h: float = math.inf
    keep_running: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a run would do now: the plan's documents, the steps, and what the fleet costs now and would cost."""

    outcome: PlanOutcome
    steps: tuple[str, ...]
    cost_now_usd_per_h: float | None
    cost_planned_usd_per_h: float


def check_acting(job: Job, wish: Wish) -> None:
    """Raise unless this run may act: limits are set, the lease is long enough, the fleet is the credentials' account's."""
    for name, value in (("max_nodes", wish.max_nodes), ("max_usd_per_h", wish.max_usd_per_h)):
        if math.isinf(value):
            raise InputError(
                f"{name} is not set, and no run changes a fleet without a limit",
                where=name,
                fix=f"give {name}, or set CORAL_{name.upper()}",
            )
    check_patience(job)
    identity = read_identity(job.store, job.fleet)
    if identity is not None and identity.provider != job.provider.name:
        raise InputError(
            f"the fleet is on {identity.provider}, not on {job.provider.name}",
            where=f"fleet {job.fleet}",
            fix=f"use CORAL_PROVIDER={identity.provider}, or give this fleet another name",
        )
    account_of(job.provider, job.fleet, identity.account if identity else None)


def see(job: Job, wish: Wish) -> Observation:
    """The fleet in every region it has ever been in, and the supply of the scenario's offers."""
    return observe(job.provider, job.store, job.fleet, wish.resolved, wish.snapshot, regions=all_regions(job))


def plan_from(job: Job, wish: Wish, seen: Observation, lowered: Mapping[Offer, int] | None = None) -> PlanOutcome:
    """The cheapest plan for the demand to be planned for, from what was seen; `lowered` is what refusals have shown."""
    measured = wish.demand.method != "scenario"  # else a damaged plan must not stand in the way
    last = plan_in_force(job.store, job.fleet, now=seen.at) if measured else None
    demand = planned_demand(
        with_observed_prices(wish.resolved, seen.supply), job.store, job.fleet, wish.demand, now=seen.at, last=last
    )
    keep = wish.keep_running and list_plans(job.store, job.fleet)
    kept = running_from_plan(read_plan(job.store, job.fleet).plan) if keep else None

    def adjust(problem: AllocationProblem) -> AllocationProblem:
        found = observed_problem(problem, seen, lowered=lowered or {}, max_usd_per_h=wish.max_usd_per_h)
        return found if kept is None else replace(found, running=kept)

    return make_plan(
        demand.resolved,
        wish.snapshot,
        fleet=job.fleet,
        now=job.provider.clock.now(),
        adjust=adjust,
        # A rehearsal serves nobody, so it may plan what nothing can run; the plan says so.
        runtimes=None if job.provider.name == "fake" else wish.resolved.scenario.runtimes or RUNTIMES,
        notes=[*demand.notes, *gap_lines(seen.supply), *foreign_lines(seen.foreign)],
        inputs={
            "demand_sources": demand.rows,
            "supply": supply_document(seen.supply),
            "lowered": [
                {"region": region, "config": config, "market": market.value, "nodes": nodes}
                for (region, config, market), nodes in sorted((lowered or {}).items())
            ],
        },
    )


def record_plan(job: Job, outcome: PlanOutcome) -> StoredPlan:
    """Write the plan, its decision and its report under the present time."""
    now = job.provider.clock.now()
    write_plan(
        job.store,
        job.fleet,
        now,
        plan=outcome.plan,
        decision=outcome.decision,
        report_md=outcome.report_md,
        report_html=outcome.report_html,
    )
    index_plans(job.store, job.fleet)
    return read_plan(job.store, job.fleet, now)


def goal_of(
    job: Job,
    wish: Wish,
    stored: StoredPlan,
    seen: Observation,
    *,
    mode: Mode,
    lowered: Mapping[Offer, int] | None = None,
) -> Goal:
    """A recorded plan as what a run is to reach, within the limits and what there is of each offer now."""
    return Goal(
        time=stored.record.time,
        mode=mode,
        plan=stored.plan,
        **_surroundings(job, wish, seen, lowered or {}),
    )


def dry_run(job: Job, wish: Wish) -> DryRun:
    """Plan from what is seen now, and list the steps to it. Writes and changes nothing."""
    seen = see(job, wish)
    outcome = plan_from(job, wish, seen)
    goal = Goal(time=seen.at, mode="apply", plan=outcome.plan, **_surroundings(job, wish, seen, {}))
    todo: Preview = preview(job, goal)
    return DryRun(
        outcome=outcome,
        steps=change_lines(todo),
        cost_now_usd_per_h=cost_usd_per_h(todo.nodes, seen.prices_usd_per_h),
        cost_planned_usd_per_h=outcome.plan["cost_usd_per_h"],
    )


def why_outdated(wish: Wish, stored: StoredPlan, seen: Observation, *, max_age_s: float) -> str:
    """Why an approved plan must not be carried out any more; empty where it may."""
    age_s = (seen.at - stored.record.time).total_seconds()
    if age_s > max_age_s:
        return f"it is {age_s:.0f} s old, more than {max_age_s:.0f} s"
    nodes = nodes_by_offer(stored.plan)
    prices, available = seen.prices_usd_per_h, _available(seen, {})
    for offer, count in sorted(nodes.items()):
        region, config, market = offer
        if offer not in prices or offer not in available:
            return f"price or availability of {config} ({market}) in {region} is not known any more"
        if available[offer] < count:
            return f"it needs {count} {config} ({market}) in {region}, and {available[offer]} can be had now"
    cost = math.fsum(prices[offer] * count for offer, count in nodes.items())
    if cost > wish.max_usd_per_h:
        return f"it costs {cost:.2f} USD/h now, more than the limit of {wish.max_usd_per_h:g}"
    approved = float(stored.plan["cost_usd_per_h"])
    if cost > approved * (1 + DEARER_FRAC):
        return f"it costs {cost:.2f} USD/h now, {approved:.2f} when it was made"
    return ""


def record_unacted(job: Job, stored: StoredPlan, outcome: Outcome, reason: str) -> str:
    """Say of a plan why it was not carried out; the URL of the result."""
    result = RunResult(outcome=outcome, reason=reason, ended_at=job.provider.clock.now())
    return write_result(job.store, job.fleet, stored.record.time, result)


def nodes_by_offer(plan: Mapping[str, Any]) -> dict[Offer, int]:
    """Nodes that a recorded plan uses of each offer."""
    total: Counter[Offer] = Counter()
    for wanted in wanted_of_plan(plan):
        for config, nodes in wanted.spec.combination.items():
            total[wanted.region, config, wanted.market] += nodes * wanted.count
    return dict(total)


def _surroundings(job: Job, wish: Wish, seen: Observation, lowered: Mapping[Offer, int]) -> dict[str, Any]:
    available = _available(seen, lowered)
    nodes = sum(available.values()) if math.isinf(wish.max_nodes) else int(wish.max_nodes)
    return {
        "fleet": seen.fleet,
        "limits": limits_of(seen.prices_usd_per_h, available, max_nodes=nodes, max_usd_per_h=wish.max_usd_per_h),
        "zones": zones_of(seen.supply),
        "regions": all_regions(job, seen.regions),
    }


def _available(seen: Observation, lowered: Mapping[Offer, int]) -> dict[Offer, int]:
    """A_r(c) of every offer of which it is known."""
    return {
        offer: min(state.available.value, lowered.get(offer, state.available.value))
        for offer, state in seen.supply.offers.items()
        if isinstance(state.available, Reading)
    }
