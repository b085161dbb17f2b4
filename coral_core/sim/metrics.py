"""Goodput, attainment and latency percentiles of a simulated run, per model.

A request counts by its arrival: those that arrive in the window [from_s, to_s) are *offered*, whatever becomes of them.
It is *within its SLO* if it is done, its first token came within `ttft_s` of its arrival, and its mean time per output
token after the first, (finish - first token) / (output tokens - 1), is at most `tpot_s`; with a single output token
there is no second condition. Hand-over from prefill to decode, with its queue and KV transfer, is part of that mean, as
its client sees it; `handover=False` measures from the KV's arrival instead, as if the hand-over were free.

    goodput    = generated tokens of requests within their SLO / (to_s - from_s)
    attainment = requests within their SLO / offered requests (rejected, failed and unfinished ones are not within)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.workload import Slo
from coral_core.errors import InputError
from coral_core.sim.inputs import SimRequests
from coral_core.sim.outcome import RequestStatus, SimOutcome
from coral_core.sim.world import Floats

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
CURVE_FRACS = (*(i / 40 for i in range(39)), 0.96, 0.97, 0.98, 0.99, 0.995, 1.0)
"""Shares at which a distribution is kept: enough to draw it by, few enough to store for every model and policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Mean and percentiles in seconds over `requests` of them; NaN where there are none.

    `curve_s` are the values at CURVE_FRACS, lowest and highest included; empty where there are none.
    """

    requests: int
    mean_s: float
    percentile_s: Mapping[float, float]
    curve_s: tuple[float, ...]

    @classmethod
    def of(cls, values_s: Floats) -> Latencies:
        """Of all finite values."""
        finite = values_s[np.isfinite(values_s)]
        if not len(finite):
            return cls(requests=0, mean_s=math.nan, percentile_s=dict.fromkeys(PERCENTILES, math.nan), curve_s=())
        percentiles = np.percentile(finite, PERCENTILES)
        curve = np.quantile(finite, CURVE_FRACS)
        return cls(
            requests=len(finite),
            mean_s=float(finite.mean()),
            percentile_s=dict(zip(PERCENTILES, map(float, percentiles), strict=True)),
            curve_s=tuple(map(float, curve)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """One model's (or all models') service in a window of arrivals; see the module's text for the definitions."""

    model: str
    offered_requests: int
    offered_tokens_per_s: float
    done_requests: int
    failed_requests: int
    rejected_requests: int
    unfinished_requests: int
    within_slo_requests: int
    goodput_tokens_per_s: float
    throughput_tokens_per_s: float
    ttft: Latencies
    tpot: Latencies

    @property
    def attainment_frac(self) -> float:
        """Share of offered requests within their SLO; NaN where none was offered."""
        return self.within_slo_requests / self.offered_requests if self.offered_requests else math.nan


def ttft_s(requests: SimRequests, outcome: SimOutcome) -> Floats:
    """Time to first token of each request, NaN where none came."""
    result: Floats = outcome.requests.first_token_s - requests.arrival_s
    return result


def tpot_s(requests: SimRequests, outcome: SimOutcome, *, handover: bool = True) -> Floats:
    """Mean time per output token after the first, of requests that are done and have more than one; NaN elsewhere."""
    done = outcome.requests.status == RequestStatus.DONE
    span_s = outcome.requests.finish_s - (outcome.requests.first_token_s if handover else outcome.requests.decode_s)
    several = done & (requests.output_tokens > 1)
    return np.where(several, span_s / np.maximum(requests.output_tokens - 1, 1), np.nan)


def within_slo(
    requests: SimRequests, outcome: SimOutcome, slos: Sequence[Slo], *, handover: bool = True
) -> NDArray[np.bool_]:
    """Which requests meet their model's SLO (`slos` in the order of the input's models)."""
    done = outcome.requests.status == RequestStatus.DONE
    bound_ttft_s = np.array([slo.ttft_s for slo in slos])[requests.model]
    bound_tpot_s = np.array([slo.tpot_s for slo in slos])[requests.model]
    with np.errstate(invalid="ignore"):
        first = ttft_s(requests, outcome) <= bound_ttft_s
        rest = (requests.output_tokens == 1) | (tpot_s(requests, outcome, handover=handover) <= bound_tpot_s)
    result: NDArray[np.bool_] = done & first & rest
    return result


def measure(
    requests: SimRequests,
    outcome: SimOutcome,
    slos: Mapping[str, Slo],
    *,
    from_s: float = 0.0,
    to_s: float | None = None,
    handover: bool = True,
) -> dict[str, ModelMetrics]:
    """Metrics per model, in the order of `slos`, which must be that of the input's models; and of all as `*`.

    `to_s` None is the end of the run; leave requests that arrive last some time to finish, or end the window earlier.
    Raises InputError for an empty window.
    """
    end_s = outcome.end_s if to_s is None else to_s
    if not 0 <= from_s < end_s:
        raise InputError(f"the window from {from_s:g} s to {end_s:g} s is empty", where="from_s")
    offered = (requests.arrival_s >= from_s) & (requests.arrival_s < end_s)
    good = within_slo(requests, outcome, list(slos.values()), handover=handover)
    per_token_s = tpot_s(requests, outcome, handover=handover)
    whole = {name: offered & (requests.model == m) for m, name in enumerate(slos)} | {"*": offered}
    return {
        name: _measure(
            name, requests, outcome, chosen=chosen, good=good, per_token_s=per_token_s, window_s=end_s - from_s
        )
        for name, chosen in whole.items()
    }


def _measure(
    name: str,
    requests: SimRequests,
    outcome: SimOutcome,
    *,
    chosen: NDArray[np.bool_],
    good: NDArray[np.bool_],
    per_token_s: Floats,
    window_s: float,
) -> ModelMetrics:
    counts = np.bincount(outcome.requests.status[chosen], minlength=len(RequestStatus))
    generated = outcome.requests.generated_tokens
    return ModelMetrics(
        model=name,
        offered_requests=int(chosen.sum()),
        offered_tokens_per_s=float(requests.output_tokens[chosen].sum() / window_s),
        done_requests=int(counts[RequestStatus.DONE]),
        failed_requests=int(counts[RequestStatus.FAILED]),
        rejected_requests=int(counts[RequestStatus.REJECTED] + counts[RequestStatus.TOO_LONG]),
        unfinished_requests=int(counts[RequestStatus.UNFINISHED]),
        within_slo_requests=int((chosen & good).sum()),
        goodput_tokens_per_s=float(generated[chosen & good].sum() / window_s),
        throughput_tokens_per_s=float(generated[chosen].sum() / window_s),
        ttft=Latencies.of(ttft_s(requests, outcome)[chosen]),
        tpot=Latencies.of(per_token_s[chosen]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Per epoch: (E, N) busy share of up time and KV use of nodes, (E, P) mean and greatest waiting requests."""

    busy_frac: Floats
    kv_frac: Floats
    mean_waiting_requests: Floats
    max_waiting_requests: Floats


def load(outcome: SimOutcome) -> Load:
    """How full nodes and queues were; shares are NaN where an instance was not up."""
    fleet = outcome.fleet
    up_s = fleet.up_s[:, outcome.node_instance]
    duration_s = np.diff([*outcome.epoch_starts_s, outcome.end_s])[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return Load(
            busy_frac=fleet.busy_s / up_s,
            kv_frac=fleet.kv_block_s / up_s / outcome.kv_blocks,
            mean_waiting_requests=np.where(duration_s > 0, fleet.waiting_request_s / duration_s, np.nan),
            max_waiting_requests=fleet.max_waiting_requests,
        )
