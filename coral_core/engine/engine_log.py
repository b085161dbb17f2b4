"""Reads an engine's log: how far its start has come, and what explains a failure.

Of a failed vLLM the last lines say only that something failed before. Processes report upwards, worker, engine core, server,
so the first exception is the cause.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coral_core.engine.state import Cause, EngineFailure, StartStep

LAST_LINES = 8
LONGEST_LINE = 500
CRASH_WINDOW_S = 30.0
"""Of a ready engine's exceptions only those this long before its end explain it: a request may fail without the engine."""

_PREFIX = re.compile(
    r"^(?:\((?P<process>[\w-]+)(?: pid=\d+)?\) )?(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?$")
_TOLD = re.compile(r"\S+: error: |Worker proc \S+ died unexpectedly")
"""What explains a failure without being an exception."""
_STEPS = (
    (StartStep.IMPORTED, re.compile(r"non-default args: |Launching vLLM")),
    (StartStep.WORKERS, re.compile(r"world_size=\d+ rank=\d+")),
    (StartStep.WEIGHTS, re.compile(r"Loading weights took|Model loading took")),
    (StartStep.KV_CACHE, re.compile(r"init engine \(|KV cache size:|for KV cache on node")),
)
_KILLED = "if nobody killed it, the kernel did for want of memory: give the node's engines less"
_CAUSES = (
    (Cause.RANK_DIED, re.compile(r"died unexpectedly"), _KILLED),
    (
        Cause.PORT_TAKEN,
        re.compile(r"Address already in use|EADDRINUSE"),
        "end what listens there, or give the node other ports",
    ),
    (
        Cause.BAD_FLAG,
        re.compile(r": error: |unrecognized arguments"),
        "correct the extra arguments in engine.yaml, or install the engine's version that has the flag",
    ),
    (
        Cause.MEMORY,
        re.compile(
            r"MemoryError|out of memory|Cannot allocate memory|can't allocate memory|Available memory on node"
            r"|Free memory on device|No available memory|larger than the available KV cache memory|DefaultCPUAllocator",
            re.IGNORECASE,
        ),
        "lower the KV cache's size or the context in engine.yaml, or place fewer engines on the node",
    ),
    (
        Cause.BAD_TERMS,
        re.compile(r"max_model_len|divisible|VLLM_PP_LAYER_PARTITION"),
        "correct the model's terms in engine.yaml",
    ),
    (
        Cause.BAD_MODEL,
        re.compile(
            r"Repo id must be|HFValidationError|LocalEntryNotFound|RepositoryNotFound|OfflineModeIsEnabled|SafetensorError"
            r"|does not appear to have a file|no file named|Cannot find any model weights|Invalid repository ID or local"
            r"|Unrecognized model|are not supported for now|No such file or directory",
            re.IGNORECASE,
        ),
        "give the model's folder on this node in engine.yaml, complete and readable",
    ),
    (
        Cause.BAD_TERMS,
        re.compile(r"validation errors? for|ValueError"),
        "correct the model's terms in engine.yaml",
    ),
)
"""In order: the first that fits an exception's text names the cause. Recorded from vllm 0.32.0."""


@dataclass(slots=True)
class EngineLog:
    """What has been read so far. Lines come with the seconds since the launch."""

    reached: list[tuple[StartStep, float]] = field(default_factory=lambda: [(StartStep.LAUNCHED, 0.0)])
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    _exceptions: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=100))
    _open: bool = False

    def read(self, lines: Iterable[str], at_s: float) -> None:
        """Take lines, without their ends, that were there `at_s` seconds after the launch."""
        for line in lines:
            self._read_line(line[:LONGEST_LINE].rstrip(), at_s)

    def reach(self, step: StartStep, at_s: float) -> None:
        """Note a step that was seen elsewhere; one that was seen before keeps its time."""
        if all(step != reached for reached, _ in self.reached):
            self.reached.append((step, at_s))

    def failure(self, exit_code: int | None, at_s: float, *, was_ready: bool) -> EngineFailure:
        """Why an engine ended with `exit_code` (negative: a signal) `at_s` seconds after its launch."""
        since_s = at_s - CRASH_WINDOW_S if was_ready else 0.0
        first = next((text for when_s, text in self._exceptions if when_s >= since_s), None)
        lines = tuple(self._last)
        if first is not None:
            cause, fix = _explain(first)
            if was_ready and cause not in {Cause.MEMORY, Cause.RANK_DIED}:
                cause, fix = Cause.CRASHED, ""
            return EngineFailure(cause=cause, what=first, fix=fix, log_lines=lines)
        if exit_code is not None and exit_code < 0:
            fix = (
                "look for the kernel's out-of-memory killer, and give the node's engines less"
                if exit_code == -9
                else ""
            )
            return EngineFailure(cause=Cause.KILLED, what=f"killed by signal {-exit_code}", fix=fix, log_lines=lines)
        what = f"ended by itself with exit code {exit_code}, and named no cause"
        return EngineFailure(cause=Cause.LEFT, what=what, log_lines=lines)

    def tail(self) -> tuple[str, ...]:
        """The last lines."""
        return tuple(self._last)

    def _read_line(self, line: str, at_s: float) -> None:
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        if not text.strip(" ^~"):
            return
        if not text.startswith(" "):  # the body of a traceback says nothing without the source
            self._last.append(line)
        level = prefix["level"] if prefix else None
        if level in {"INFO", "WARNING", "DEBUG"}:
            self._open = False
            for step, pattern in _STEPS:
                if pattern.search(text):
                    self.reach(step, at_s)
        elif _EXCEPTION.match(text) or _TOLD.match(text):
            self._open = "validation error" in text
            self._exceptions.append((at_s, text))
        elif self._open and text.startswith(" "):
            # Pydantic says what is wrong in the line below.
            when_s, begun = self._exceptions.pop()
            self._exceptions.append((when_s, f"{begun}: {text.strip()}"))
            self._open = False


def _explain(text: str) -> tuple[Cause, str]:
    return next(((cause, fix) for cause, pattern, fix in _CAUSES if pattern.search(text)), (Cause.CRASHED, ""))
