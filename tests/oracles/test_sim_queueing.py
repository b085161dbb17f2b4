"""Queueing theory as oracle: servers of one request at a time whose prompt's length is its service time."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from coral_core.sim.inputs import UNLIMITED, SimRequests
from coral_core.sim.run import simulate
from tests.fakes.sim_cases import instance, node, simulation, stage

TICK_S = 1e-6
"""One prompt token."""


def waits_s(arrival_s, service_s, servers: int) -> np.ndarray:
    """Waiting times of requests at `servers` instances that hold one request each, the rest waiting at the gateway."""
    fleet = [
        instance(
            f"server{k}",
            stage(node(token_s=TICK_S)),
            max_batched_tokens=UNLIMITED,
            max_running_requests=1,
            max_outstanding_requests=1,
        )
        for k in range(servers)
    ]
    asked = SimRequests(
        model=np.zeros(len(arrival_s), dtype=np.int64),
        arrival_s=arrival_s,
        input_tokens=np.maximum(np.rint(service_s / TICK_S), 1).astype(np.int64),
        output_tokens=np.ones(len(arrival_s), dtype=np.int64),
    )
    outcome = simulate(simulation(fleet, asked, end_s=float(arrival_s[-1] + 10_000), compiled=True))
    return outcome.requests.scheduled_s - arrival_s


def erlang_c(servers: int, offered: float) -> float:
    """Probability of having to wait in M/M/c, `offered` = lambda / mu."""
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)


def replicated(servers: int, load: float, draw_service, *, seeds=range(12), count=30_000, warm_up=3_000) -> np.ndarray:
    """(mean wait, share that waits) of each seed, in units of the mean service time 1."""
    rows = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        arrival_s = np.cumsum(random.exponential(1 / (load * servers), count))
        waited = waits_s(arrival_s, draw_service(random, count), servers)[warm_up:]
        rows.append((waited.mean(), (waited > 2 * TICK_S).mean()))
    return np.array(rows)


def assert_within_confidence(values: np.ndarray, expected: float) -> None:
    """The seeds' mean is within 3.5 standard errors, and these are small enough to mean something."""
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert error < 0.06 * expected
    assert abs(values.mean() - expected) < 3.5 * error, (values.mean(), expected, error)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (3, 0.8), (8, 0.9)])
def test_mmc_waits_as_erlang_c_says(servers, load):
    found = replicated(servers, load, lambda random, count: random.exponential(1.0, count))
    must_wait = erlang_c(servers, load * servers)
    assert_within_confidence(found[:, 0], must_wait / (servers * (1 - load)))
    assert_within_confidence(found[:, 1], must_wait)


def test_md1_waits_half_as_long():
    found = replicated(1, 0.8, lambda _random, count: np.ones(count))
    assert_within_confidence(found[:, 0], 0.8 / (2 * (1 - 0.8)))


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_every_single_wait_is_that_of_the_fcfs_recursion(servers):
    random = np.random.default_rng(servers)
    arrival_s = np.cumsum(random.exponential(1 / servers, 3_000))
    ticks = np.maximum(np.rint(random.gamma(0.5, 1.8, 3_000) / TICK_S), 1)
    free_s = [0.0] * servers
    expected = []
    for at_s, service_s in zip(arrival_s, ticks * TICK_S, strict=True):
        start_s = max(at_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + service_s)
        expected.append(start_s - at_s)
    np.testing.assert_allclose(waits_s(arrival_s, ticks * TICK_S, servers), expected, atol=1e-9)
