"""Whatever happens to runs and machines: once the faults stop, one more run makes the fleet equal to the plan.

Random sequences of crashes before and after any call, throttling, no capacity, quota, lost answers, dying machines, spot
notices, late listings, repeated runs and two runs at once. At every moment: never above the limits, nothing foreign
touched, no serving instance stopped undrained. At the end: nothing orphaned, nothing doubled.
"""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from artifacts import leases
from artifacts.leases import LeaseTerms
from artifacts.store import open_store
from coral_core.cloud.fake import Fault, Trouble
from coral_core.cloud.ports import ApplyReport, ApplyStatus
from coral_core.cloud.tags import write_tags
from coral_core.domain.fleet import NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import CoralError, ProvisionError
from tests.fakes.fleet_cases import FLEET, ONE, THREE, TWO, ZONES, World, apply_policy, counts, limits, plan, wanted
from tests.fakes.fleet_cases import POLICY as ZONED

MAX_NODES, MAX_USD_PER_H = 9, 30.0
SCARCE = {("east", "a", Market.ON_DEMAND): 3}
LIMITS = limits(max_nodes=MAX_NODES, max_usd_per_h=MAX_USD_PER_H, max_by_offer=SCARCE)
POLICY = apply_policy(
    deadline_s=2500.0, poll_s=15.0, reconcile=replace(ZONED, start_timeout_s=200.0, unready_grace_s=60.0)
)
LONGEST_LAG_S = 55.0
TTL_S = 170.0  # half of it outlives a call and settle_s, as the executor demands

FAULTS = st.builds(
    Fault,
    operation=st.sampled_from(["start", "start", "start", "describe", "stop", "account", "release_group"]),
    trouble=st.sampled_from([t for t in Trouble if t not in {Trouble.CAPACITY, Trouble.QUOTA}]),
    times=st.integers(1, 3),
) | st.builds(
    Fault,
    operation=st.just("start"),
    trouble=st.sampled_from(list(Trouble)),
    times=st.integers(1, 2),
    zone=st.none() | st.sampled_from(["east-a", "east-b", "west-a"]),
    config=st.none() | st.sampled_from(["a", "b", "c"]),
)
PARTS = st.tuples(
    st.sampled_from([ONE, TWO, THREE]),
    st.sampled_from([1, 2, 0]),
    st.sampled_from(list(ZONES)),
    st.sampled_from(list(Market)),
)
HARM = st.sampled_from(["kill", "interrupt", "halt"])
PLANS = st.lists(PARTS, min_size=1, max_size=3)
MAYBE_PLANS = PLANS | st.none()


class Crash(Exception):  # noqa: N818  # no error of the program: the process is gone
    pass


class Lease:
    """The lease of the runs, by run; one that is not given back (a crash, an error) stays until its time is over."""

    def __init__(self, clock) -> None:
        self.clock, self.store = clock, open_store(f"memory://{uuid.uuid4().hex}")
        self.terms = LeaseTerms(duration_s=TTL_S, skew_s=0.5)
        self.held: dict[int, leases.Lease] = {}

    def take(self, run: int) -> bool:
        found = leases.take_lease(self.store, "demo", holder=str(run), terms=self.terms, clock=self.clock)
        if isinstance(found, leases.Lease):
            self.held[run] = found
        return run in self.held

    def renew(self, run: int) -> float:
        return self.held[run].guard() - POLICY.settle_s

    def give_back(self, run: int) -> None:
        self.held.pop(run).give_back()


class FleetMachine(RuleBasedStateMachine):
    met: ClassVar[Counter[str]] = Counter()
    """What the sequences have met, so that a test that meets nothing cannot pass."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.cloud, self.clock = self.world.cloud, self.world.clock
        self.lease = Lease(self.clock)
        self.runs = 0
        self.plans = 0
        self.harmed_at_s = -1e9
        self.goal = plan(plan_id="plan-0")
        self.cloud.watch = lambda _: self.within_limits()
        stop = self.cloud.stop

        def checked_stop(fleet, region, nodes):
            nodes = list(nodes)
            self.nothing_that_serves(nodes)
            stop(fleet, region, nodes)

        self.checked_stop = checked_stop

    @initialize(parts=PLANS)
    def begin(self, parts):
        self.new_plan(parts)
        tags = NodeTags(
            instance_id="d-one-0", template_id="d-one", model="m1", phase=Phase.DECODE,
            config="a", stage=0, node=0, nodes=1, epoch=1,
        )  # fmt: skip
        self.cloud.plant("copied-tags", region="east", tags=write_tags(FLEET, tags), token="by hand")
        self.cloud.plant("bad-tags", region="west", tags={"coral:fleet": "demo", "coral:node": "x"})

    # What a run meets ------------------------------------------------------------------------------------------

    @rule()
    def plan_of_nothing(self):
        self.new_plan([])

    def new_plan(self, parts):
        """Take a plan where it fits the limits; one that does not is refused without a call."""
        if parts is None:
            return
        self.plans += 1
        unique = {(spec.template_id, region, market): (spec, n) for spec, n, region, market in parts}
        goal = plan(
            *(wanted(spec, n, region=r, market=m) for (_, r, m), (spec, n) in unique.items()),
            plan_id=f"plan-{self.plans}",
            epoch=self.plans,
        )
        nodes = sum(w.count * len(w.spec.slots) for w in goal.wanted)
        usd_per_h = sum(
            w.count * n * LIMITS.price_usd_per_h[w.region, config, w.market]
            for w in goal.wanted
            for config, n in w.spec.combination.items()
        )
        scarce = sum(
            w.count * w.spec.combination.get("a", 0)
            for w in goal.wanted
            if (w.region, w.market) == ("east", Market.ON_DEMAND)
        )
        if nodes <= MAX_NODES and usd_per_h <= MAX_USD_PER_H and scarce <= SCARCE["east", "a", Market.ON_DEMAND]:
            self.goal = goal
            return
        calls = len(self.cloud.calls)
        with pytest.raises(ProvisionError, match="the plan passes"):
            self.world.apply(goal, LIMITS, POLICY)
        assert len(self.cloud.calls) == calls

    @rule(faults=st.lists(FAULTS, min_size=1, max_size=3))
    def faults_ahead(self, faults):
        self.cloud.faults.extend(faults)

    @rule(zone=st.sampled_from(["east-a", "east-b"]), config=st.sampled_from(["a", "b"]), nodes=st.integers(0, 3))
    def capacity(self, zone, config, nodes):
        self.cloud.capacity[zone, config] = nodes

    @rule(config=st.sampled_from(["a", "b"]), market=st.sampled_from(list(Market)), nodes=st.integers(0, 3))
    def quota(self, config, market, nodes):
        self.cloud.quota["east", config, market] = nodes

    @rule(lag_s=st.sampled_from([0.0, 7.0, 25.0, LONGEST_LAG_S]))
    def late_listings(self, lag_s):
        self.cloud.lag_s = lag_s

    @rule(broken=st.sets(st.sampled_from(["d-one", "d-two", "p-three"]), max_size=1))
    def engines(self, broken):
        self.world.engine.broken = broken

    @rule(harm=HARM, which=st.integers(0, 20))
    def machines_suffer(self, harm, which):
        self.harm_one(harm, which)

    def harm_one(self, harm, which):
        ours = [m for m in self.cloud.held(also_ending=False) if m.order is not None]
        if ours:
            self.harmed_at_s = self.clock.elapsed_s
            getattr(self.cloud, harm)(ours[which % len(ours)].node_id)

    @rule(duration_s=st.sampled_from([1.0, 40.0, 1000.0, 5000.0]))
    def time_passes(self, duration_s):
        self.clock.advance(duration_s)

    # Runs ------------------------------------------------------------------------------------------------------

    @rule(parts=MAYBE_PLANS)
    def run(self, parts):
        self.new_plan(parts)
        self.one_run()

    @rule(parts=MAYBE_PLANS, call=st.integers(1, 10), reads=st.booleans(), after=st.booleans())
    def run_that_crashes(self, parts, call, reads, after):
        """The process dies just before or just after its n-th call (or change); its lease stays behind."""
        self.new_plan(parts)
        hook = self.crash_at(call, reads=reads)
        self.cloud.before_call, self.cloud.after_call = (None, hook) if after else (hook, None)
        try:
            self.one_run()
        except Crash:
            self.met["crash"] += 1
            assert not self.lease.take(-1), "the lease of a crashed run holds until its time is over"
        finally:
            self.cloud.before_call = self.cloud.after_call = None

    @rule(parts=MAYBE_PLANS, change=st.integers(1, 12))
    def two_runs_one_refused(self, parts, change):
        """A second run begins while the first is at work: it gets no lease and does nothing."""
        self.new_plan(parts)
        self.one_run(at_change=(change, self.refused_run))

    @rule(parts=MAYBE_PLANS, change=st.integers(1, 12), harm=HARM, which=st.integers(0, 20))
    def run_while_machines_suffer(self, parts, change, harm, which):
        self.new_plan(parts)
        self.one_run(at_change=(change, lambda: self.harm_one(harm, which)))

    @rule(parts=MAYBE_PLANS, newer=MAYBE_PLANS, change=st.integers(1, 12))
    def two_runs_one_stalled(self, parts, newer, change):
        """The first run stalls beyond its lease; a second takes over, perhaps with a newer plan; the first wakes up."""
        self.new_plan(parts)

        def stall():
            self.clock.advance(TTL_S + 1)
            self.new_plan(newer)
            self.one_run()

        self.one_run(at_change=(change, stall))

    def crash_at(self, call, *, reads):
        left = [call]

        def hook(operation):
            left[0] -= reads or operation in {"start", "stop", "release_group"}
            if left[0] <= 0:
                raise Crash

        return hook

    def refused_run(self):
        calls = len(self.cloud.calls)
        assert self.one_run() is None
        self.met["refused"] += 1
        assert len(self.cloud.calls) == calls

    def one_run(self, at_change=(0, None)) -> ApplyReport | None:
        """A run under the lease; None where another holds it or the run fails by an expected error."""
        self.runs += 1
        run = self.runs
        if not self.lease.take(run):
            return None
        goal, begun_s, changes = self.goal, self.clock.elapsed_s, [0]

        def guard():
            changes[0] += 1
            if changes[0] == at_change[0]:
                at_change[1]()
            return self.lease.renew(run)

        try:
            report = self.world.apply(self.goal, LIMITS, POLICY, guard=guard, provisioner=Checked(self))
        except CoralError:
            return None  # the lease stays until its time is over
        self.met[report.status.value] += 1
        self.lease.give_back(run)
        if self.harmed_at_s < begun_s - LONGEST_LAG_S:
            self.tells_the_truth(goal, report)
        return report

    def tells_the_truth(self, goal, report):
        """What a run says of the fleet is so, however late the listings are: none doubled, none left in part."""
        truth = self.world.fleet()
        if report.status is ApplyStatus.CONVERGED:
            assert truth == counts(goal)
        if report.status is ApplyStatus.UNMET:
            assert not [key for key in truth if key[0] == "part"]

    # What always holds -----------------------------------------------------------------------------------------

    def within_limits(self):
        ours = [m.order for m in self.cloud.held() if m.order is not None]
        assert len(ours) <= MAX_NODES
        usd_per_h = sum(LIMITS.price_usd_per_h[o.region, o.tags.config, o.market] for o in ours)
        assert usd_per_h <= MAX_USD_PER_H + 1e-9
        for offer, bound in SCARCE.items():
            assert sum((o.region, o.tags.config, o.market) == offer for o in ours) <= bound

    def nothing_that_serves(self, nodes):
        """A stop never hits an instance that is whole, answers and still gets requests."""
        for node in nodes:
            whole = [
                m
                for m in self.cloud.held(also_ending=False)
                if m.order and m.order.tags.instance_id == node.tags.instance_id
            ]
            alive = len(whole) == node.tags.nodes and not any(m.halted for m in whole)
            weight = self.world.engine.weight.get(node.tags.instance_id, 0.0)
            assert not (alive and weight > 0), f"{node.tags.instance_id} is stopped while requests go to it"

    @invariant()
    def foreign_machines_stand(self):
        assert all(m.stopped_at is None for m in self.cloud.machines.values() if m.order is None)

    def teardown(self):
        """The faults stop; the last crashed run's lease runs out; one more run."""
        self.cloud.faults.clear()
        self.cloud.capacity.clear()
        self.cloud.quota.clear()
        self.world.engine.broken = set()
        self.clock.advance(TTL_S + 1)
        report = self.one_run()
        assert report is not None
        assert report.status is ApplyStatus.CONVERGED, report
        assert self.world.fleet() == counts(self.goal)
        standing = {m.node_id for m in self.cloud.held(also_ending=False) if m.order is not None}
        assert {n.node_id for n in report.nodes if n.state is not NodeState.ENDING} == standing
        weights = {w.spec.template_id: w.spec.throughput for w in self.goal.wanted}
        for node in report.nodes:
            if node.live:
                assert self.world.engine.weight[node.tags.instance_id] == weights[node.tags.template_id]


class Checked:
    """The fake cloud with every stop looked at first."""

    def __init__(self, machine: FleetMachine) -> None:
        self._cloud, self.stop = machine.cloud, machine.checked_stop

    def __getattr__(self, name):
        return getattr(self._cloud, name)


def converges(sequences: int) -> None:
    FleetMachine.met.clear()
    run_state_machine_as_test(
        FleetMachine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=15,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_after_any_faults_one_more_run_converges():
    converges(100)
    assert FleetMachine.met["converged"] >= 200
    assert {"crash", "refused", "unmet", "lease_lost"} <= FleetMachine.met.keys(), FleetMachine.met


@pytest.mark.nightly
def test_after_any_faults_one_more_run_converges_in_many_sequences():
    converges(2000)
