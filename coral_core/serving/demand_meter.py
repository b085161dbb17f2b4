"""What was asked of each model, as samples for the forecast: every valid request counts, also one turned away for want of capacity."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from coral_core.clock import Clock
from coral_core.errors import CoralError
from coral_core.forecast import DemandSample

DemandSink = Callable[[Sequence[DemandSample]], object]
"""Takes samples to where the planner reads them; may be given the same ones again after a failure."""
MOST_KEPT_S: Final = 86_400.0
_MOST_SET_FRAC: Final = 0.05
"""Of a stretch: by so much the clock may have been set in it, and its rate is still told."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Count:
    asked: int = 0
    finished: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class DemandMeter:
    """Counts by model since the last cut. Lengths are those of the requests that finished within the stretch."""

    models: Iterable[str]
    clock: Clock
    _counts: dict[str, _Count] = field(init=False)
    _since_s: float = field(init=False)
    _since_monotonic_s: float = field(init=False)
    _untold: list[DemandSample] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._counts = {model: _Count() for model in self.models}
        self._since_s, self._since_monotonic_s = self._times_s()

    def asked(self, model: str) -> None:
        """A valid request has arrived."""
        self._counts[model].asked += 1

    def finished(self, model: str, input_tokens: int, output_tokens: int) -> None:
        """A request is done."""
        count = self._counts[model]
        count.finished += 1
        count.input_tokens += input_tokens
        count.output_tokens += output_tokens

    def cut(self) -> list[DemandSample]:
        """One sample per model for the time since the last cut, of rate 0 too; none where no time has passed or the clock was set."""
        now_s, monotonic_s = self._times_s()
        duration_s, lasted_s = now_s - self._since_s, monotonic_s - self._since_monotonic_s
        counts, self._counts = self._counts, {model: _Count() for model in self._counts}
        self._since_s, self._since_monotonic_s = now_s, monotonic_s
        if not 0 < duration_s <= MOST_KEPT_S or abs(duration_s - lasted_s) > _MOST_SET_FRAC * lasted_s:
            _log.warning("the clock was set, or too much time has passed: this stretch of demand is not known")
            return []
        return [
            DemandSample(
                time_s=now_s,
                duration_s=duration_s,
                model=model,
                requests_per_s=count.asked / duration_s,
                mean_input_tokens=count.input_tokens / count.finished if count.finished else None,
                mean_output_tokens=count.output_tokens / count.finished if count.finished else None,
            )
            for model, count in counts.items()
        ]

    def take_untold(self) -> list[DemandSample]:
        """A new cut and what could not be told before; a day's worth at most."""
        self._untold += self.cut()
        if self._untold:
            since_s = self._untold[-1].time_s - MOST_KEPT_S
            self._untold = [sample for sample in self._untold if sample.time_s > since_s]
        return list(self._untold)

    def tell(self, samples: Sequence[DemandSample], sink: DemandSink) -> None:
        """Give samples to the sink (blocking); where it fails they are kept for the next time."""
        try:
            sink(samples)
        except CoralError as error:
            _log.warning("measured demand was not recorded, and is kept: %s", error)
            return
        told = set(samples)
        self._untold = [sample for sample in self._untold if sample not in told]

    def _times_s(self) -> tuple[float, float]:
        return self.clock.now().timestamp(), self.clock.monotonic_s()
