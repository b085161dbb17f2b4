"""Decides from an engine's samples whether it still works, since `/health` says yes while a pipeline waits for a dead rank.

An engine hangs when it has work and nothing moves. What moves are its own figures: steps, tokens, the KV cache's use, the
requests it runs. Those come from the process that steps, so they also stand still when it is stopped while idle, and a request
that comes then is not even counted as waiting; hence a probe, a completion of one token, whenever nothing has moved for a
while. A probe that waits is work.

Prefill in chunks moves the figures with each chunk, so a long prompt is no hang; a single step of more than `hung_after_s` is
one, as it is to the engine itself (its `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`, 10 s in our launch plans).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coral_core.engine.scrape import EngineSample

LONGEST_GAP_S = 3.0
"""Of a longer gap between two looks only this much counts: the watcher itself was held up, or the machine asleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTerms:
    """Seconds; a hang is noticed at most `probe_after_s` + `hung_after_s` and one look (1 s, 2 s where it is not answered) after it began."""

    probe_after_s: float = 3.0
    hung_after_s: float = 9.0
    gone_after_s: float = 9.0


@dataclass(slots=True, kw_only=True)
class Liveness:
    """What is known of one engine's movement. Times are seconds on any clock that never goes back."""

    terms: LivenessTerms = LivenessTerms()
    probing: bool = False
    _owes: bool = False
    _at_s: float | None = None
    _figures: tuple[float | None, ...] = field(default=())
    _still_s: float = 0.0
    _stuck_s: float = 0.0
    _silent_s: float = 0.0

    def look(self, sample: EngineSample | None, at_s: float) -> None:
        """Take a sample at `at_s`; None: the engine did not answer."""
        gap_s = 0.0 if self._at_s is None else min(max(at_s - self._at_s, 0.0), LONGEST_GAP_S)
        self._at_s = at_s
        self._silent_s = self._silent_s + gap_s if sample is None else 0.0
        figures = self._figures if sample is None else _figures(sample)
        if figures != self._figures:
            self._figures = figures
            self._moved()
            return
        self._still_s += gap_s
        has_work = (
            self.probing or self._owes or any((sample.running_requests, sample.waiting_requests) if sample else ())
        )
        # Between two looks without an answer the last word on work stands.
        self._stuck_s = self._stuck_s + gap_s if has_work or sample is None else 0.0

    def probe_is_due(self) -> bool:
        """Whether nothing has moved for so long that a probe should be sent; then set `probing`."""
        return not self.probing and self._still_s >= self.terms.probe_after_s

    def probe_returned(self, *, answered: bool) -> None:
        """The probe is over: with a token the engine works; without one it still owes it."""
        self.probing = False
        self._owes = True
        if answered:
            self._moved()

    def hang(self) -> str:
        """What shows that the engine hangs; empty where nothing does."""
        if self._silent_s >= self.terms.gone_after_s:
            return f"its /metrics was not answered for {self._silent_s:.0f} s"
        if self._stuck_s >= self.terms.hung_after_s:
            return f"it has requests, and no step, token or block of KV moved for {self._stuck_s:.0f} s"
        return ""

    def _moved(self) -> None:
        self._still_s = self._stuck_s = 0.0
        self._owes = False


def _figures(sample: EngineSample) -> tuple[float | None, ...]:
    return (
        sample.steps_total,
        sample.generation_tokens_total,
        sample.prompt_tokens_total,
        sample.kv_usage_frac,
        sample.running_requests,
        sample.waiting_requests,
    )
