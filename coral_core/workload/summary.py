"""What a trace asks for: rate, lengths, burstiness; and the same trace at another rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.workload import Trace
from coral_core.errors import InputError

LEAST_REQUESTS_PER_S: Final = 1e-9
MOST_REQUESTS_PER_S: Final = 1e9
"""Wider than any service by far; beyond them times leave the range where float64 tells arrivals apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStatistics:
    """Statistics of a trace. `burstiness` is the coefficient of variation of the gaps between arrivals (Poisson: 1).

    `requests_per_s` is gaps over time, (n - 1) / duration, so that it does not depend on where a trace is cut.
    """

    n: int
    duration_s: float
    requests_per_s: float
    burstiness: float
    mean_input_tokens: float
    p50_input_tokens: float
    p90_input_tokens: float
    p99_input_tokens: float
    mean_output_tokens: float
    p50_output_tokens: float
    p90_output_tokens: float
    p99_output_tokens: float


def length_statistics(trace: Trace) -> LengthStatistics:
    """Statistics of `trace`; InputError where it has no rate (fewer than two requests, or all at one time), or one beyond reason."""
    gaps_s = np.diff(trace.arrival_s)
    rate = _rate(trace)
    prompt, response = _quantiles(trace.input_tokens), _quantiles(trace.output_tokens)
    return LengthStatistics(
        n=len(trace),
        duration_s=_duration_s(trace),
        requests_per_s=rate,
        burstiness=float(gaps_s.std() * rate),
        mean_input_tokens=float(trace.input_tokens.mean()),
        p50_input_tokens=prompt[0],
        p90_input_tokens=prompt[1],
        p99_input_tokens=prompt[2],
        mean_output_tokens=float(trace.output_tokens.mean()),
        p50_output_tokens=response[0],
        p90_output_tokens=response[1],
        p99_output_tokens=response[2],
    )


def scale_rate(trace: Trace, requests_per_s: float) -> Trace:
    """`trace` at a mean of `requests_per_s`: its time is stretched, so order and burstiness stay as they are.

    InputError for a rate that is not from LEAST_REQUESTS_PER_S to MOST_REQUESTS_PER_S, and for a trace without such a rate.
    """
    check_rate(requests_per_s, where=trace.name)
    factor = _rate(trace) / requests_per_s
    return replace(
        trace,
        arrival_s=trace.arrival_s * factor,
        source=f"{trace.source}, scaled to {requests_per_s:g} requests/s",
    )


def check_rate(requests_per_s: float, *, where: str) -> None:
    """InputError for a rate that no trace can have, NaN and infinity among them."""
    if not LEAST_REQUESTS_PER_S <= requests_per_s <= MOST_REQUESTS_PER_S:
        bounds = f"from {LEAST_REQUESTS_PER_S:g} to {MOST_REQUESTS_PER_S:g} requests/s"
        raise InputError(f"requests_per_s is {requests_per_s:g}, must be {bounds}", where=where)


def _duration_s(trace: Trace) -> float:
    return float(trace.arrival_s[-1] - trace.arrival_s[0])


def _rate(trace: Trace) -> float:
    if len(trace) < 2 or _duration_s(trace) <= 0:
        raise InputError(
            f"{len(trace)} requests without time between them have no rate", where=trace.name, fix="use a longer trace"
        )
    rate = (len(trace) - 1) / _duration_s(trace)
    check_rate(rate, where=trace.name)
    return rate


def _quantiles(tokens: NDArray[np.int64]) -> tuple[float, float, float]:
    """Median, 90th and 99th percentile, linear between order statistics."""
    p50, p90, p99 = np.quantile(tokens, (0.5, 0.9, 0.99))
    return float(p50), float(p90), float(p99)
