"""A node's agent: registers, runs what it is told to, says how it is. Without its coordinator it serves on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coral_core.clock import Clock, ListeningClock
from coral_core.errors import CoralError, InputError
from coral_core.serving.control.curve import KeyPair
from coral_core.serving.control.messages import (
    Acknowledged,
    Bye,
    CoordinatorMessage,
    Drain,
    GarbageError,
    Heartbeat,
    Hello,
    Launch,
    NodeReport,
    NodeState,
    OtherVersionError,
    Refused,
    Stop,
    Welcome,
    WhoAreYou,
    framed,
    from_coordinator,
    last_lines,
    shortened,
)
from coral_core.serving.control.runner import NodeRunner, RunnerReport
from coral_core.serving.control.say import Say
from coral_core.serving.control.wire import AgentEnd, read_matching

_LOOK_S: Final = 0.1
_HELLO_S: Final = 1.0
_REFUSED_S: Final = 5.0
_LOST_S: Final = 10.0
_BYE_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTerms:
    """`heartbeat_s` (at most 2); `drain_s`: how long requests may run out; `stop_grace_s`: before an engine is killed."""

    heartbeat_s: float = 1.0
    drain_s: float = 120.0
    stop_grace_s: float = 20.0


@dataclass(slots=True, kw_only=True)
class Ending:
    """How an agent is told to end: `asked` lets requests run out first, `at_once` does not."""

    asked: asyncio.Event
    at_once: asyncio.Event


async def attend(
    hello: Hello,
    runner: NodeRunner,
    *,
    endpoint: str,
    keys_file: Path,
    terms: AgentTerms,
    clock: Clock,
    ending: Ending,
    say: Say,
    started: Callable[[], object] = lambda: None,
) -> None:
    """Attend to a node until told to end; then its engine has ended too, whatever happens.

    `hello` says who the node is (its report is filled in). Raises InputError for keys that are none.
    """
    pair = agent_keys(keys_file)
    await asyncio.to_thread(runner.recover)
    agent = _Agent(hello, runner, terms, clock, say)
    started()
    try:
        await agent.run(endpoint, keys_file, pair, ending)
    finally:
        await asyncio.to_thread(runner.stop, terms.stop_grace_s)


def agent_keys(path: Path) -> KeyPair:
    """An agent's keys. Raises InputError for a file that lacks the coordinator's public key, as for any that is wrong."""
    pair = read_matching(path)
    if not pair.server:
        raise InputError("lacks `server`, the coordinator's public key", where=str(path), fix="coral keys new agent")
    return pair


class _Agent:
    def __init__(self, hello: Hello, runner: NodeRunner, terms: AgentTerms, clock: Clock, say: Say) -> None:
        self.hello, self.runner, self.terms, self.say = hello, runner, terms, say
        self.listened_s = ListeningClock(clock.monotonic_s)
        self.launch: Launch | None = None
        self.broken = ""  # why the launch could not even be tried
        self.draining = self.leaving = False
        self.weight: float | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.welcome = False
        self.next_hello_s = 0.0
        self.heard_s = self.listened_s()
        self.lost_said = False
        self.refusal = ""

    async def run(self, endpoint: str, keys_file: Path, pair: KeyPair, ending: Ending) -> None:
        """Say hello until welcome, then beat; obey in between."""
        stamp = _stamp(keys_file)
        end = AgentEnd(endpoint, pair)
        told: NodeReport | None = None
        beat_s = 0.0
        give_up_s = float("inf")
        try:
            while True:
                now_s = self.listened_s()
                if ending.asked.is_set() and not self.leaving:
                    self.leaving, give_up_s = True, now_s + self.terms.drain_s
                if self.leaving and self._may_go(at_once=ending.at_once.is_set() or now_s >= give_up_s):
                    break
                report = self._report()
                if not self.welcome and now_s >= self.next_hello_s:
                    self._say_hello(end, report, now_s)
                elif self.welcome and (report != told or now_s >= beat_s):
                    end.send(framed(Heartbeat(report=report)))
                    told, beat_s = report, now_s + self.terms.heartbeat_s
                if now_s - self.heard_s > _LOST_S and _stamp(keys_file) != stamp:
                    stamp = _stamp(keys_file)
                    end = self._with_new_keys(end, endpoint, keys_file)
                self._note_silence(now_s)
                frames = await end.receive(_LOOK_S)
                if frames is not None:
                    self._obey(frames, end)
            await self._go(end)
        finally:
            end.close()

    def _may_go(self, *, at_once: bool) -> bool:
        """Whether the engine may end: it has ended, serves nobody, or has had its time."""
        state = self.runner.report()
        return at_once or not state.alive or state.state is not NodeState.READY

    async def _go(self, end: AgentEnd) -> None:
        """End the engine and say so."""
        await self._end_engine()
        if self.welcome:
            end.send(framed(Heartbeat(report=self._report())))
            end.send(framed(Bye(reason="told to end")))
            await asyncio.sleep(_BYE_S)

    def _say_hello(self, end: AgentEnd, report: NodeReport, now_s: float) -> None:
        facts = {name: getattr(self.hello, name) for name in self.hello.__struct_fields__}
        end.send(framed(Hello(**{**facts, "report": report})))
        self.next_hello_s = now_s + _HELLO_S

    def _report(self) -> NodeReport:
        seen = RunnerReport(state=NodeState.FAILED, reason=self.broken) if self.broken else self.runner.report()
        if seen.state is NodeState.FAILED and seen.alive:
            self._begin_end()
        state = seen.state
        if state is NodeState.IDLE and self.stopping is not None:
            state = NodeState.ENDED
        return NodeReport(
            state=state,
            doing="draining" if self.draining and state is NodeState.READY else shortened(seen.doing),
            reason=shortened(seen.reason),
            log=last_lines(list(seen.log)),
            launch_id=self.launch.launch_id if self.launch else "",
            url=self.launch.url if self.launch else "",
            serves=self.launch.launch.serves if self.launch else False,
            alive=seen.alive,
            leaving=self.leaving,
            sample=seen.sample,
            weight_frac=seen.weight_frac,
            lost_nodes={name: shortened(why, 500) for name, why in seen.lost_nodes.items()},
            draining=self.draining,
            weight=self.weight,
        )

    def _obey(self, frames: list[bytes], end: AgentEnd) -> None:
        try:
            message = from_coordinator(frames)
        except GarbageError:
            return
        except OtherVersionError as error:
            message = Refused(reason=str(error))
        self.heard_s = self.listened_s()
        if self.lost_said:
            self.lost_said = False
            self.say("found", "the coordinator is there again")
        self._do(message, end)

    def _do(self, message: CoordinatorMessage, end: AgentEnd) -> None:
        match message:
            case Welcome():
                if not self.welcome:
                    self.say("welcome", f"registered with coordinator {message.coordinator}")
                self.welcome, self.draining, self.refusal = True, message.draining, ""
            case WhoAreYou():
                self._say_hello(end, self._report(), self.heard_s)
            case Refused():
                self.welcome, self.next_hello_s = False, self.heard_s + _REFUSED_S
                text = f"{message.reason}{f' ({message.fix})' if message.fix else ''}"
                if text != self.refusal:
                    self.refusal = text
                    self.say("refused", f"refused: {text}", reason=message.reason)
            case Launch():
                self._launch(message)
            case Stop():
                self.say("stop", f"told to end the engine: {message.reason}", reason=message.reason)
                self._begin_end()
            case Drain():
                self.draining, self.weight = message.draining, message.weight
            case Acknowledged():
                pass

    def _launch(self, message: Launch) -> None:
        """Start it, once; a node runs one launch in its life."""
        if self.launch is not None or self.stopping is not None or self.leaving:
            return
        self.launch = message
        self.say("launch", f"starting the engine for {message.url}", url=message.url)
        try:
            self.runner.start(message.launch, message.url)
        except CoralError as error:
            self.broken = str(error)
            self.say("failed", f"cannot start the engine: {error}", reason=str(error))

    def _begin_end(self) -> None:
        if self.stopping is None:
            self.stopping = asyncio.create_task(asyncio.to_thread(self.runner.stop, self.terms.stop_grace_s))

    async def _end_engine(self) -> None:
        self._begin_end()
        assert self.stopping is not None
        await self.stopping

    def _with_new_keys(self, end: AgentEnd, endpoint: str, keys_file: Path) -> AgentEnd:
        """Connect anew with what the keys file now holds; one that is wrong is told, and the old keys stay."""
        with contextlib.suppress(InputError):
            pair = agent_keys(keys_file)
            end.close()
            self.say("keys", "the keys have changed: connecting with the new ones")
            return AgentEnd(endpoint, pair)
        self.say("keys", "the keys file has changed, and is wrong now")
        return end

    def _note_silence(self, now_s: float) -> None:
        if now_s - self.heard_s > _LOST_S and not self.lost_said:
            self.lost_said = True
            self.say("lost", "the coordinator does not answer; what runs here runs on")


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_ino, found.st_mtime_ns)
