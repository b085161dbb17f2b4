"""Small fleets for the tests of `coral_core.cloud`: templates, plans, limits and a world that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from coral_core.clock import ManualClock
from coral_core.cloud.apply import apply_plan
from coral_core.cloud.fake import FakeCloud, FakeEngine
from coral_core.cloud.ports import ApplyPolicy, ApplyReport, FleetEvent, Ports
from coral_core.cloud.steps import ReconcilePolicy
from coral_core.domain.fleet import FleetId, FleetLimits, FleetPlan, InstanceSpec, NodeSlot, Wanted
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase

START = datetime(2026, 11, 29, 12, tzinfo=UTC)
ACCOUNT = "111111111111"
FLEET = FleetId(name="demo", account=ACCOUNT)
ZONES = {"east": ("east-a", "east-b"), "west": ("west-a", "west-b")}
USD_PER_H = {"a": 1.0, "b": 2.5, "c": 7.0}

ONE = InstanceSpec(
    template_id="d-one", model="m1", phase=Phase.DECODE, slots=(NodeSlot(stage=0, config="a"),), throughput=100.0
)
TWO = InstanceSpec(
    template_id="d-two",
    model="m1",
    phase=Phase.DECODE,
    slots=(NodeSlot(stage=0, config="a"), NodeSlot(stage=1, config="b")),
    throughput=350.0,
)
THREE = InstanceSpec(
    template_id="p-three",
    model="m2",
    phase=Phase.PREFILL,
    slots=(NodeSlot(stage=0, config="b"), NodeSlot(stage=0, config="b"), NodeSlot(stage=1, config="c")),
    throughput=900.0,
)


def wanted(spec: InstanceSpec, count: int, *, region: str = "east", market: Market = Market.ON_DEMAND) -> Wanted:
    return Wanted(spec=spec, region=region, market=market, count=count)


def plan(*parts: Wanted, plan_id: str = "plan-1", epoch: int = 1, fleet: FleetId = FLEET) -> FleetPlan:
    return FleetPlan(fleet=fleet, plan_id=plan_id, epoch=epoch, wanted=parts)


def limits(*, max_nodes: int = 20, max_usd_per_h: float = 60.0, **changes) -> FleetLimits:
    prices = {
        (region, config, market): usd * (0.4 if market is Market.SPOT else 1.0)
        for region in ZONES
        for config, usd in USD_PER_H.items()
        for market in Market
    }
    values = {"price_usd_per_h": prices, **changes}
    return FleetLimits(max_nodes=max_nodes, max_usd_per_h=max_usd_per_h, **values)


POLICY = ReconcilePolicy(
    zones={(region, config, m): zones for region, zones in ZONES.items() for config in USD_PER_H for m in Market}
)


def apply_policy(**changes) -> ApplyPolicy:
    return ApplyPolicy(**{"reconcile": POLICY, **changes})


@dataclass
class World:
    """A fake cloud, its engines, and a clock that sleeping moves."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(start=START))
    events: list[FleetEvent] = field(default_factory=list)
    guard: object = lambda: 1e9
    zones: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ZONES)

    def __post_init__(self) -> None:
        self.cloud = FakeCloud(clock=self.clock, zones=self.zones, owner=ACCOUNT)
        self.engine = FakeEngine(cloud=self.cloud)

    def apply(self, plan: FleetPlan, limits: FleetLimits, policy: ApplyPolicy | None = None, **changes) -> ApplyReport:
        ports = self.ports(**changes)
        return apply_plan(plan, regions=tuple(self.zones), limits=limits, policy=policy or apply_policy(), ports=ports)

    def ports(self, **changes) -> Ports:
        return Ports(
            **{
                "provisioner": self.cloud,
                "engine": self.engine,
                "clock": self.clock,
                "sleep": self.clock.advance,
                "guard": self.guard,
                "record": self.events.append,
                **changes,
            }
        )

    def fleet(self) -> dict[tuple[str, str, str], int]:
        """(template, region, market) -> serving instances whose nodes truly all stand, orphans under their own key."""
        by_id: dict[str, list] = {}
        for machine in self.cloud.held(also_ending=False):
            if machine.order is not None:
                by_id.setdefault(machine.order.tags.instance_id, []).append(machine)
        counts: dict[tuple[str, str, str], int] = {}
        for name, members in by_id.items():
            first = members[0].order
            whole = sorted(m.order.tags.node for m in members) == list(range(first.tags.nodes))
            key = (first.tags.template_id, first.region, first.market.value) if whole else ("part", name, "")
            counts[key] = counts.get(key, 0) + 1
        return counts


def counts(plan: FleetPlan) -> dict[tuple[str, str, str], int]:
    return {(w.spec.template_id, w.region, w.market.value): w.count for w in plan.wanted if w.count}
