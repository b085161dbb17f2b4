"""Plans made real on an EC2 API server on loopback: observe, solve, apply, look again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from coral_core.allocation.ilp import solve_allocation
from coral_core.clock import SystemClock
from coral_core.cloud.apply import apply_plan
from coral_core.cloud.as_allocation import lower, market_name, running_of, wanted_of
from coral_core.cloud.aws import Boto3Api
from coral_core.cloud.aws_provisioner import AwsLaunch, AwsProvisioner
from coral_core.cloud.aws_sources import aws_sources
from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.fleet_view import gather, holdings
from coral_core.cloud.observe import observe_supply
from coral_core.cloud.ports import ApplyPolicy, ApplyReport, ApplyStatus, FleetEvent, Ports, StartFailure
from coral_core.cloud.provisioner import CloudBusyError, Refusal
from coral_core.cloud.steps import ReconcilePolicy
from coral_core.cloud.supply import planning_arrays
from coral_core.cloud.tags import write_tags
from coral_core.domain.allocation import AllocationProblem, DemandRow, TemplateColumns
from coral_core.domain.fleet import FleetId, FleetLimits, FleetPlan, InstanceSpec, NodeSlot, Wanted
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import CoralError, ProvisionError
from tests.fakes.ec2_server import ACCOUNT, TEMPLATE, Ec2Server, Rule, ec2_server

pytestmark = pytest.mark.servers

REGIONS = ("us-east-1", "us-west-2")
CONFIGS = ("g5.xlarge", "g6.xlarge", "g6e.xlarge")
FLEET = FleetId(name="demo", account=ACCOUNT)


def spec(name: str, *configs: str, throughput: float) -> InstanceSpec:
    slots = tuple(NodeSlot(stage=stage, config=config) for stage, config in enumerate(configs))
    return InstanceSpec(template_id=name, model="m", phase=Phase.DECODE, slots=slots, throughput=throughput)


SPECS = {
    s.template_id: s
    for s in (
        spec("d-one-g5", "g5.xlarge", throughput=100.0),
        spec("d-two-g6", "g6.xlarge", "g6.xlarge", throughput=190.0),
        spec("d-one-g6e", "g6e.xlarge", throughput=160.0),
    )
}
COLUMNS = tuple((config, market) for config in CONFIGS for market in Market)


class RunningIsReady:
    """The engine's side: whatever runs answers and has nothing in flight."""

    def __init__(self) -> None:
        self.weight: dict[str, float] = {}

    def ready(self, instance) -> Readiness:
        return Readiness.READY

    def set_weight(self, instance, weight) -> None:
        self.weight[instance.instance_id] = weight

    def drain(self, instance) -> bool:
        return True


@dataclass
class Operator:
    """What the reallocation flow does, without the flow."""

    server: Ec2Server
    api: Boto3Api = field(default_factory=lambda: Boto3Api(read_timeout_s=60.0))
    engine: RunningIsReady = field(default_factory=RunningIsReady)
    clock: SystemClock = field(default_factory=SystemClock)
    failures: list[StartFailure] = field(default_factory=list)
    events: list[FleetEvent] = field(default_factory=list)
    solves: int = 0

    def __post_init__(self) -> None:
        self.provisioner = AwsProvisioner(self.api, AwsLaunch(launch_template=TEMPLATE))

    def nodes(self):
        return [n for region in REGIONS for n in self.provisioner.describe(FLEET, region).nodes]

    def supply(self):
        return observe_supply(
            aws_sources(self.api, self.clock),
            FLEET,
            regions=REGIONS,
            configs=CONFIGS,
            markets=tuple(Market),
            held=holdings(self.nodes()),
            failures=self.failures,
            now=self.clock.now(),
            sleep=time.sleep,
        )

    def apply(self, wanted: tuple[Wanted, ...], plan_id: str, *, rules=(), **changes) -> ApplyReport:
        supply = self.supply()
        self.server.rules += rules
        prices = {o: s.price_usd_per_h.value for o, s in supply.offers.items() if o not in supply.gaps}
        zones = {offer: state.zones for offer, state in supply.offers.items()}
        policy = ApplyPolicy(
            reconcile=ReconcilePolicy(zones=zones), poll_s=0.05, settle_s=0.5, max_backoff_s=0.2, deadline_s=60.0
        )
        ports = {
            "provisioner": self.provisioner,
            "engine": self.engine,
            "clock": self.clock,
            "sleep": time.sleep,
            "guard": lambda: 1e6,
            "record": self.events.append,
        }
        return apply_plan(
            FleetPlan(fleet=FLEET, plan_id=plan_id, epoch=1, wanted=wanted),
            regions=REGIONS,
            limits=FleetLimits(max_nodes=30, max_usd_per_h=40.0, price_usd_per_h=prices),
            policy=policy,
            ports=Ports(**{**ports, **changes}),
        )

    def reallocate(self, tokens_per_s: float, plan_id: str) -> tuple[tuple[Wanted, ...], ApplyReport]:
        """Solve, apply, and while the cloud refuses solve again with what it has given."""
        supply = self.supply()
        arrays = planning_arrays(supply, REGIONS, COLUMNS, leave_out_gaps=True)
        for attempt in range(8):
            result = solve_allocation(self.problem(arrays, tokens_per_s))
            self.solves += 1
            assert result.full
            wanted = wanted_of(result.instances, SPECS)
            report = self.apply(wanted, f"{plan_id}-{attempt}")
            self.failures += report.failures
            if report.status is ApplyStatus.CONVERGED:
                return wanted, report
            assert report.status is ApplyStatus.UNMET, report
            arrays = lower(arrays, REGIONS, COLUMNS, report.lowered)
        raise AssertionError("no plan could be met")

    def problem(self, arrays, tokens_per_s: float) -> AllocationProblem:
        names = [(s, market) for s in SPECS.values() for market in Market]
        nodes = [[s.combination.get(c, 0) if m is market else 0 for c, m in COLUMNS] for s, market in names]
        return AllocationProblem(
            regions=REGIONS,
            configs=tuple(market_name(c, m) for c, m in COLUMNS),
            available=arrays.available,
            price_usd_per_h=arrays.price_usd_per_h,
            templates=TemplateColumns(
                ids=tuple(market_name(s.template_id, m) for s, m in names),
                models=("m",) * len(names),
                phases=(Phase.DECODE,) * len(names),
                nodes=np.array(nodes, dtype=np.int64),
                throughput=np.array([s.throughput for s, _ in names]),
            ),
            demand=(DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=tokens_per_s),),
            running=running_of(self.nodes()),
            churn_k=0.1,
        )

    def truth(self) -> dict[tuple[str, str, Market], int]:
        """Whole instances by (template, region, market), from the server's own records; orphans under their own id."""
        alive = {m.id for region in REGIONS for m in self.server.machines(region)}
        found: dict[tuple[str, str, Market], int] = {}
        for instance in gather(n for n in self.nodes() if n.live):
            assert {n.node_id for n in instance.nodes} <= alive
            key = instance.key if not instance.missing else ("part", instance.instance_id, instance.market)
            found[key] = found.get(key, 0) + 1
        return found


@pytest.fixture(scope="module")
def server():
    with ec2_server() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def operator(server) -> Operator:
    server.clear()
    return Operator(server=server)


def as_counts(wanted):
    return {(w.spec.template_id, w.region, w.market): w.count for w in wanted if w.count}


def test_three_epochs_of_changing_demand_prices_and_capacity(operator, server):
    recorded = []
    zones = [f"us-east-1{letter}" for letter in "abcdf"]

    def epoch(number: int, tokens_per_s: float) -> float:
        wanted, report = operator.reallocate(tokens_per_s, f"epoch-{number}")
        assert operator.truth() == as_counts(wanted)
        assert sum(w.spec.throughput * w.count for w in wanted) >= tokens_per_s
        prices = {o: s.price_usd_per_h for o, s in operator.supply().offers.items()}
        cost_usd_per_h = sum(prices[offer].value * n for offer, n in holdings(report.nodes).items())
        recorded.append((number, tokens_per_s, cost_usd_per_h, as_counts(wanted)))
        assert {operator.engine.weight[n.tags.instance_id] for n in report.nodes if n.live} <= {100.0, 190.0, 160.0}
        return cost_usd_per_h

    first = epoch(1, 500.0)
    server.capacity.update({(zone, "g5.xlarge"): 1 for zone in zones})
    server.price_factor.update({("us-west-2", "g5.xlarge"): 1.5, ("us-east-1", "g6.xlarge"): 1.2})
    second = epoch(2, 1300.0)
    assert Refusal.CAPACITY in {f.refusal for f in operator.failures}
    assert operator.solves > 2, "a refusal makes the same run solve again"
    server.capacity.clear()
    server.price_factor.clear()
    third = epoch(3, 200.0)
    assert third < first < second
    assert [row[:2] for row in recorded] == [(1, 500.0), (2, 1300.0), (3, 200.0)]


def test_no_capacity_as_http_500_is_asked_for_once_in_each_zone(operator, server):
    for letter in "abcdf":
        server.capacity[f"us-east-1{letter}", "g6e.xlarge"] = 0
    report = operator.apply(
        (Wanted(spec=SPECS["d-one-g6e"], region="us-east-1", market=Market.ON_DEMAND, count=1),), "p"
    )
    assert report.status is ApplyStatus.UNMET
    zones = [p["Placement.AvailabilityZone"] for name, p in server.log if name == "RunInstances"]
    assert len(zones) == len(set(zones)) == len(report.failures)
    assert report.lowered == {("us-east-1", "g6e.xlarge", Market.ON_DEMAND): 0}


def test_faults_on_the_way_leave_neither_orphans_nor_doubles(operator, server):
    operator.provisioner = AwsProvisioner(Boto3Api(read_timeout_s=2.0), AwsLaunch(launch_template=TEMPLATE))
    rules = [
        Rule(action="RunInstances", code="RequestLimitExceeded", status=503, times=2),
        Rule(action="RunInstances", delay_s=4.0, skip=1),  # done, and the answer lost
        Rule(action="RunInstances", code="InternalError", status=500, skip=2),
        Rule(action="DescribeInstances", code="Unavailable", status=503, times=2, skip=3),
    ]
    goal = (Wanted(spec=SPECS["d-two-g6"], region="us-west-2", market=Market.ON_DEMAND, count=3),)
    assert operator.apply(goal, "p", rules=rules).status is ApplyStatus.CONVERGED
    assert server.rules == []
    assert operator.truth() == as_counts(goal)
    assert len(server.machines("us-west-2")) == 6
    busy = [Rule(action="TerminateInstances", code="RequestLimitExceeded", status=503)]
    assert operator.apply((), "q", rules=busy).status is ApplyStatus.CONVERGED
    assert server.machines("us-west-2") == []
    assert server.groups == {}


def test_a_process_that_dies_between_calls_is_continued_by_the_next(operator, server):
    goal = (Wanted(spec=SPECS["d-two-g6"], region="us-east-1", market=Market.SPOT, count=2),)

    class Crash(Exception):  # noqa: N818  # the process is gone, nobody handles it
        pass

    for step in range(1, 12):
        left = [step]

        def guard(left=left) -> float:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return 1e6

        try:
            operator.apply(goal, "p", guard=guard)
        except Crash:
            continue
        break
    assert operator.apply(goal, "p").status is ApplyStatus.CONVERGED
    assert operator.truth() == as_counts(goal)
    assert len(server.machines("us-east-1")) == 4


def test_a_dead_node_and_a_spot_notice_are_replaced(operator, server):
    goal = (
        Wanted(spec=SPECS["d-two-g6"], region="us-east-1", market=Market.ON_DEMAND, count=1),
        Wanted(spec=SPECS["d-one-g5"], region="us-east-1", market=Market.SPOT, count=1),
    )
    first = operator.apply(goal, "p").nodes
    pair = [n for n in first if n.tags.template_id == "d-two-g6"]
    (spot,) = [n for n in first if n.market is Market.SPOT]
    operator.api.call("ec2", "us-east-1", "terminate_instances", InstanceIds=[pair[0].node_id])
    server.noticed[spot.node_id] = "us-east-1"
    report = operator.apply(goal, "p")
    assert report.status is ApplyStatus.CONVERGED
    assert operator.truth() == as_counts(goal)
    assert not {n.node_id for n in first} & {n.node_id for n in report.nodes if n.live}


@pytest.mark.parametrize(
    ("code", "status", "fix"),
    [
        ("AuthFailure", 401, "access key"),
        ("ExpiredToken", 400, "renew"),
        ("UnauthorizedOperation", 403, "grant"),
    ],
)
def test_bad_credentials_change_nothing(operator, server, code, status, fix):
    goal = (Wanted(spec=SPECS["d-one-g5"], region="us-east-1", market=Market.ON_DEMAND, count=1),)
    operator.apply(goal, "p")
    before = {m.id for m in server.machines("us-east-1")}
    server.rules.append(Rule(action="*", code=code, status=status, times=1000))
    with pytest.raises(ProvisionError, match=code) as caught:
        operator.apply((), "q")
    assert fix in caught.value.fix
    assert not isinstance(caught.value, CloudBusyError)
    assert {m.id for m in server.machines("us-east-1")} == before


def test_without_a_permission_the_source_is_a_gap_and_the_rest_is_observed(operator, server):
    server.rules.append(Rule(action="GetProducts", code="AccessDeniedException", status=400, times=100))
    supply = operator.supply()
    missing = set(supply.gaps)
    assert {market for _, _, market in missing} >= {Market.ON_DEMAND}
    gap = supply.gaps["us-east-1", "g5.xlarge", Market.ON_DEMAND][0]
    assert "GetProducts" in gap.reason or "get_products" in gap.reason
    assert supply.offers["us-east-1", "g5.xlarge", Market.SPOT].price_usd_per_h.value == pytest.approx(0.41)


def test_quotas_count_what_others_run(operator, server):
    operator.api.call(
        "ec2", "us-east-1", "run_instances", ImageId="ami-12345678", InstanceType="g5.12xlarge", MinCount=1, MaxCount=1
    )
    supply = operator.supply()
    east, west = (supply.offers[region, "g5.xlarge", Market.ON_DEMAND].available for region in REGIONS)
    assert (west.value, east.value) == (64 // 4, (64 - 48) // 4)
    assert "48 used by others" in east.source
    pool = next(p for p in supply.pools if (p.region, p.pool) == ("us-east-1", "L-DB2E81BA"))
    wish = {("us-east-1", "g5.xlarge", Market.ON_DEMAND): 3, ("us-east-1", "g6.xlarge", Market.ON_DEMAND): 2}
    assert supply.pool_excess(wish) == (pool,)


def test_instances_of_others_are_reported_and_stay(operator, server):
    goal = (Wanted(spec=SPECS["d-one-g5"], region="us-east-1", market=Market.ON_DEMAND, count=1),)
    node = operator.apply(goal, "p").nodes[0]
    copied = [{"Key": k, "Value": v} for k, v in write_tags(FLEET, node.tags).items()]
    made = operator.api.call(
        "ec2",
        "us-east-1",
        "run_instances",
        ImageId="ami-12345678",
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": copied}],
    )
    report = operator.apply((), "q")
    assert report.status is ApplyStatus.CONVERGED
    assert [n.node_id for n in report.foreign] == [made["Instances"][0]["InstanceId"]]
    assert [m.id for m in server.machines("us-east-1")] == [made["Instances"][0]["InstanceId"]]


def test_the_wrong_account_and_an_unknown_region_are_named(operator):
    wanted = Wanted(spec=SPECS["d-one-g5"], region="us-east-1", market=Market.ON_DEMAND, count=1)
    other = replace(FLEET, account="999999999999")
    with pytest.raises(CoralError, match="the credentials belong to account 123456789012"):
        apply_plan(
            FleetPlan(fleet=other, plan_id="p", epoch=1, wanted=(wanted,)),
            regions=REGIONS,
            limits=FleetLimits(
                max_nodes=3, max_usd_per_h=9.0, price_usd_per_h={("us-east-1", "g5.xlarge", Market.ON_DEMAND): 1.0}
            ),
            policy=ApplyPolicy(reconcile=ReconcilePolicy(zones={})),
            ports=Ports(
                provisioner=operator.provisioner,
                engine=operator.engine,
                clock=operator.clock,
                sleep=time.sleep,
                guard=lambda: 1e6,
                record=operator.events.append,
            ),
        )
    with pytest.raises(ProvisionError, match=r"'us-esat-1'.*did you mean .*us-east-1"):
        operator.provisioner.describe(FLEET, "us-esat-1")
    assert operator.server.count("RunInstances") == 0
