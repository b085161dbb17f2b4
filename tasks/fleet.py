"""What people ask of a fleet: what runs against what is wanted, what a run would change, what earlier runs did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from artifacts.canonical import plain_value
from artifacts.fleets import FleetRun, list_runs, read_identity
from artifacts.keys import time_text
from artifacts.leases import read_lease
from artifacts.plans import StoredPlan, list_plans, read_plan
from coral_core.cloud.engine_port import signals_of
from coral_core.cloud.fleet_view import Condition, Instance, gather, judge
from coral_core.cloud.steps import ReconcilePolicy
from coral_core.domain.fleet import Node, Offer
from coral_core.domain.hardware import Market
from coral_core.errors import InputError
from tasks.apply import (
    Goal,
    Job,
    all_regions,
    change_lines,
    limits_of,
    plan_or_damage,
    preview,
    wanted_of_plan,
    whole_instances,
)
from tasks.observe import account_of, cost_usd_per_h, foreign_lines, list_fleet

_HISTORY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the fleet is meant to be: the record it comes from, and its plan (None: nothing at all, or no record).

    `damaged` says what is wrong with a plan that cannot be read: what is wanted is not known then.
    """

    time: datetime | None
    mode: str
    stored: StoredPlan | None
    damaged: str = ""


def intent_of(job: Job) -> Intent:
    """The newest run that acted; where none has, the newest plan."""
    runs = list_runs(job.store, job.fleet, newest=_HISTORY, acted=True)
    acted = [run for run in runs if run.steps is not None]  # a damaged one says nothing
    if acted:
        return _intent(job, acted[-1].time, acted[-1].mode, planned=acted[-1].planned)
    times = list_plans(job.store, job.fleet)
    return _intent(job, times[-1], "plan", planned=True) if times else Intent(time=None, mode="none", stored=None)


def status_document(job: Job) -> dict[str, Any]:
    """What runs (measured), against what is wanted, what it costs, and who is changing it. Reads only."""
    identity = read_identity(job.store, job.fleet)
    fleet = account_of(job.provider, job.fleet, identity.account if identity else None)
    intent = intent_of(job)
    planned = {w.region for w in wanted_of_plan(intent.stored.plan)} if intent.stored else set()
    regions = all_regions(job, planned)
    nodes, foreign = list_fleet(job.provider, fleet, regions)
    prices = prices_of(intent.stored) if intent.stored else last_prices(job)
    instances = [_instance(job, instance, prices) for instance in gather(nodes) if instance.standing]
    lease, now = read_lease(job.store, job.fleet), job.provider.clock.now()
    return _plain(
        {
            "fleet": job.fleet,
            "provider": job.provider.name,
            "account": fleet.account,
            "at": now,
            "kind": "measured",
            "regions": regions,
            "lease": {**asdict(lease), "over": lease.until < now} if lease else None,
            "plan": {"time": time_text(intent.time) if intent.time else None, "mode": intent.mode},
            "cost_usd_per_h": cost_usd_per_h(nodes, prices),
            "planned_usd_per_h": _planned_usd_per_h(intent),
            "counts": count_rows(nodes, intent),
            "instances": instances,
            "unhealthy": sum(row["condition"] != Condition.UP for row in instances),
            "foreign": [asdict(node) for node in foreign],
            "notes": [*job.provider.notes, *([intent.damaged] if intent.damaged else ()), *foreign_lines(foreign)],
        }
    )


def count_rows(nodes: Sequence[Node], intent: Intent) -> list[dict[str, Any]]:
    """Whole instances that stand, and those wanted (None: not known), of all that there is of either."""
    found = whole_instances(nodes)
    wanted = wanted_of_plan(intent.stored.plan) if intent.stored else ()
    wish = {(w.spec.template_id, w.region, w.market): w.count for w in wanted}
    return [
        {
            "template": template,
            "region": region,
            "market": market,
            "running": found.get((template, region, market), 0),
            "wanted": None if intent.damaged else wish.get((template, region, market), 0),
        }
        for template, region, market in sorted({*found, *wish})
    ]


def diff_document(job: Job, at: datetime | None = None) -> dict[str, Any]:
    """The steps from the fleet as it is now to a recorded plan (the newest), and both costs. Reads only."""
    stored = read_plan(job.store, job.fleet, at)
    supply = stored.decision.get("supply")
    if supply is None:
        raise InputError(
            "the plan was made without looking at the cloud, so prices and zones are not known",
            where=stored.record.urls["plan.json"],
            fix="make one with `coral reallocate`",
        )
    identity = read_identity(job.store, job.fleet)
    prices = prices_of(stored)
    available = {_offer(item): item["available"] for item in supply["offers"] if item["available"] is not None}
    found = preview(
        job,
        Goal(
            time=stored.record.time,
            fleet=account_of(job.provider, job.fleet, identity.account if identity else None),
            mode="apply",
            plan=stored.plan,
            limits=limits_of(prices, available, max_nodes=sum(available.values()), max_usd_per_h=math.inf),
            zones={_offer(item): item["zones"] for item in supply["offers"]},
            regions=all_regions(job),
        ),
    )
    return _plain(
        {
            "fleet": job.fleet,
            "plan": time_text(stored.record.time),
            "at": job.provider.clock.now(),
            "steps": [*change_lines(found), *foreign_lines(found.foreign)],
            "in_order": found.todo.converged,
            "cost_now_usd_per_h": cost_usd_per_h(found.nodes, prices),
            "cost_planned_usd_per_h": stored.plan["cost_usd_per_h"],
        }
    )


def history_rows(job: Job, *, newest: int) -> list[dict[str, Any]]:
    """The newest runs, oldest first: when, in which mode, how each ended, what the fleet cost then, what was refused."""
    rows = [_run(run) for run in list_runs(job.store, job.fleet, newest=newest)]
    return [_plain(row) for row in rows]


def prices_of(stored: StoredPlan) -> dict[Offer, float]:
    """Prices as they were observed for a plan; none for a plan that was made without looking."""
    offers = stored.decision.get("supply", {"offers": []})["offers"]
    return {_offer(item): item["price_usd_per_h"] for item in offers if item["price_usd_per_h"] is not None}


def _intent(job: Job, time: datetime, mode: str, *, planned: bool) -> Intent:
    stored = plan_or_damage(job, time) if planned else None
    if isinstance(stored, str):
        return Intent(time=time, mode=mode, stored=None, damaged=stored)
    return Intent(time=time, mode=mode, stored=stored)


def _planned_usd_per_h(intent: Intent) -> float | None:
    if intent.stored is not None:
        return float(intent.stored.plan["cost_usd_per_h"])
    return 0.0 if intent.mode == "teardown" else None


def last_prices(job: Job) -> dict[Offer, float]:
    """Prices as they were observed for the newest plan; none where there is no plan, or none that can be read.

    Whoever releases a fleet asks them for its cost only, so that a damaged plan must not keep its nodes.
    """
    stored = plan_or_damage(job) if list_plans(job.store, job.fleet) else ""
    return {} if isinstance(stored, str) else prices_of(stored)


def _offer(item: Mapping[str, Any]) -> Offer:
    return (item["region"], item["config"], Market(item["market"]))


def _instance(job: Job, instance: Instance, prices: Mapping[Offer, float]) -> dict[str, Any]:
    now, patience = job.provider.clock.now(), ReconcilePolicy(zones={})
    condition, reason = judge(
        instance,
        signals_of(job.provider.engine, instance),
        now=now,
        start_timeout_s=patience.start_timeout_s,
        unready_grace_s=patience.unready_grace_s,
        lost_grace_s=patience.lost_grace_s,
    )
    return {
        "instance": instance.instance_id,
        "template": instance.template_id,
        "model": instance.model,
        "phase": instance.phase,
        "region": instance.region,
        "zone": instance.zone,
        "market": instance.market,
        "nodes": [node.node_id for node in instance.standing],
        "condition": condition,
        "reason": reason,
        "age_s": round((now - instance.launched_at).total_seconds()),
        "cost_usd_per_h": cost_usd_per_h(instance.nodes, prices),
    }


def _run(run: FleetRun) -> dict[str, Any]:
    result, steps = run.result, run.steps
    return {
        "time": time_text(run.time),
        "mode": run.mode,
        "outcome": "damaged" if run.damaged else run.outcome,
        "reason": run.damaged or (result.reason if result else ""),
        "holder": steps.holder if steps else None,
        "epoch": steps.epoch if steps else None,
        "cost_before_usd_per_h": steps.cost_before_usd_per_h if steps else None,
        "cost_usd_per_h": result.cost_usd_per_h if result else None,
        "steps": len(steps.steps) if steps else 0,
        "duration_s": round((result.ended_at - steps.begun_at).total_seconds(), 1) if result and steps else None,
        "failures": [f"{f['code']} {f['config']} in {f['zone']}" for f in result.failures] if result else [],
    }


def _plain(document: Mapping[str, Any]) -> dict[str, Any]:
    found = plain_value(document)
    assert isinstance(found, dict)
    return found
