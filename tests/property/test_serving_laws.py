"""Laws of predicted latencies on random models, GPUs and loads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coral_core.domain.models import ModelShape, Moe, SlidingWindow
from coral_core.errors import NoSolutionError
from coral_core.perf.factors import EngineCosts
from coral_core.perf.serving import Latencies, ServingPoint, predict, running_requests
from tests.fakes.perf_cases import factors, gpu, model

COSTS = EngineCosts(
    step_overhead_s=2e-4,
    kernel_overhead_s=3e-6,
    quantised_gemm_overhead_s=1e-5,
    launch_s=2e-5,
    request_s=0.01,
    own_steps_factor=1.5,
    burst_frac=0.08,
)
EXAMPLES = settings(max_examples=80, deadline=None)


def shapes() -> st.SearchStrategy[ModelShape]:
    return st.builds(
        model,
        layers=st.integers(1, 24),
        kv_heads=st.sampled_from([1, 2, 4, 8]),
        moe=st.none() | st.builds(Moe, experts=st.just(16), top_k=st.integers(1, 8), intermediate=st.just(512)),
        window=st.none() | st.builds(SlidingWindow, window_tokens=st.just(128), layers=st.just(1)),
    )


POINTS = st.builds(
    ServingPoint,
    shape=shapes(),
    variant=st.just("bf16"),
    gpu=st.builds(
        gpu,
        memory_bytes=st.integers(4 * 10**9, 10**12),
        bandwidth=st.floats(1e11, 5e12),
        flops=st.floats(1e13, 1e15),
        link=st.floats(1e10, 1e12),
    ),
    tp=st.sampled_from([1, 2, 4, 8]),
    input_tokens=st.floats(1, 20_000),
    output_tokens=st.floats(1, 8_000),
    concurrency=st.integers(1, 512),
)


def found(point: ServingPoint) -> Latencies:
    try:
        return predict(point, factors=factors(), costs=COSTS)
    except NoSolutionError:
        assume(False)
        raise


@EXAMPLES
@given(POINTS)
def test_latencies_are_finite_and_above_their_fixed_parts(point: ServingPoint) -> None:
    got = found(point)
    assert np.isfinite(got.ttft_s)
    assert np.isfinite(got.tpot_s)
    assert got.ttft_s > COSTS.request_s
    assert got.tpot_s >= COSTS.step_overhead_s
    assert 1 <= got.running <= point.concurrency


@EXAMPLES
@given(POINTS, st.integers(1, 256))
def test_more_clients_never_speed_a_token_up(point: ServingPoint, more: int) -> None:
    few, many = found(point), found(replace(point, concurrency=point.concurrency + more))
    assert many.tpot_s >= few.tpot_s * (1 - 1e-9)
    assert many.running >= few.running


@EXAMPLES
@given(POINTS)
def test_no_token_comes_faster_than_its_weights_can_be_read(point: ServingPoint) -> None:
    from coral_core.domain.model_math import parameter_counts

    body_bytes = 2 * parameter_counts(point.shape).body / point.tp
    assert found(point).tpot_s >= body_bytes / point.gpu.memory_bandwidth_bytes_per_s


@EXAMPLES
@given(POINTS)
def test_without_room_for_more_the_others_wait(point: ServingPoint) -> None:
    got = found(replace(point, concurrency=100_000))
    running = running_requests(replace(point, concurrency=100_000))
    assert got.running == running
    whole_s = point.output_tokens * got.tpot_s
    assert running == 100_000 or got.ttft_s >= (100_000 - running) / running * whole_s


@EXAMPLES
@given(POINTS, st.floats(1.0, 8.0))
def test_faster_memory_never_slows_a_token(point: ServingPoint, factor: float) -> None:
    faster = replace(point.gpu, memory_bandwidth_bytes_per_s=point.gpu.memory_bandwidth_bytes_per_s * factor)
    assert found(replace(point, gpu=faster)).tpot_s <= found(point).tpot_s * (1 + 1e-9)
