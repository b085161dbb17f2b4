"""From the observed fleet and a plan to ordered steps: start new, wait ready, shift weight, drain old, stop. Pure.

Level-triggered: the steps are derived from what is there, never from what an earlier run meant to do, so a run that
died anywhere is continued by the next one. Make before break: an old instance of a model, or one that has lost a node and
goes on, is drained only when all that the plan wants of this model is up, unless a limit leaves no room for old and new
side by side.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Final

from coral_core.cloud.budget import Budget
from coral_core.cloud.fleet_view import Condition, Exhausted, Instance, Signals, gather, holdings, judge
from coral_core.cloud.provisioner import NodeOrder
from coral_core.cloud.steps import Action, Due, ReconcilePolicy, Reconciliation, Step, Unmet
from coral_core.cloud.tags import instance_id
from coral_core.domain.fleet import FleetLimits, FleetPlan, InstanceSpec, Node, NodeTags, Wanted
from coral_core.domain.hardware import Market

_KEEP_FIRST: Final = {Condition.UP: 0, Condition.STARTING: 1}
_REPLACED: Final = {Condition.LEAVING, Condition.DEGRADED}


def reconcile(
    plan: FleetPlan,
    nodes: Sequence[Node],
    *,
    groups: Sequence[tuple[str, str]] = (),
    limits: FleetLimits,
    policy: ReconcilePolicy,
    now: datetime,
    signals: Signals | None = None,
) -> Reconciliation:
    """The ordered steps from `nodes` (all of the fleet, every region) to the plan.

    Never more is started than fits the limits beside all that is held, ending nodes included. `groups` are (region,
    instance id) of placement groups. The plan must have passed `check_plan`.
    """
    return _Diff(plan, nodes, limits=limits, policy=policy, now=now, signals=signals or Signals()).result(groups)


class _Diff:
    """One reconciliation; the methods follow the order of the steps."""

    def __init__(
        self,
        plan: FleetPlan,
        nodes: Sequence[Node],
        *,
        limits: FleetLimits,
        policy: ReconcilePolicy,
        now: datetime,
        signals: Signals,
    ) -> None:
        self.plan, self.policy, self.signals = plan, policy, signals
        self.instances = gather(nodes)
        self.used_ids = {instance.instance_id for instance in self.instances} | signals.burnt
        self.budget = Budget(limits, holdings(nodes))
        self.failed: list[tuple[Instance, str]] = []
        self.condition: dict[str, Condition] = {}
        by_key: dict[tuple[str, str, Market], list[Instance]] = defaultdict(list)
        wanted_of = {_key(wanted): wanted for wanted in plan.wanted}
        for instance in self.instances:
            condition, reason = judge(
                instance,
                signals,
                now=now,
                start_timeout_s=policy.start_timeout_s,
                unready_grace_s=policy.unready_grace_s,
                lost_grace_s=policy.lost_grace_s,
            )
            wanted = wanted_of.get(instance.key)
            if condition is Condition.STARTING and instance.missing:
                hindrance = self._hindrance(instance, wanted)
                if hindrance:
                    condition, reason = Condition.FAILED, hindrance
            self.condition[instance.instance_id] = condition
            if condition is Condition.FAILED:
                self.failed.append((instance, reason))
            elif condition is not Condition.ENDED:
                by_key[instance.key].append(instance)
        self.kept: list[tuple[Wanted, list[Instance]]] = []
        self.surplus: list[Instance] = []
        for wanted in plan.wanted:
            found = sorted(by_key.pop(_key(wanted), []), key=self._keep_rank)
            keep = [i for i in found[: wanted.count] if self.condition[i.instance_id] not in _REPLACED]
            self.kept.append((wanted, keep))
            self.surplus += [instance for instance in found if instance not in keep]
        self.surplus += [instance for instances in by_key.values() for instance in instances]
        self.unmet: list[Unmet] = []
        self.unfinished: set[str] = set()  # models of which something wanted is not up

    def _hindrance(self, instance: Instance, wanted: Wanted | None) -> str:
        """Why the missing nodes of an incomplete instance cannot be added; empty where they can."""
        if wanted is None:
            return "it is incomplete and no longer wanted"
        slots = wanted.spec.slots
        if len(slots) != instance.nodes[0].tags.nodes or any(
            (slots[n.tags.node].config, slots[n.tags.node].stage) != (n.tags.config, n.tags.stage)
            for n in instance.nodes
        ):
            return "it is incomplete and laid out otherwise than its template now says"
        if any(
            self._refused(instance.region, instance.zone, slots[number].config, wanted) for number in instance.missing
        ):
            return "the zone cannot give the rest of its nodes"
        if instance.instance_id in self.signals.burnt:
            return "its token is taken by another request"
        return ""

    def _keep_rank(self, instance: Instance) -> tuple[int, bool, datetime, str]:
        """What to keep first: what is up, then not yet draining, then the older."""
        name = instance.instance_id
        return (
            _KEEP_FIRST.get(self.condition[name], 2),
            name in self.signals.draining,
            instance.launched_at,
            name,
        )

    def result(self, groups: Sequence[tuple[str, str]]) -> Reconciliation:
        stops = list(self._stop_failed())
        starts = list(self._starts())
        at_once = self._in_the_way([step for step in starts if step.due is Due.ROOM])
        waits, weights, drains = list(self._waits()), list(self._weights(at_once)), list(self._drains(at_once))
        return Reconciliation(
            steps=(*stops, *starts, *waits, *weights, *drains, *self._releases(groups)), unmet=tuple(self.unmet)
        )

    def _stop_failed(self) -> Iterator[Step]:
        for instance in self.instances:
            ended = self.condition[instance.instance_id] is Condition.ENDED
            if ended and self.signals.weight.get(instance.instance_id, 0.0) > 0:
                yield _step(Action.WEIGHT, instance, "all its nodes have ended", weight=0.0)
        for instance, reason in self.failed:
            if self.signals.weight.get(instance.instance_id) != 0.0:
                yield _step(Action.WEIGHT, instance, reason, weight=0.0)
            yield _step(Action.STOP, instance, reason, nodes=instance.standing)

    def _starts(self) -> Iterator[Step]:
        """Complete what has begun first, then begin anew, as far as limits and parallelism allow."""
        under_way = 0
        fresh: list[tuple[Wanted, int]] = []
        for wanted, keep in self.kept:
            starting = [i for i in keep if self.condition[i.instance_id] is Condition.STARTING]
            under_way += len(starting)
            if starting or len(keep) < wanted.count:
                self.unfinished.add(wanted.spec.model)
            for instance in starting:
                if instance.missing:
                    orders = self._orders(wanted, instance.instance_id, instance.zone, instance.missing)
                    yield self._start(wanted, orders, f"{len(orders)} of its nodes are missing")
            fresh.append((wanted, wanted.count - len(keep)))
        for wanted, count in fresh:
            for number in range(count):
                if _key(wanted) in self.signals.given_up:
                    reason = "its engines never answered"
                    self.unmet.append(Unmet(wanted=wanted, count=count - number, reason=reason, offers=frozenset()))
                    break
                zone = self._zone(wanted)
                if zone is None:
                    self._note_unmet(wanted, count - number)
                    break
                name = self._fresh_id(wanted, zone)
                orders = self._orders(wanted, name, zone, range(len(wanted.spec.slots)))
                step = self._start(wanted, orders, f"the plan wants {wanted.count}", wait=under_way)
                under_way += step.due is Due.NOW
                yield step

    def _start(self, wanted: Wanted, orders: tuple[NodeOrder, ...], reason: str, *, wait: int = -1) -> Step:
        wish = Counter((o.region, o.tags.config, o.market) for o in orders)
        lack, _ = self.budget.lacks(wish)
        # What has just failed is stopped and counted before its template is tried again.
        failed = any(i.key == _key(wanted) for i, _ in self.failed)
        due = Due.ROOM if lack else Due.TURN if failed or wait >= self.policy.max_starting else Due.NOW
        if due is not Due.ROOM:
            self.budget.take(wish)  # what waits for its turn keeps its room
        return Step(
            action=Action.START,
            instance_id=orders[0].tags.instance_id,
            template_id=wanted.spec.template_id,
            region=wanted.region,
            reason=f"{reason}; waits: {lack}" if lack else reason,
            due=due,
            orders=orders,
        )

    def _zone(self, wanted: Wanted) -> str | None:
        """The best zone that sells every configuration of the template and has refused none of them in this run."""
        configs = list(wanted.spec.combination)
        first, *others = (self.policy.zones.get((wanted.region, config, wanted.market), ()) for config in configs)
        common = [zone for zone in first if all(zone in other for other in others)]
        return next(
            (z for z in common if not any(self._refused(wanted.region, z, config, wanted) for config in configs)), None
        )

    def _refused(self, region: str, zone: str, config: str, wanted: Wanted) -> bool:
        return any(
            Exhausted(region=region, zone=place, config=config, market=wanted.market) in self.signals.exhausted
            for place in (zone, None)
        )

    def _note_unmet(self, wanted: Wanted, count: int) -> None:
        offers = frozenset(
            (wanted.region, config, wanted.market)
            for config in wanted.spec.combination
            if any(
                (e.region, e.config, e.market) == (wanted.region, config, wanted.market) for e in self.signals.exhausted
            )
        )
        named = ", ".join(sorted(config for _, config, _ in offers))
        reason = f"refused in every zone: {named}" if offers else "no zone is known to offer all of its nodes"
        self.unmet.append(Unmet(wanted=wanted, count=count, reason=reason, offers=offers))

    def _fresh_id(self, wanted: Wanted, zone: str) -> str:
        ordinal = 0
        while True:
            name = instance_id(
                self.plan.fleet,
                plan_id=self.plan.plan_id,
                template_id=wanted.spec.template_id,
                region=wanted.region,
                zone=zone,
                market=wanted.market,
                ordinal=ordinal,
            )
            if name not in self.used_ids:
                self.used_ids.add(name)
                return name
            ordinal += 1

    def _orders(self, wanted: Wanted, name: str, zone: str, numbers: Sequence[int]) -> tuple[NodeOrder, ...]:
        tags = _node_tags(wanted.spec, name, self.plan.epoch)
        return tuple(
            NodeOrder(region=wanted.region, zone=zone, market=wanted.market, tags=tags[number]) for number in numbers
        )

    def _waits(self) -> Iterator[Step]:
        for _, keep in self.kept:
            for instance in keep:
                if self.condition[instance.instance_id] is Condition.STARTING and not instance.missing:
                    yield _step(Action.WAIT, instance, "its engine must answer", due=Due.ENGINE)

    def _weights(self, at_once: Collection[str]) -> Iterator[Step]:
        """What serves and stays for now gets its full weight, of a degraded one too: the gateway knows what is left of it."""
        going_on = [i for i in self.surplus if self.condition[i.instance_id] is Condition.DEGRADED]
        for wanted, keep in self.kept:
            weight = wanted.spec.throughput
            up = [i for i in keep if self.condition[i.instance_id] is Condition.UP]
            up += [i for i in going_on if i.key == _key(wanted) and not self._may_go(i, at_once)]
            for instance in up:
                if self.signals.weight.get(instance.instance_id) != weight:
                    reason = "it goes on with less" if instance in going_on else "it is up"
                    yield _step(Action.WEIGHT, instance, reason, weight=weight)

    def _may_go(self, instance: Instance, at_once: Collection[str]) -> bool:
        """Whether a surplus instance is to be drained now."""
        leaving = self.condition[instance.instance_id] is Condition.LEAVING
        return leaving or instance.instance_id in at_once or instance.model not in self.unfinished

    def _drains(self, at_once: Collection[str]) -> Iterator[Step]:
        """Take surplus instances out after their replacement is up.

        At once: those the cloud takes back, as many as a limit demands, and all of a model that is wanted no more.
        """
        under_way = 0
        wanted = {wanted.spec.model for wanted in self.plan.wanted if wanted.count}
        for instance in sorted(self.surplus, key=lambda i: (i.instance_id not in self.signals.draining, i.launched_at)):
            name = instance.instance_id
            leaving = self.condition[name] is Condition.LEAVING
            due = Due.NOW if self._may_go(instance, at_once) else Due.REPLACEMENT
            if due is Due.NOW and not leaving and instance.model in wanted and name not in self.signals.drained:
                under_way += 1
                due = Due.TURN if under_way > self.policy.max_draining else due
            reason = (
                "the cloud takes a node back"
                if leaving
                else "a limit leaves no room beside it"
                if name in at_once
                else "it has lost a node"
                if self.condition[name] is Condition.DEGRADED
                else "the plan does not want it"
            )
            if name not in self.signals.drained:
                if self.signals.weight.get(name) != 0.0:
                    yield _step(Action.WEIGHT, instance, reason, due=due, weight=0.0)
                yield _step(Action.DRAIN, instance, reason, due=due)
                due = Due.DRAINED
            yield _step(Action.STOP, instance, reason, due=due, nodes=instance.standing)

    def _in_the_way(self, blocked: Sequence[Step]) -> set[str]:
        """The fewest surplus instances whose end makes room for the starts that a limit blocks: first those that go anyway."""
        room = self.budget.copy()
        for instance in self.instances:
            ending = {node.node_id for node in instance.nodes} - {node.node_id for node in instance.standing}
            failed = self.condition[instance.instance_id] is Condition.FAILED
            room.free(node for node in instance.nodes if failed or node.node_id in ending)
        chosen: set[str] = set()
        draining = self.signals.draining
        victims = sorted(self.surplus, key=lambda i: (not self._may_go(i, draining), i.launched_at))
        for step in blocked:
            wish = Counter((o.region, o.tags.config, o.market) for o in step.orders)
            for victim in victims:
                lack, helpful = room.lacks(wish)
                if not lack:
                    break
                offers = holdings(victim.standing).keys()
                if victim.instance_id not in chosen and (helpful is None or offers & helpful):
                    chosen.add(victim.instance_id)
                    room.free(victim.standing)
            room.take(wish)
        return chosen

    def _releases(self, groups: Sequence[tuple[str, str]]) -> Iterator[Step]:
        """Placement groups whose instance is not there, or has wholly ended."""
        present = {i.instance_id for i in self.instances if self.condition[i.instance_id] is not Condition.ENDED}
        for region, name in groups:
            if name not in present:
                yield Step(
                    action=Action.RELEASE_GROUP,
                    instance_id=name,
                    template_id="",
                    region=region,
                    reason="no node of its instance is left",
                )


def _step(
    action: Action,
    instance: Instance,
    reason: str,
    *,
    due: Due = Due.NOW,
    nodes: tuple[Node, ...] = (),
    weight: float = 0.0,
) -> Step:
    return Step(
        action=action,
        instance_id=instance.instance_id,
        template_id=instance.template_id,
        region=instance.region,
        reason=reason,
        due=due,
        nodes=nodes,
        weight=weight,
        instance=instance,
    )


def _key(wanted: Wanted) -> tuple[str, str, Market]:
    return (wanted.spec.template_id, wanted.region, wanted.market)


def _node_tags(spec: InstanceSpec, name: str, epoch: int) -> tuple[NodeTags, ...]:
    return tuple(
        NodeTags(
            instance_id=name,
            template_id=spec.template_id,
            model=spec.model,
            phase=spec.phase,
            config=slot.config,
            stage=slot.stage,
            node=number,
            nodes=len(spec.slots),
            epoch=epoch,
        )
        for number, slot in enumerate(spec.slots)
    )
