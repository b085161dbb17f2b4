"""Runs that act, without a flow: a job on a fake cloud or a rehearsal, and recorded plans made by hand."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from artifacts.leases import Lease, LeaseTerms
from artifacts.plans import StoredPlan, read_plan, write_plan
from artifacts.store import Store, open_store
from coral_core.domain.fleet import FleetLimits, Wanted
from coral_core.domain.hardware import market_name
from coral_core.domain.workload import Phase
from tasks.apply import Done, Goal, Job, Patience, carry_out, take
from tasks.providers import Provider
from tests.fakes.fleet_cases import FLEET, POLICY, ZONES, World, limits

PATIENCE = Patience(lease=LeaseTerms(duration_s=300.0, skew_s=10.0), poll_s=5.0, deadline_s=1800.0)


def plan_document(*parts: Wanted, cost_usd_per_h: float = 1.0) -> dict[str, Any]:
    """A plan as it is recorded, as far as acting on it needs."""
    return {
        "scenario": "by hand",
        "status": "optimal",
        "cost_usd_per_h": cost_usd_per_h,
        "churn_usd_per_h": 0.0,
        "objective_usd_per_h": cost_usd_per_h,
        "shortfall": [],
        "instances": [_instance(part) for part in parts],
    }


def _instance(part: Wanted) -> dict[str, Any]:
    stages: dict[int, list[str]] = {}
    for slot in part.spec.slots:
        stages.setdefault(slot.stage, []).append(slot.config)
    aggregated = part.spec.phase is Phase.AGGREGATED
    return {
        "template": market_name(part.spec.template_id, part.market),
        "model": part.spec.model,
        "phase": part.spec.phase.value,
        "region": part.region,
        "count": part.count,
        "stages": [{"layers": 1, "nodes": nodes} for nodes in stages.values()],
        "throughput_requests_per_s": part.spec.throughput if aggregated else None,
        "throughput_tokens_per_s": None if aggregated else part.spec.throughput,
    }


def supply_record(zones: Mapping[str, tuple[str, ...]] = ZONES, *, available: int = 50) -> dict[str, Any]:
    """The supply of a decision, as prices of `fleet_cases` have it."""
    offers = [
        {
            "region": region,
            "config": config,
            "market": market.value,
            "price_usd_per_h": usd,
            "available": available,
            "zones": list(zones[region]),
        }
        for (region, config, market), usd in limits().price_usd_per_h.items()
    ]
    return {"as_of": "2026-11-29T12:00:00+00:00", "offers": offers, "pools": []}


@dataclass
class Acting:
    """A world whose runs keep their records in a store."""

    world: World = field(default_factory=World)
    store: Store = field(default_factory=lambda: open_store(f"memory://{uuid.uuid4().hex}"))
    settle_s: float = 60.0
    limits: FleetLimits = field(default_factory=limits)

    def job(self, holder: str = "run", **changes) -> Job:
        provider = Provider(
            name="fake",
            provisioner=self.world.cloud,
            engine=self.world.engine,
            clock=self.world.clock,
            sleep=self.world.clock.advance,
            settle_s=self.settle_s,
            supply=lambda *_: None,
            notes=("a test",),
        )
        given = {"store": self.store, "fleet": FLEET.name, "provider": provider, "patience": PATIENCE, "holder": holder}
        return Job(**{**given, **changes})

    def record(self, *parts: Wanted, cost_usd_per_h: float = 1.0, supply: bool = True) -> StoredPlan:
        """A recorded plan."""
        self.world.clock.advance(1)
        now = self.world.clock.now()
        decision = {"library": {"name": "l", "version": 1}, "explanation": {}, "demand": []}
        write_plan(
            self.store,
            FLEET.name,
            now,
            plan=plan_document(*parts, cost_usd_per_h=cost_usd_per_h),
            decision={**decision, "supply": supply_record()} if supply else decision,
            report_md="",
        )
        return read_plan(self.store, FLEET.name, now)

    def goal(self, stored: StoredPlan, **changes) -> Goal:
        given = Goal(
            time=stored.record.time,
            fleet=FLEET,
            mode="apply",
            plan=stored.plan,
            limits=self.limits,
            zones=POLICY.zones,
            regions=tuple(ZONES),
        )
        return replace(given, **changes)

    def lease(self, job: Job) -> Lease:
        lease = take(job)
        assert isinstance(lease, Lease), lease
        return lease

    def run(self, *parts: Wanted, job: Job | None = None, **changes) -> Done:
        """Record a plan and carry it out under a lease of its own."""
        job = job or self.job()
        stored = self.record(*parts)
        lease = self.lease(job)
        return carry_out(job, lease, self.goal(stored, **changes))
