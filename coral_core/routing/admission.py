"""Admission: turn a request away at once where it would wait too long, and retry it elsewhere at most while unheard.

A pool that serves mu requests/s and has n of them waiting makes the next one wait about n / mu. The bound on that wait
comes from the SLO: TTFT less the time the prompt itself takes, and, where other instances decode, what a request of mean
length has to spare for being taken over. Without the second, decode that is short of capacity makes every request late.
"""

from __future__ import annotations

import math


def max_wait_s(ttft_s: float, service_s: float) -> float:
    """How long a request may queue and still meet its TTFT when its prompt takes `service_s`; never negative."""
    return max(ttft_s - service_s, 0.0)


def max_handover_s(tpot_s: float, planned_frac: float, mean_output_tokens: float) -> float:
    """How long a request of mean length may wait to be taken over for decode and still meet its TPOT.

    That is what `mean_output_tokens` at the planned share of the TPOT each leave of it, and one token's time at least.
    """
    return tpot_s * max((1.0 - planned_frac) * (mean_output_tokens - 1.0), 1.0)


def expected_wait_s(waiting_requests: float, rate_requests_per_s: float) -> float:
    """Wait of the next request behind `waiting_requests`; infinite where nothing serves."""
    if rate_requests_per_s <= 0:
        return math.inf
    return waiting_requests / rate_requests_per_s


def admits(waiting_requests: float, rate_requests_per_s: float, bound_s: float) -> bool:
    """Whether a request may join the queue. An infinite bound admits always, also while nothing serves yet."""
    return expected_wait_s(waiting_requests, rate_requests_per_s) <= bound_s


def retry_after_s(waiting_requests: float, rate_requests_per_s: float, bound_s: float, unknown_s: float) -> float:
    """When a rejected request may come back: once the queue has drained to the bound; `unknown_s` if nothing serves."""
    if rate_requests_per_s <= 0:
        return unknown_s
    wait_s = expected_wait_s(waiting_requests, rate_requests_per_s)
    if wait_s <= bound_s:  # also where both are infinite, whose difference is no number
        return 0.0
    return wait_s - bound_s


def may_retry(sent_bytes: int, retries: int, max_retries: int) -> bool:
    """Whether a request that lost its instance is tried elsewhere: nothing sent to the client yet, and tries left."""
    return sent_bytes == 0 and retries < max_retries
