"""The coordinator as a process: agents on one side, the gateway on the other, the state machine between them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from coral_core.clock import Clock
from coral_core.domain.launch import LaunchPlan
from coral_core.errors import CoralError, ServingError, StoreUnreachableError
from coral_core.serving.control.curve import AllowedKeys, KeyPair
from coral_core.serving.control.gateway_calls import gateway_calls
from coral_core.serving.control.gateway_side import GatewaySide, RejectedError
from coral_core.serving.control.held import AskPlan, ControlTerms, Effect, GatewayCall, Happened, Held, Tell
from coral_core.serving.control.instances import Instances
from coral_core.serving.control.messages import (
    Bye,
    GarbageError,
    Heartbeat,
    Hello,
    OtherVersionError,
    Refused,
    framed,
    from_agent,
)
from coral_core.serving.control.say import Say
from coral_core.serving.control.state_file import (
    NoStateError,
    alone_in,
    read_state,
    restored,
    state_document,
    write_state,
)
from coral_core.serving.control.wire import CoordinatorEnd, Received
from coral_core.serving.sparing_log import spare

_log = logging.getLogger(__name__)
spare(__name__)
_TICK_S: Final = 0.25
_SYNC_S: Final = 1.0
_WRITE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPlan:
    """All that a coordinator is made of. `launch` says what an instance's nodes shall run, or raises CoralError.

    StoreUnreachableError: it cannot say now; any other one fails the instance.
    `gateway_url` empty: nobody routes requests to its instances.
    """

    host: str
    port: int
    pair: KeyPair
    allowed: AllowedKeys
    gateway_url: str
    gateway_token: str
    folder: Path
    terms: ControlTerms
    launch: Callable[[AskPlan], LaunchPlan]


async def coordinate(
    plan: CoordinatorPlan,
    clock: Clock,
    *,
    stop: asyncio.Event,
    say: Say,
    started: Callable[[str], object] = lambda _: None,
) -> None:
    """Coordinate until `stop` is set. Engines and agents are left as they are: the next coordinator takes them over.

    `started` is called with the endpoint. Raises ServingError where the address cannot be had, or another has the folder.
    """
    with alone_in(plan.folder, "coordinator"):
        end = CoordinatorEnd(plan.host, plan.port, plan.pair, plan.allowed)
        try:
            async with aiohttp.ClientSession() as session:
                gateway = GatewaySide(session, url=plan.gateway_url, token=plan.gateway_token)
                at_work = _Coordinator(plan, clock, end, gateway, say)
                started(end.endpoint)
                await at_work.run(stop)
        finally:
            end.close()


class _Coordinator:
    def __init__(
        self, plan: CoordinatorPlan, clock: Clock, end: CoordinatorEnd, gateway: GatewaySide, say: Say
    ) -> None:
        self.plan, self.clock, self.end, self.gateway, self.say = plan, clock, end, gateway, say
        self.instances = Instances(
            plan.terms, name=uuid.uuid4().hex[:12], held=self._remembered(), gateway=bool(plan.gateway_url)
        )
        self.counts: Counter[str] = Counter()
        self.gateway_trouble = self.state_trouble = ""
        self.changed, self.unwritten = asyncio.Event(), asyncio.Event()
        self.asking: set[asyncio.Task[None]] = set()

    def _remembered(self) -> list[Held]:
        try:
            return restored(read_state(self.plan.folder), self.clock.monotonic_s())
        except NoStateError:
            self.say("note", f"the first start in {self.plan.folder}: nothing to take over", reason="")
            return []
        except ServingError as error:
            self.say("note", f"starting without a state: {error}", reason=str(error))
            return []

    async def run(self, stop: asyncio.Event) -> None:
        ended = asyncio.create_task(stop.wait())
        steps = [self._listen, self._tick, self._keep_state, *([self._keep_gateway] if self.plan.gateway_url else [])]
        work = [asyncio.create_task(step()) for step in steps]
        try:
            await asyncio.wait([ended, *work], return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
        finally:
            await _end([ended, *work, *self.asking])
            self._write()

    # ------------------------------------------------------------------ agents

    async def _listen(self) -> None:
        while True:
            received = await self.end.receive(1.0)
            if received is None:
                continue
            try:
                self._carry_out(self._heard(received))
            except Exception:  # noqa: BLE001 - logged whole; what one agent says must not take the others' coordinator away
                _log.exception("a message could not be dealt with because of a bug")
                self.counts["bugs"] += 1

    def _heard(self, received: Received) -> list[Effect]:
        """What one message leads to; what is none is counted and dropped."""
        now_s = self.clock.monotonic_s()
        name = self.plan.allowed.name_of(received.key)
        if name is None:
            self.counts["withdrawn_keys"] += 1
            return self.instances.key_withdrawn(received.connection)
        try:
            message = from_agent(received.frames)
        except GarbageError:
            self.counts["garbage"] += 1
            return []
        except OtherVersionError as error:
            self.counts["other_versions"] += 1
            fix = "install the same version of coral-serve on nodes and control machine"
            return [Tell(connection=received.connection, message=Refused(reason=str(error), fix=fix))]
        match message:
            case Hello():
                return self.instances.hello(received.connection, name, message, now_s)
            case Heartbeat():
                return self.instances.heartbeat(received.connection, message.report, now_s)
            case Bye():
                return self.instances.bye(received.connection, now_s)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._carry_out(self.instances.tick(self.clock.monotonic_s()))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell():
                    self.counts["refused"] += isinstance(effect.message, Refused)
                    self.end.send(effect.connection, framed(effect.message))
                case AskPlan():
                    task = asyncio.create_task(self._ask(effect))
                    self.asking.add(task)
                    task.add_done_callback(self.asking.discard)
                case Happened():
                    self.changed.set()
                    self.unwritten.set()
                    text = f"{effect.instance_id}: {effect.event}: {effect.detail}"
                    self.say(effect.event, text, instance=effect.instance_id, detail=effect.detail)

    async def _ask(self, question: AskPlan) -> None:
        found: LaunchPlan | str
        try:
            found = await asyncio.to_thread(self.plan.launch, question)
        except StoreUnreachableError as error:  # asked again in a while, as whatever was not answered
            text = f"{question.instance_id}: no launch plan yet: {error}"
            self.say("note", text, instance=question.instance_id, reason=str(error))
            return
        except CoralError as error:
            found = str(error)
        except Exception as error:  # noqa: BLE001 - logged whole; the instance fails with it, the others do not
            _log.exception("no launch plan for %s because of a bug", question.instance_id)
            found = f"a bug: {error!r}"
        self._carry_out(self.instances.planned(question.instance_id, found, self.clock.monotonic_s()))

    # ------------------------------------------------------------------ the gateway

    async def _keep_gateway(self) -> None:
        """See what it has and put it right, every second and whenever an instance's stage has changed."""
        while True:
            self.changed.clear()
            trouble = ""
            try:
                await self._sync()
            except ServingError as error:
                trouble = str(error)
            if trouble != self.gateway_trouble:
                self.gateway_trouble = trouble
                self.say("gateway", trouble or "the gateway answers again", trouble=trouble)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _SYNC_S)

    async def _sync(self) -> None:
        rows = await self.gateway.rows()
        self._carry_out(self.instances.gateway_says(rows, self.clock.monotonic_s()))
        by_name = {row.name: row for row in rows}
        for one in list(self.instances.held.values()):
            for call in gateway_calls([one], by_name):
                if not await self._call(call, one):
                    break  # what follows builds on it, and would be refused for lack of it

    async def _call(self, call: GatewayCall, one: Held) -> bool:
        """Make a call; False where the gateway will not have it, which is told once. Raises ServingError where it does not answer."""
        try:
            await self.gateway.call(call)
        except RejectedError as error:
            if one.rejected != str(error):
                one.rejected = str(error)
                self.say("rejected", f"{one.instance_id}: {error}", instance=one.instance_id, reason=str(error))
            return False
        one.rejected = ""
        return True

    # ------------------------------------------------------------------ what is written down

    async def _keep_state(self) -> None:
        while True:
            self.unwritten.clear()
            self._write()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.unwritten.wait(), _WRITE_S)

    def _write(self) -> None:
        document = state_document(
            self.instances.held.values(),
            name=self.instances.name,
            endpoint=self.end.endpoint,
            now=self.clock.now(),
            now_s=self.clock.monotonic_s(),
            counts={
                "refused_keys": self.end.refused_keys,
                "dropped_messages": self.end.dropped,
                **{
                    name: self.counts[name]
                    for name in ("withdrawn_keys", "garbage", "other_versions", "refused", "bugs")
                },
                "agents_file_trouble": self.plan.allowed.trouble,
                "gateway_trouble": self.gateway_trouble,
            },
        )
        trouble = ""
        try:
            write_state(self.plan.folder, document)
        except ServingError as error:
            trouble = str(error)
        if trouble != self.state_trouble:
            self.state_trouble = trouble
            self.say("note", trouble or "the state is written down again", reason=trouble)


async def _end(tasks: Iterable[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
