"""Workload: what is asked of each model, and under which latency bounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Phase(StrEnum):
    """`prefill` and `decode` on separate nodes (disaggregated), or `aggregated` on the same."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency bounds: time to first token and time per output token, both in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean request lengths, and where they come from."""

    mean_input_tokens: float
    mean_output_tokens: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival: equal-length arrays, seconds from the first request, token counts >= 1 / >= 0.

    `dropped` counts requests of the source that are not among them (those that failed there).
    """

    name: str
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    source: str
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of one model: a request rate at stated mean lengths, an SLO, and its importance.

    `weight` orders models when not all can be served (DESIGN 3.6, shortfall priorities).
    """

    model: str
    requests_per_s: float
    lengths: Lengths
    slo: Slo
    weight: float = 1.0

    def tokens_per_s(self, phase: Phase) -> float:
        """Demand in tokens/s: prompt tokens for prefill, generated tokens for decode.

        Raises ValueError for `aggregated`, whose unit is requests/s.
        """
        if phase is Phase.PREFILL:
            return self.requests_per_s * self.lengths.mean_input_tokens
        if phase is Phase.DECODE:
            return self.requests_per_s * self.lengths.mean_output_tokens
        raise ValueError("aggregated demand is in requests/s")
