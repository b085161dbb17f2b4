"""All serving instances as their agents and the gateway say they are, and what is to be done: no clock, no I/O.

Level-triggered: after every word heard, `_consider` looks at what is there and says what is missing; what was said and
did not take effect is said again. An instance fails as a whole:

    a node says that its engine failed, or runs something else, or nothing any more
    a node's agent is lost (not heard of for `lost_s`, or gone) while the instance runs, and there is no evidence that the
    engine works: for the node that serves that the gateway's newest probe was answered, for another that tokens have come
    since it was heard of; such evidence holds for `unheard_grace_s`. One that starts has that grace in any case

An engine that can go on without a node says so through the node that serves: within `word_s` of another node's trouble it
names that node, and the instance is degraded, not failed; a node that it does not name by then condemns the instance.

A coordinator that starts knows nothing, or what its predecessor wrote down. Agents say what they run, and it takes that over:
a restart fails nothing by itself, and those who do not come within `lost_s` are lost from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coral_core.domain.fleet import INSTANCE_NAME
from coral_core.domain.launch import LaunchPlan
from coral_core.serving.control.held import (
    AskPlan,
    ControlTerms,
    Effect,
    GatewayRow,
    Happened,
    Held,
    Seat,
    Stage,
    Tell,
)
from coral_core.serving.control.messages import (
    MOST_INSTANCES,
    MOST_NODES,
    Acknowledged,
    Drain,
    Hello,
    Launch,
    NodeReport,
    NodeState,
    Refused,
    Stop,
    Welcome,
    WhoAreYou,
    launch_id,
    shortened,
)
from coral_core.serving.control.troubles import engine_share, engine_trouble, runs


class Instances:
    """The state machine. Every method takes the time and returns what is to be done."""

    def __init__(self, terms: ControlTerms, *, name: str, held: Iterable[Held] = (), gateway: bool = True) -> None:
        """`name` of this coordinator, new at every start; `held`: what the last one wrote down; `gateway`: there is one."""
        self.terms = terms
        self._gateway = gateway
        self.name = name
        self.held = {one.instance_id: one for one in held}
        self._seat_of: dict[bytes, tuple[str, int]] = {}
        self._rows: dict[str, GatewayRow] = {}
        self._rows_s = float("-inf")
        self._awake_s = float("-inf")

    def hello(self, connection: bytes, key_name: str, hello: Hello, now_s: float) -> list[Effect]:
        """An agent registers, for the first time or again."""
        self._wake(now_s)
        tags = hello.tags
        if not 0 <= tags.node < tags.nodes <= MOST_NODES:
            return [_refusal(connection, f"node {tags.node} of {tags.nodes} is none")]
        if not INSTANCE_NAME.fullmatch(
            tags.instance_id
        ):  # the gateway would not have it, and nobody could use its engine
            return [
                _refusal(
                    connection, f"{tags.instance_id[:200]!r} is no name of an instance", fix="letters, digits, ._-"
                )
            ]
        one = self.held.get(tags.instance_id)
        if one is None:
            if len(self.held) >= MOST_INSTANCES:
                return [_refusal(connection, f"{MOST_INSTANCES} instances are known already")]
            one = self.held[tags.instance_id] = Held(
                instance_id=tags.instance_id,
                template_id=tags.template_id,
                model=tags.model,
                phase=tags.phase,
                nodes=tags.nodes,
                epoch=tags.epoch,
                region=hello.region,
                first_s=now_s,
                since_s=now_s,
            )
        if not one.fits(tags, hello.region):
            return [_refusal(connection, f"the other nodes of {tags.instance_id} say that it is something else")]
        seat = one.seats.get(tags.node)
        if seat is not None and (against := self._against(seat, hello, now_s)):
            return [_refusal(connection, f"node {tags.node} of {tags.instance_id} is {against}")]
        effects: list[Effect] = []
        if seat is not None and seat.connection != connection:
            self._seat_of.pop(seat.connection, None)
            if seat.hello.agent_epoch != hello.agent_epoch:
                effects.append(_refusal(seat.connection, f"a younger agent speaks for node {tags.node}"))
        one.seats[tags.node] = Seat(
            hello=hello, connection=connection, key_name=key_name, heard_s=now_s, report=hello.report
        )
        self._seat_of[connection] = (tags.instance_id, tags.node)
        if not one.stage.over:
            self._adopt(one)
        effects.append(Tell(connection=connection, message=Welcome(coordinator=self.name, draining=one.draining)))
        return [*effects, *self._consider(one, now_s)]

    def heartbeat(self, connection: bytes, report: NodeReport, now_s: float) -> list[Effect]:
        """An agent says how its node is."""
        self._wake(now_s)
        found = self._seat_of.get(connection)
        if found is None:
            return [Tell(connection=connection, message=WhoAreYou())]
        one = self.held[found[0]]
        seat = one.seats[found[1]]
        seat.heard_s, seat.report, seat.gone = now_s, report, False
        return [Tell(connection=connection, message=Acknowledged()), *self._consider(one, now_s)]

    def bye(self, connection: bytes, now_s: float) -> list[Effect]:
        """An agent has ended."""
        self._wake(now_s)
        found = self._seat_of.pop(connection, None)
        if found is None:
            return []
        one = self.held[found[0]]
        one.seats[found[1]].gone = True
        return self._consider(one, now_s)

    def key_withdrawn(self, connection: bytes) -> list[Effect]:
        """An agent whose key is not let in any more is not listened to; its node is lost in time."""
        self._seat_of.pop(connection, None)
        return [_refusal(connection, "its key is not let in any more", fix="give the node a key that is")]

    def planned(self, instance_id: str, found: LaunchPlan | str, now_s: float) -> list[Effect]:
        """What an instance shall run, or why that cannot be said."""
        self._wake(now_s)
        one = self.held.get(instance_id)
        if one is None or one.stage.over or one.plan is not None:
            return []
        if isinstance(found, str):
            return self._over(one, Stage.FAILED, f"cannot be launched: {found}", now_s)
        if len(found.nodes) != one.nodes or {n.node for n in found.nodes} != {str(i) for i in range(one.nodes)}:
            return self._over(one, Stage.FAILED, "cannot be launched: its launch plan has other nodes", now_s)
        told = launch_id(found)
        if one.launch_id and one.launch_id != told:
            return self._over(one, Stage.FAILED, "its nodes run something else than they should now", now_s)
        one.plan, one.launch_id, one.url = found, told, found.url
        return self._consider(one, now_s)

    def gateway_says(self, rows: Sequence[GatewayRow], now_s: float) -> list[Effect]:
        """What the gateway has. Weights and draining are remembered, since it forgets them when it restarts."""
        self._wake(now_s)
        self._rows, self._rows_s = {row.name: row for row in rows}, now_s
        self._forget(one for one in self.held.values() if not one.is_row(self._rows.get(one.instance_id)))
        effects: list[Effect] = []
        for one in self.held.values():
            row = self._rows.get(one.instance_id)
            if row is None or row.url != one.address:
                continue
            if row.failed and one.stage in {
                Stage.GATHERING,
                Stage.STARTING,
            }:  # a coordinator before this one gave it up
                effects += self._over(one, Stage.FAILED, row.failed, now_s)
                continue
            if (row.draining, row.weight) != (one.draining, one.weight):
                one.draining, one.weight = row.draining, row.weight
                for seat in one.seats.values():
                    seat.told.pop("drain", None)
            effects += self._consider(one, now_s)
        return effects

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed."""
        self._wake(now_s)
        effects = [effect for one in self.held.values() for effect in self._consider(one, now_s)]
        for one in self.held.values():
            one.forgettable = self._forgettable(one, now_s)
        if not self._gateway:
            self._forget(self.held.values())
        return effects

    def _forget(self, known: Iterable[Held]) -> None:
        """Those of these that are to be forgotten."""
        for one in [one for one in known if one.forgettable]:
            self._unseat(one, list(one.seats))
            del self.held[one.instance_id]

    def _wake(self, now_s: float) -> None:
        """What this process itself slept through is nobody's silence: called first with every word, and with every tick."""
        if now_s - self._awake_s > self.terms.lost_s / 2:
            for one in self.held.values():
                one.first_s = now_s
                one.troubled_s = {}
                for seat in one.seats.values():
                    seat.heard_s = now_s
        self._awake_s = now_s

    def _unseat(self, one: Held, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._seat_of.pop(one.seats.pop(number).connection, None)

    def _against(self, seat: Seat, hello: Hello, now_s: float) -> str:
        """Why an agent may not take a seat; empty where it may."""
        if seat.lost(now_s, self.terms):
            return ""
        if seat.hello.node_id != hello.node_id:
            return f"{seat.hello.node_id}, whose agent is alive"
        return "spoken for by a younger agent" if hello.agent_epoch < seat.hello.agent_epoch else ""

    def _consider(self, one: Held, now_s: float) -> list[Effect]:
        if one.stage.over:
            return self._end_engines(one, now_s)
        self._adopt(one)
        effects = self._note_share(one)
        if trouble := self._trouble(one, now_s):
            return [*effects, *self._over(one, Stage.FAILED, trouble, now_s)]
        effects += [*self._end_lost(one, now_s), *self._pass_on(one, now_s)]
        if any(seat.report.leaving for seat in one.working.values()):
            return [*effects, *self._leave(one, now_s)]
        if not one.launch_id:
            self._unseat(one, [number for number, seat in one.seats.items() if seat.lost(now_s, self.terms)])
        # A lost node does not come back: what comes in its place runs nothing.
        effects += self._launch(one, now_s) if one.complete and not one.lost_nodes else []
        return [*effects, *self._note_ready(one, now_s)]

    def _adopt(self, one: Held) -> None:
        """Take over what the nodes say they run, where this coordinator does not know."""
        for seat in one.seats.values():
            report = seat.report
            if report.launch_id and not one.launch_id:
                one.launch_id = report.launch_id
            if report.launch_id == one.launch_id and report.serves and report.url and not one.url:
                one.url = report.url
            if report.launch_id == one.launch_id and report.weight is not None and one.weight is None:
                one.draining, one.weight = report.draining, report.weight

    def _pass_on(self, one: Held, now_s: float) -> list[Effect]:
        """Tell agents what the gateway has: should gateway and coordinator forget it, they remember it."""
        told = Drain(draining=one.draining, weight=one.weight)
        return [
            effect
            for seat in one.seats.values()
            if one.weight is not None and not seat.lost(now_s, self.terms)
            if (seat.report.draining, seat.report.weight) != (told.draining, told.weight)
            for effect in self._tell(seat, "drain", told, now_s)
        ]

    def _note_share(self, one: Held) -> list[Effect]:
        """What is left of an engine that goes on without some nodes, as the node that serves says."""
        found = engine_share(one)
        if found is None:
            return []
        number, share, lost_nodes = found
        # Its own node may have lost its part of the work: its agent still attends to the engine.
        others = {str(other) for other in range(one.nodes)} - {str(number)}
        lost = {name: why for name, why in lost_nodes.items() if name in others}
        if (share, lost) == (one.weight_frac, one.lost_nodes):
            return []
        one.weight_frac, one.lost_nodes = share, lost
        if not share or not lost_nodes:
            return []
        why = "; ".join(f"node {name}: {why}" for name, why in sorted(lost_nodes.items()))
        one.reason = shortened(f"degraded, {share:.0%} of its throughput is left: {why}", 1000)
        return [Happened(event="degraded", instance_id=one.instance_id, detail=one.reason)]

    def _end_lost(self, one: Held, now_s: float) -> list[Effect]:
        """End what is left on nodes that the engine goes on without."""
        return [
            effect
            for number, seat in one.seats.items()
            if (why := one.lost_nodes.get(str(number))) is not None
            if runs(seat) and not seat.lost(now_s, self.terms)
            for effect in self._tell(seat, "stop", Stop(reason=shortened(f"its engine has lost it: {why}")), now_s)
        ]

    def _trouble(self, one: Held, now_s: float) -> str:
        """What condemns an instance whole; empty where nothing does (yet)."""
        found = {
            number: trouble
            for number, seat in sorted(one.seats.items())
            if (trouble := engine_trouble(one, seat.report))
        }
        if one.launch_id and one.stage is not Stage.LEAVING:
            for number in range(one.nodes):
                if number not in found and (trouble := self._silence(one, number, now_s)):
                    found[number] = trouble
        one.troubled_s = {number: one.troubled_s.get(number, now_s) for number in found}
        condemning = (
            f"node {number}: {trouble}"
            for number, trouble in found.items()
            if str(number) not in one.lost_nodes and not self._word_may_come(one, number, now_s)
        )
        return next(condemning, "")

    def _word_may_come(self, one: Held, number: int, now_s: float) -> bool:
        """Whether the engine may yet say that it goes on without this node, or has not been heard since a restart of ours."""
        found, seat = engine_share(one), one.seats.get(number)
        if found is None:
            may_come = seat is not None and not seat.report.serves and len(one.seats) < one.nodes
        else:
            may_come = found[0] != number and not one.seats[found[0]].lost(now_s, self.terms)
        return may_come and now_s - one.troubled_s[number] <= self.terms.word_s

    def _silence(self, one: Held, number: int, now_s: float) -> str:
        """Why the silence of a node's agent condemns the instance; empty where it does not (yet)."""
        seat = one.seats.get(number)
        if seat is not None and seat.gone:
            return "its agent has ended"
        heard_s = one.first_s if seat is None else seat.heard_s
        silent_s = now_s - heard_s
        if silent_s <= self.terms.lost_s:
            return ""
        late = silent_s > self.terms.lost_s + self.terms.unheard_grace_s
        # One that starts loads a machine as never again, and nobody waits for it yet.
        if not late and (one.stage is not Stage.READY or self._works_without(one, number, heard_s, now_s)):
            return ""
        return f"its agent has not been heard of for {silent_s:.0f} s"

    def _works_without(self, one: Held, number: int, heard_s: float, now_s: float) -> bool:
        """Whether there is evidence that the engine works though the agent of a node is silent."""
        seat = one.seats.get(number)
        if one.nodes == 1 or (seat is not None and seat.report.serves):
            row = self._rows.get(one.instance_id)
            return row is not None and row.answers and now_s - self._rows_s <= self.terms.rows_s
        serving = next((s for s in one.seats.values() if s.report.serves), None)
        sample = serving.report.sample if serving is not None and not serving.lost(now_s, self.terms) else None
        if serving is None or sample is None or sample.progress_age_s is None:
            return False
        return serving.heard_s - sample.progress_age_s > heard_s

    def _launch(self, one: Held, now_s: float) -> list[Effect]:
        """Ask for the plan, then start the nodes in its order, each once the one before it has begun."""
        told = [seat for seat in one.seats.values() if seat.report.launch_id]
        if one.plan is None:
            if len(told) == one.nodes or (one.asked_s is not None and now_s - one.asked_s < 10 * self.terms.resend_s):
                return []
            one.asked_s = now_s
            question = AskPlan(
                instance_id=one.instance_id,
                template_id=one.template_id,
                model=one.model,
                phase=one.phase,
                places=one.places,
            )
            return [question]
        effects: list[Effect] = []
        if one.stage is Stage.GATHERING:
            effects.append(self._enter(one, Stage.STARTING, f"all of its {one.nodes} nodes are there", now_s))
        for node in one.plan.nodes:
            seat = one.seats[int(node.node)]
            if not seat.report.launch_id:
                message = Launch(launch_id=one.launch_id, url=one.url, launch=node)
                return [*effects, *self._tell(seat, "launch", message, now_s)]
        return effects

    def _note_ready(self, one: Held, now_s: float) -> list[Effect]:
        """Ready once the node that serves has seen a real completion and every other runs."""
        if one.stage not in {Stage.GATHERING, Stage.STARTING} or not one.launch_id:
            return []
        reports = [seat.report for seat in one.working.values()]
        there = len(reports) + len(one.lost_nodes) == one.nodes and not any(seat.gone for seat in one.working.values())
        if not there or any(report.launch_id != one.launch_id for report in reports):
            return []
        if not one.url or not any(report.serves and report.state is NodeState.READY for report in reports):
            return []
        return [self._enter(one, Stage.READY, f"answers on {one.url}", now_s)]

    def _leave(self, one: Held, now_s: float) -> list[Effect]:
        """Let requests run out (the gateway drains it), then end what is left of it."""
        if one.stage is not Stage.READY and one.stage is not Stage.LEAVING:
            return self._over(one, Stage.ENDED, "its agent was told to end before it served", now_s)
        effects: list[Effect] = []
        if one.stage is Stage.READY:
            effects.append(self._enter(one, Stage.LEAVING, "its agent was told to end", now_s))
        row = self._rows.get(one.instance_id)
        unused = row is None or row.url != one.url or (row.draining and row.in_flight == 0)
        empty = unused and now_s - self._rows_s <= self.terms.rows_s
        out_of_patience = any(
            seat.report.leaving and (not seat.report.alive or seat.lost(now_s, self.terms))
            for seat in one.working.values()
        )
        if empty or out_of_patience:
            return [*effects, *self._over(one, Stage.ENDED, "its agent was told to end", now_s)]
        return effects

    def _end_engines(self, one: Held, now_s: float) -> list[Effect]:
        return [
            effect
            for seat in one.seats.values()
            if runs(seat)
            for effect in self._tell(seat, "stop", Stop(reason=shortened(one.reason)), now_s)
        ]

    def _over(self, one: Held, stage: Stage, reason: str, now_s: float) -> list[Effect]:
        return [self._enter(one, stage, reason, now_s), *self._end_engines(one, now_s)]

    def _enter(self, one: Held, stage: Stage, reason: str, now_s: float) -> Happened:
        one.stage, one.reason, one.since_s = stage, shortened(reason, 1000), now_s
        return Happened(event=stage.value, instance_id=one.instance_id, detail=one.reason)

    def _tell(self, seat: Seat, what: str, message: Launch | Stop | Drain, now_s: float) -> list[Effect]:
        """Say it, unless it was said a moment ago."""
        if now_s - seat.told.get(what, float("-inf")) < self.terms.resend_s:
            return []
        seat.told[what] = now_s
        return [Tell(connection=seat.connection, message=message)]

    def _forgettable(self, one: Held, now_s: float) -> bool:
        """Over, or never begun, and nobody speaks for it any more."""
        silent = all(seat.lost(now_s, self.terms) for seat in one.seats.values())
        idle = one.stage is Stage.GATHERING and not one.launch_id and not one.seats
        return silent and (one.stage.over or idle) and now_s - one.since_s > self.terms.forget_s


def _refusal(connection: bytes, reason: str, *, fix: str = "") -> Tell:
    return Tell(connection=connection, message=Refused(reason=shortened(reason), fix=fix))
