"""An agent's engine: one engine process of `coral_core.engine` as the control plane sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from coral_core.clock import ListeningClock
from coral_core.domain.launch import NodeLaunch
from coral_core.engine.kept import end_left_behind
from coral_core.engine.process import EngineProcess, start_engine
from coral_core.engine.scrape import EngineSample as Scraped
from coral_core.engine.stage_status import StatusFile
from coral_core.engine.state import Condition, EngineState
from coral_core.errors import ServingError
from coral_core.serving.control.messages import EngineSample, NodeState
from coral_core.serving.control.runner import RunnerReport

LOG_FILE: Final = "engine.log"
_STATES: Final = {
    Condition.STARTING: NodeState.STARTING,
    Condition.READY: NodeState.READY,
    Condition.FAILED: NodeState.FAILED,
    Condition.ENDED: NodeState.ENDED,
}


@dataclass(slots=True, kw_only=True)
class EngineRunner:
    """Implements `NodeRunner`. `folder` is this node's alone, now and later: by it is found what an earlier agent left behind.

    (Not by the node's id: of two fleets on one machine both may have a node of that id.)
    """

    interpreter: Path
    folder: Path
    _engine: EngineProcess | None = field(default=None, init=False)
    _stopped: bool = field(default=False, init=False)
    _tokens: float | None = field(default=None, init=False)
    _progress_s: float | None = field(default=None, init=False)
    _looked_s: ListeningClock = field(default_factory=lambda: ListeningClock(time.monotonic), init=False)
    _status: StatusFile = field(init=False)

    def __post_init__(self) -> None:
        self._status = StatusFile(self.folder)

    def recover(self) -> None:
        """End what an earlier agent of this node has left behind."""
        end_left_behind(self._owner)

    def start(self, launch: NodeLaunch, url: str) -> None:
        """Start it; see `start_engine`. ServingError also where an earlier engine's status cannot be taken away."""
        try:
            self._status.clear()
        except OSError as error:
            raise ServingError(f"cannot take away an earlier engine's status: {error}", where=launch.node) from None
        self._engine = start_engine(
            replace(launch, env={**launch.env, **self._status.env}) if launch.serves else launch,
            interpreter=self.interpreter,
            log=self.folder / LOG_FILE,
            owner=self._owner,
            url=url if launch.serves else None,
        )

    def report(self) -> RunnerReport:
        """Its newest state and metrics. For as long as nobody asks, nothing is known to stand still."""
        now_s = self._looked_s()
        if self._engine is None:
            return RunnerReport(state=NodeState.IDLE)
        state = self._engine.state
        failure = state.failure
        status = self._status.read() if self._engine.launch.serves else None
        return RunnerReport(
            state=_STATES[state.condition],
            doing=_doing(state),
            reason="" if failure is None else f"{failure.what}{f' ({failure.fix})' if failure.fix else ''}",
            log=() if failure is None else failure.log_lines,
            # Of a failed engine something may be left until it is stopped.
            alive=state.condition is not Condition.ENDED and not self._stopped,
            sample=self._sample(self._engine.sample, now_s),
            weight_frac=status.weight_frac if status else None,
            lost_nodes=dict(status.lost_nodes) if status else {},
        )

    def stop(self, grace_s: float) -> None:
        """End it."""
        if self._engine is not None:
            self._engine.stop(grace_s)
        self._stopped = True

    @property
    def _owner(self) -> str:
        return str(self.folder.resolve()).replace("#", "%23")

    def _sample(self, scraped: Scraped | None, now_s: float) -> EngineSample | None:
        if scraped is None:
            return None
        tokens = scraped.generation_tokens_total
        if tokens is not None and self._tokens is not None and tokens > self._tokens:
            self._progress_s = now_s
        self._tokens = tokens
        return EngineSample(
            running_requests=_count(scraped.running_requests),
            waiting_requests=_count(scraped.waiting_requests),
            progress_age_s=None if self._progress_s is None else now_s - self._progress_s,
        )


def _doing(state: EngineState) -> str:
    """The step that a start has reached, and when (measured)."""
    if state.condition is not Condition.STARTING or not state.reached:
        return ""
    step, at_s = state.reached[-1]
    return f"{step.value} after {at_s:.1f} s"


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)
