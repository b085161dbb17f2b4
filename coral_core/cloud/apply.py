"""Make the fleet equal to a plan: an idempotent executor over ports. It may die anywhere; the next run goes on.

Each round lists the fleet, reconciles, and does the steps that are due. What a run keeps in memory (nodes too young to
be listed, offers that refused, since when an engine is silent) only spares it time: the truth is the cloud's.

Safety between runs: every call that changes something first asks the guard, so does every round (a run that waits must
keep its lease), and no call starts with less of the lease left than it may take. A run returns only when what it started
is listed and what it stopped is no longer listed as alive, or both are `settle_s` old. A run that ends by an exception
has not waited for that: its lease must be left to run out, and must outlive `settle_s`, so that its successor sees all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from coral_core.clock import ListeningClock
from coral_core.cloud.budget import check_plan
from coral_core.cloud.engine_port import Readiness, asked
from coral_core.cloud.fleet_view import Exhausted, Instance, Signals, gather, holdings
from coral_core.cloud.ports import (
    ApplyPolicy,
    ApplyReport,
    ApplyStatus,
    FleetEvent,
    LeaseLostError,
    Ports,
    Preview,
    StartFailure,
)
from coral_core.cloud.provisioner import CloudBusyError, NodeOrder, Refusal, Refused
from coral_core.cloud.reconcile import reconcile
from coral_core.cloud.steps import Action, Due, Reconciliation, Step, Unmet
from coral_core.domain.fleet import FleetLimits, FleetPlan, ForeignNode, Node, NodeState, Offer
from coral_core.domain.hardware import Market
from coral_core.errors import ProvisionError, ServingError

Answer = TypeVar("Answer")

_SILENT_S: Final = 3.0
"""A gateway that has kept a call waiting in vain for so long would keep those of all instances: it is asked in the next round."""


def apply_plan(
    plan: FleetPlan, *, regions: Collection[str], limits: FleetLimits, policy: ApplyPolicy, ports: Ports
) -> ApplyReport:
    """Bring the fleet to the plan, or as near as the cloud allows; safe to repeat and to interrupt anywhere.

    `regions`: every region in which the fleet may have nodes; those of the plan are added. An empty plan is a teardown.
    Nothing is touched that is not proven ours, and nothing is started before every region has been listed.
    Raises ProvisionError for a fleet of another account, a plan beyond the limits and what no repetition mends;
    CloudBusyError where a region cannot be listed until the deadline; InputError and DataGapError for a bad plan. The
    caller gives its lease back after a report, not after an error (see above).
    """
    check_plan(plan, limits)
    run = _Run(plan, sorted({*regions, *(wanted.region for wanted in plan.wanted)}), limits, policy, ports)
    try:
        run.check_account()
        return run.loop()
    except LeaseLostError as error:
        return run.report(ApplyStatus.LEASE_LOST, str(error))


def preview_plan(
    plan: FleetPlan, *, regions: Collection[str], limits: FleetLimits, policy: ApplyPolicy, ports: Ports
) -> Preview:
    """The fleet as it is and all steps from it to the plan; reads only, and needs no lease. Raises as `apply_plan`."""
    check_plan(plan, limits)
    free = replace(ports, guard=lambda: math.inf)
    run = _Run(plan, sorted({*regions, *(wanted.region for wanted in plan.wanted)}), limits, policy, free)
    run.check_account()
    run.observe()
    return Preview(nodes=tuple(run.nodes.values()), foreign=run.foreign, todo=run.reconcile())


class _Run:
    def __init__(
        self, plan: FleetPlan, regions: list[str], limits: FleetLimits, policy: ApplyPolicy, ports: Ports
    ) -> None:
        self.plan, self.regions, self.limits, self.policy, self.ports = plan, regions, limits, policy, ports
        self.begun_s = ports.clock.monotonic_s()
        self.nodes: dict[str, Node] = {}
        self.foreign: tuple[ForeignNode, ...] = ()
        self.groups: list[tuple[str, str]] = []
        self.started: dict[str, tuple[Node, float]] = {}  # by node id, not listed yet
        self.stopped_s: dict[str, float] = {}
        self.listed_alive: set[str] = set()
        self.unknown_s: dict[tuple[str, int], float] = {}  # orders without an answer
        self.said: dict[Readiness, set[str]] = {}  # instances by what the serving side says of them
        # A run that stood still itself has not seen engines silent meanwhile.
        self.looked_s = ListeningClock(ports.clock.monotonic_s, most_s=2 * policy.poll_s)
        self.unready_since_s: dict[str, float] = {}  # in `looked_s`
        self.weight: dict[str, float] = {}
        self.drain_since_s: dict[str, float] = {}
        self.drained: set[str] = set()
        self.silent = False  # the gateway, in this round
        self.unheard: set[tuple[Action, str]] = set()  # told of already: the gateway failed in this
        self.burnt: set[str] = set()
        self.exhausted: set[Exhausted] = set()
        self.failures: list[StartFailure] = []
        self.unmet: tuple[Unmet, ...] = ()
        self.begun: set[str] = set()  # instances that this run has started and not seen ready
        self.failed_starts: Counter[tuple[str, str, Market]] = Counter()
        self.busy = False
        self.strikes = 0

    @property
    def elapsed_s(self) -> float:
        return self.ports.clock.monotonic_s() - self.begun_s

    def check_account(self) -> None:
        account = self._patiently(self.ports.provisioner.account)
        if account != self.plan.fleet.account:
            raise ProvisionError(
                f"the credentials belong to account {account}, the fleet to {self.plan.fleet.account}",
                where=f"fleet {self.plan.fleet.name}",
                fix="use the fleet's own credentials (profile, role), or correct the account in its settings",
            )

    def loop(self) -> ApplyReport:
        while True:
            self.observe()
            todo = self.reconcile()
            late = self.elapsed_s >= self.policy.deadline_s
            if (late or todo.converged or todo.stuck) and not self.unsettled():
                self._release_groups(todo)
                return self._ended(todo)
            self.busy = False
            for step in todo.steps:
                throttled = self.busy and step.action is Action.START
                if step.due is Due.NOW and not late and not throttled:
                    self.do(step)
            self._sleep()

    def observe(self) -> None:
        """List every region, add what is too young to be listed, ask the engines."""
        now_s = self.ports.clock.monotonic_s()
        fleet = self.plan.fleet
        describe = self.ports.provisioner.describe
        listings = [(region, self._patiently(partial(describe, fleet, region))) for region in self.regions]
        listed = {node.node_id: node for _, listing in listings for node in listing.nodes}
        self.foreign = tuple(node for _, listing in listings for node in listing.foreign)
        self.groups = [(region, name) for region, listing in listings for name in listing.groups]
        self.started = {
            name: (node, since_s)
            for name, (node, since_s) in self.started.items()
            if name not in listed and (now_s - since_s < self.policy.settle_s or node.state is NodeState.GONE)
        }
        over = {NodeState.ENDING, NodeState.GONE}
        self.listed_alive = {name for name, node in listed.items() if node.state not in over}
        self.stopped_s = {n: since_s for n, since_s in self.stopped_s.items() if now_s - since_s < self.policy.settle_s}
        merged = {**{name: node for name, (node, _) in self.started.items()}, **listed}
        self.nodes = {name: self._ending(node) if name in self.stopped_s else node for name, node in merged.items()}
        self._ask_engines()

    def _ending(self, node: Node) -> Node:
        """A node that was told to stop, whatever a lagging listing says."""
        return node if node.state is NodeState.GONE else replace(node, state=NodeState.ENDING)

    def _ask_engines(self) -> None:
        now_s = self.looked_s()
        self.said = {readiness: set() for readiness in Readiness}
        self.silent = False
        for instance in gather(self.nodes.values()):
            name, begun_s = instance.instance_id, self.ports.clock.monotonic_s()
            unasked = self.silent and instance.may_serve
            readiness = Readiness.UNKNOWN if unasked else asked(self.ports.engine, instance)
            if readiness is Readiness.UNKNOWN:
                self._note_silence(begun_s)
            self.said[readiness].add(name)
            if readiness is Readiness.NOT_READY:
                self.unready_since_s.setdefault(name, now_s)
            else:
                self.unready_since_s.pop(name, None)
        self.begun -= self.said[Readiness.READY] | self.said[Readiness.DEGRADED]

    def reconcile(self) -> Reconciliation:
        now_s = self.looked_s()
        signals = Signals(
            ready=frozenset(self.said[Readiness.READY]),
            degraded=frozenset(self.said[Readiness.DEGRADED]),
            unready_s={name: now_s - since_s for name, since_s in self.unready_since_s.items()},
            failed=frozenset(self.said[Readiness.FAILED]),
            weight=self.weight,
            draining=frozenset(self.drain_since_s),
            drained=frozenset(self.drained),
            burnt=frozenset(self.burnt),
            exhausted=frozenset(self.exhausted),
            given_up=frozenset(k for k, n in self.failed_starts.items() if n >= self.policy.max_failed_starts),
        )
        result = reconcile(
            self.plan,
            tuple(self.nodes.values()),
            groups=self.groups,
            limits=self.limits,
            policy=self.policy.reconcile,
            now=self.ports.clock.now(),
            signals=signals,
        )
        self.unmet = result.unmet
        return result

    def unsettled(self) -> bool:
        """Whether the listing may still hide what this run has started, or show as alive what it has stopped.

        The next run knows only the listing: what it does not show would be missing in that run's sums.
        """
        now_s = self.ports.clock.monotonic_s()
        young = [since_s for node, since_s in self.started.values() if node.state is not NodeState.GONE]
        hidden = any(now_s - since_s < self.policy.settle_s for since_s in (*young, *self.unknown_s.values()))
        return hidden or bool(self.stopped_s.keys() & self.listed_alive)

    def do(self, step: Step) -> None:
        match step.action:
            case Action.START:
                for order in step.orders:
                    if not self._start(step, order):
                        return
            case Action.STOP:
                self._stop(step)
            case Action.WEIGHT if step.instance is not None:
                self._set_weight(step, step.instance)
            case Action.DRAIN if step.instance is not None:
                self._drain(step, step.instance)
            case _:  # waiting is done by the next round, groups by `_release_groups`
                pass

    def _start(self, step: Step, order: NodeOrder) -> bool:
        """Start one node; False where the rest of the instance must wait or fail with it."""
        if self._has_refused(order):  # since this round's steps were made: the next round goes elsewhere
            return False
        self._permit()
        name, number = order.tags.instance_id, order.tags.node
        outcome = self.ports.provisioner.start(self.plan.fleet, order)
        now_s = self.ports.clock.monotonic_s()
        if isinstance(outcome, Refused):
            self._note_refusal(order, outcome, now_s)
            self._record(step, f"node {number} in {order.zone}: {outcome.refusal} ({outcome.code}) {outcome.message}")
            return False
        node = outcome.node
        self.started[node.node_id] = (node, now_s)
        self.nodes[node.node_id] = node
        self.begun.add(name)
        self.unknown_s.pop((name, number), None)
        self._record(step, f"node {number} in {node.zone}: {node.node_id} is {node.state}")
        return node.live

    def _has_refused(self, order: NodeOrder) -> bool:
        return any(
            Exhausted(region=order.region, zone=zone, config=order.tags.config, market=order.market) in self.exhausted
            for zone in (order.zone, None)
        )

    def _note_refusal(self, order: NodeOrder, outcome: Refused, now_s: float) -> None:
        refusal, config = outcome.refusal, order.tags.config
        if refusal is Refusal.UNKNOWN:
            self.unknown_s[order.tags.instance_id, order.tags.node] = now_s
        if refusal is Refusal.CONFLICT:
            self.burnt.add(order.tags.instance_id)
        ending = any(n.state is NodeState.ENDING and n.region == order.region for n in self.nodes.values())
        if refusal.passing or (refusal is Refusal.QUOTA and ending):  # what ends gives its quota back soon
            self.busy = True
            return
        if refusal is Refusal.CONFLICT:
            return
        zone = None if refusal is Refusal.QUOTA else order.zone
        self.exhausted.add(Exhausted(region=order.region, zone=zone, config=config, market=order.market))
        self.failures.append(
            StartFailure(
                at=self.ports.clock.now(),
                region=order.region,
                zone=order.zone,
                config=config,
                market=order.market,
                refusal=refusal,
                code=outcome.code,
                message=outcome.message,
                held=holdings(self.nodes.values()).get((order.region, config, order.market), 0),
            )
        )

    def _stop(self, step: Step) -> None:
        self._permit()
        try:
            self.ports.provisioner.stop(self.plan.fleet, step.region, step.nodes)
        except CloudBusyError as error:
            self.busy = True
            self._record(step, f"again later: {error}")
            return
        now_s = self.ports.clock.monotonic_s()
        if step.instance is not None and step.instance_id in self.begun and not step.instance.missing:
            self.failed_starts[step.instance.key] += 1
        self.begun.discard(step.instance_id)
        for node in step.nodes:
            self.stopped_s[node.node_id] = now_s
            self.nodes[node.node_id] = self._ending(node)
        self._record(step, f"{step.reason}: {', '.join(node.node_id for node in step.nodes)}")

    def _set_weight(self, step: Step, instance: Instance) -> None:
        self._permit()
        try:
            self._told(lambda: self.ports.engine.set_weight(instance, step.weight))
        except ServingError as error:
            self._note_unheard(step, error)
            return
        self.weight[step.instance_id] = step.weight
        if step.weight > 0:  # kept after all
            self.drain_since_s.pop(step.instance_id, None)
            self.drained.discard(step.instance_id)
        self._record(step, f"{step.reason}: weight {step.weight:g}")

    def _drain(self, step: Step, instance: Instance) -> None:
        self._permit()
        now_s = self.ports.clock.monotonic_s()
        first = step.instance_id not in self.drain_since_s
        waited_s = now_s - self.drain_since_s.setdefault(step.instance_id, now_s)
        try:
            empty = self._told(lambda: self.ports.engine.drain(instance))
        except ServingError as error:
            empty = False
            self._note_unheard(step, error)
        if empty or waited_s >= self.policy.drain_timeout_s:
            self.drained.add(step.instance_id)
            self._record(step, "drained" if empty else f"given up after {waited_s:.0f} s, requests are cut off")
        elif first:
            self._record(step, f"{step.reason}: draining")

    def _told(self, call: Callable[[], Answer]) -> Answer:
        """What the gateway answers; ServingError where it fails, at once where it is silent in this round."""
        if self.silent:
            raise ServingError("the gateway kept another call waiting in vain")
        begun_s = self.ports.clock.monotonic_s()
        try:
            return call()
        except ServingError:
            self._note_silence(begun_s)
            raise

    def _note_silence(self, begun_s: float) -> None:
        self.silent = self.silent or self.ports.clock.monotonic_s() - begun_s > _SILENT_S

    def _note_unheard(self, step: Step, error: ServingError) -> None:
        """Say once that the gateway has failed; the next round asks again. What is paid for must not stay for its sake."""
        if (step.action, step.instance_id) not in self.unheard:
            self.unheard.add((step.action, step.instance_id))
            self._record(step, f"again later: {error}")

    def _release_groups(self, todo: Reconciliation) -> None:
        """Once, at the end: a group still in use stays for the next run, it costs nothing."""
        for step in todo.steps:
            if step.action is Action.RELEASE_GROUP:
                self._permit()
                try:
                    gone = self.ports.provisioner.release_group(self.plan.fleet, step.region, step.instance_id)
                except CloudBusyError as error:
                    self._record(step, f"left to the next run: {error}")
                else:
                    self._record(step, "released" if gone else "still in use, left to the next run")

    def _permit(self) -> None:
        left_s = self.ports.guard()
        if left_s < self.ports.provisioner.call_timeout_s:
            raise LeaseLostError(
                f"{left_s:.0f} s of the lease are left, a cloud call may take {self.ports.provisioner.call_timeout_s:g} s",
                where=f"fleet {self.plan.fleet.name}",
                fix="the next run goes on from here; lengthen the lease if this recurs",
            )

    def _patiently(self, call: Callable[[], Answer]) -> Answer:
        """The answer of a read, repeated while the cloud is busy; its CloudBusyError at the deadline."""
        while True:
            try:
                return call()
            except CloudBusyError:
                if self.elapsed_s >= self.policy.deadline_s:
                    raise
                self.busy = True
                self._sleep()

    def _sleep(self) -> None:
        """Until the next round, twice as long after each one that found the cloud busy; then ask for the lease again."""
        self.strikes = self.strikes + 1 if self.busy else 0
        longest_s = max(self.policy.max_backoff_s, self.policy.poll_s)
        self.ports.sleep(min(self.policy.poll_s * 2 ** min(self.strikes, 16), longest_s))
        self._permit()

    def _record(self, step: Step, outcome: str) -> None:
        self.ports.record(
            FleetEvent(
                at=self.ports.clock.now(),
                action=step.action,
                region=step.region,
                instance_id=step.instance_id,
                outcome=outcome,
            )
        )

    def _ended(self, todo: Reconciliation) -> ApplyReport:
        if todo.converged:
            return self.report(ApplyStatus.CONVERGED, "the fleet is the plan")
        if todo.stuck:
            reasons = "; ".join(
                f"{u.count} of {u.wanted.spec.template_id} in {u.wanted.region}: {u.reason}" for u in todo.unmet
            )
            return self.report(ApplyStatus.UNMET, reasons)
        left = "; ".join(f"{step.action} {step.instance_id} {step.due}" for step in todo.steps[:5])
        return self.report(
            ApplyStatus.DEADLINE, f"after {self.elapsed_s:.0f} s {len(todo.steps)} steps are left: {left}"
        )

    def report(self, status: ApplyStatus, reason: str) -> ApplyReport:
        """What has been done so far."""
        lowered: dict[Offer, int] = {}
        for failure in self.failures:
            if any(failure.offer in unmet.offers for unmet in self.unmet):
                lowered[failure.offer] = max(failure.held, lowered.get(failure.offer, 0))
        return ApplyReport(
            status=status,
            reason=reason,
            nodes=tuple(node for node in self.nodes.values() if node.state is not NodeState.GONE),
            foreign=self.foreign,
            failures=tuple(self.failures),
            unmet=self.unmet,
            lowered=lowered,
        )
