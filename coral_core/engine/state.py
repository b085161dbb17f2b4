"""What is known of one engine process: how far its start has come, whether it serves, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coral_core.errors import ServingError


class Condition(StrEnum):
    """Whether an engine serves. `failed` and `ended` are final; a failed engine's processes may still be there until it is stopped."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    ENDED = "ended"


class StartStep(StrEnum):
    """The steps of a start, in order. Of the steps in between a runtime may show none; the first and the last it cannot skip."""

    LAUNCHED = "launched"
    IMPORTED = "imported"
    WORKERS = "workers"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    HTTP = "http"
    ANSWERED = "answered"


class Cause(StrEnum):
    """Why an engine failed."""

    BAD_FLAG = "bad_flag"
    BAD_MODEL = "bad_model"
    BAD_TERMS = "bad_terms"
    MEMORY = "memory"
    PORT_TAKEN = "port_taken"
    NOT_LAUNCHED = "not_launched"
    START_TIMEOUT = "start_timeout"
    CRASHED = "crashed"
    KILLED = "killed"
    RANK_DIED = "rank_died"
    HUNG = "hung"
    LEFT = "left"
    BUG = "bug"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """Why an engine failed: what it said first that explains it, the fix where there is one, and its last log lines."""

    cause: Cause
    what: str
    fix: str = ""
    log_lines: tuple[str, ...] = ()

    def error(self, where: str) -> ServingError:
        """The failure as an error of the engine `where`, its last log lines included."""
        tail = f"; its last lines: {' | '.join(self.log_lines)}" if self.log_lines else ""
        return ServingError(f"{self.what}{tail}", where=where, fix=self.fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """A moment of an engine. `reached`: seconds from the launch to each step that was seen; all of it measured."""

    condition: Condition
    reached: tuple[tuple[StartStep, float], ...] = ()
    failure: EngineFailure | None = None
    exit_code: int | None = None

    @property
    def step(self) -> StartStep:
        """The last step of the start that was seen."""
        return self.reached[-1][0] if self.reached else StartStep.LAUNCHED

    @property
    def final(self) -> bool:
        """Whether nothing more will come of it."""
        return self.condition in {Condition.FAILED, Condition.ENDED}
