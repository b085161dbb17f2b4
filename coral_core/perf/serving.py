"""TTFT and TPOT of one model replica under a closed loop of C clients, as serving benchmarks run it.

Each client sends its next request when it has its last token, so C requests are always there; b <= C of them run, as
many as their KV leaves room for. With I input and O output tokens, x = (b-1)/O other prompts enter per step of a request:

    T0    a decode step of b requests, kernels in CUDA graphs
    T1    a step that also takes up to the engine's budget of prompt tokens, launched kernel by kernel:
          the longer of its kernels and of its launches
    TPOT  = (1 - s) T0 + s T1,  s = min(x I / tokens of T1, 1): the share of steps with a prompt in them
    TTFT  = what a request costs outside the steps
          + own_steps_factor x T1 x steps of its own prompt
          + the rest of the step that runs when it arrives, E[T^2] / 2 E[T]
          + other prompts before it: as in a queue of deterministic service w at load r, r w / 2 (1 - r)
          + burst_frac x the time that all clients' prompts take: runs start with all clients at once
          + where b < C: the time until one of the b leaves, (C - b) / b of a whole request

Kernels come from `roofline` (an engine that is not vLLM differs in its overheads first); `EngineCosts` holds the rest.
Means over requests of a run; lengths are taken as fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.hardware import Gpu
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths
from coral_core.errors import InputError, NoSolutionError
from coral_core.perf import memory
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import runs_variant
from coral_core.perf.factors import EngineCosts, Factors, load_engine_costs, load_factors
from coral_core.perf.roofline import Step, computes_in_8_bits, layer_kernels, layer_time, mean_context_tokens
from coral_core.perf.search import tp_runs

Floats = NDArray[np.float64]

STEP_TOKENS = 8192
"""Prompt tokens that the engine takes per step (vLLM's default for its server on large GPUs)."""

LARGEST = 1e9
"""No length or number of clients above this makes sense."""

_BARE = CapacityAssumptions(kernel_overhead_s=0.0, quantised_gemm_overhead_s=0.0, step_overhead_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """One replica of `tp` GPUs and the load that `concurrency` clients put on it."""

    shape: ModelShape
    variant: str
    gpu: Gpu
    tp: int
    input_tokens: float
    output_tokens: float
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Mean seconds of a request's first token and per further token. `running` of the clients' requests run at a time."""

    ttft_s: float
    tpot_s: float
    running: int


def predict(point: ServingPoint, *, factors: Factors | None = None, costs: EngineCosts | None = None) -> Latencies:
    """Latencies of one point, with the shipped factors where none are given. Raises what `kernel_times` raises."""
    times = kernel_times([point], load_factors() if factors is None else factors)
    ttft_s, tpot_s = latencies(times, load_engine_costs() if costs is None else costs)
    return Latencies(ttft_s=float(ttft_s[0]), tpot_s=float(tpot_s[0]), running=int(times.running[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Seconds of kernels alone, and what overheads count by: one entry per point, (n,).

    `decode_s`, `mixed_s` and `burst_s`: a step of the running requests, the same with `prompt_tokens` of prompts,
    and one with a full budget beside half of the requests.
    """

    decode_s: Floats
    mixed_s: Floats
    burst_s: Floats
    small_kernels: Floats
    quantised_gemms: Floats
    prompt_tokens: Floats
    input_tokens: Floats
    output_tokens: Floats
    concurrency: Floats
    running: Floats

    def only(self, chosen: NDArray[np.bool_]) -> KernelTimes:
        """Some of the points."""
        return KernelTimes(**{name: getattr(self, name)[chosen] for name in self.__slots__})


def kernel_times(points: Sequence[ServingPoint], factors: Factors) -> KernelTimes:
    """Kernel times of the steps behind each point.

    Raises InputError for values that make no sense or a TP that the model cannot be split by, NoSolutionError where
    not one request fits beside the weights, DataGapError where a factor is not known.
    """
    rows = [_kernel_times(point, factors) for point in points]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(KernelTimes.__slots__)).T
    return KernelTimes(**dict(zip(KernelTimes.__slots__, columns, strict=True)))


def latencies(times: KernelTimes, costs: EngineCosts) -> tuple[Floats, Floats]:
    """(TTFT, TPOT) in seconds, (n,) each."""
    overhead_s = (
        costs.step_overhead_s
        + times.small_kernels * costs.kernel_overhead_s
        + times.quantised_gemms * costs.quantised_gemm_overhead_s
    )
    launches_s = (times.small_kernels + times.quantised_gemms) * costs.launch_s
    decode_s = times.decode_s + overhead_s
    mixed_s = np.maximum(times.mixed_s + overhead_s, launches_s)
    burst_s = np.maximum(times.burst_s + overhead_s, launches_s)

    others = np.maximum(times.running - 1, 0)
    own_steps = np.maximum(times.input_tokens / times.prompt_tokens, 1.0)
    share = np.minimum(others / times.output_tokens * times.input_tokens / times.prompt_tokens, 1.0)
    tpot_s = (1 - share) * decode_s + share * mixed_s

    own_s = own_steps * mixed_s
    prompt_s = np.maximum(mixed_s - decode_s, 0.0) * times.input_tokens / times.prompt_tokens
    request_s = own_s + times.output_tokens * tpot_s
    load = np.minimum(others * prompt_s / request_s, 0.9)
    queue_s = load / (2 * (1 - load)) * prompt_s
    residual_s = ((1 - share) * decode_s**2 + share * mixed_s**2) / (2 * tpot_s)
    all_prompts_s = (times.concurrency - 1) * burst_s * times.input_tokens / STEP_TOKENS
    waiting_s = (times.concurrency - times.running) / times.running * request_s
    first_s = costs.request_s + costs.own_steps_factor * own_s + residual_s + queue_s
    return first_s + costs.burst_frac * all_prompts_s + waiting_s, tpot_s


def _kernel_times(point: ServingPoint, factors: Factors) -> tuple[float, ...]:
    _check(point, factors)
    shape, tokens_in, tokens_out = point.shape, point.input_tokens, point.output_tokens
    running = running_requests(point)
    others_per_step = max(running - 1, 0) / tokens_out
    prompt_tokens = min(max(others_per_step, 1.0) * tokens_in, float(STEP_TOKENS))
    sizes = ((running, 0.0), (running, prompt_tokens), (running / 2, float(STEP_TOKENS)))
    decoding, prompts = np.array(sizes, dtype=np.float64).T
    time = layer_time(
        shape=shape,
        variant=point.variant,
        gpu=point.gpu,
        tp=point.tp,
        step=Step(
            decode_requests=decoding,
            prefill_tokens=prompts,
            prompts=np.minimum(prompts / tokens_in, prompts),
            produced=decoding,
        ),
        lengths=_lengths(point),
        factors=factors,
        assumptions=_BARE,
    )
    decode_s, mixed_s, burst_s = (shape.layers * time.total_s).tolist()
    kernels = layer_kernels(shape, quantised=computes_in_8_bits(shape, point.variant, point.gpu, factors))
    return (
        *(decode_s, mixed_s, burst_s),
        *(float(shape.layers * kernels.small), float(shape.layers * kernels.quantised)),
        *(prompt_tokens, tokens_in, tokens_out, float(point.concurrency), float(running)),
    )


def running_requests(point: ServingPoint) -> int:
    """How many of the clients' requests run at a time: those whose KV fits, and whose prompts the steps can take.

    Raises NoSolutionError where there is no room for one.
    """
    shape, variant, tp, given = point.shape, point.variant, point.tp, CapacityAssumptions()
    tokens = np.array([float(STEP_TOKENS)])
    step = Step(decode_requests=0 * tokens, prefill_tokens=tokens, prompts=0 * tokens + 1, produced=tokens)
    weights = memory.weight_bytes_per_gpu_layer(shape, variant, tp) * shape.layers
    free_bytes = memory.usable_bytes(point.gpu, given) - weights
    free_bytes -= float(memory.activation_bytes_per_gpu(shape, tp, step)[0])
    per_request = memory.kv_bytes_per_gpu_layer(shape, variant, tp, mean_context_tokens(_lengths(point)))
    fit = math.floor(free_bytes / (per_request * shape.layers)) if free_bytes > 0 else 0
    if fit < 1:
        need_gib = (weights + per_request * shape.layers) / 2**30
        raise NoSolutionError(
            f"{shape.name} in {variant} does not fit {tp} x {point.gpu.name}: {need_gib:.1f} GiB per GPU for weights and one request",
            fix="use more GPUs (--tp), larger ones, or a smaller dtype",
        )
    # Steps take at most their budget of prompt tokens, so no more requests can come in than (b - 1) / O prompts a step.
    balanced = 1 + math.floor(STEP_TOKENS * point.output_tokens / point.input_tokens)
    return min(fit, balanced, point.concurrency)


def _lengths(point: ServingPoint) -> Lengths:
    return Lengths(mean_input_tokens=point.input_tokens, mean_output_tokens=point.output_tokens, source="asked for")


def _check(point: ServingPoint, factors: Factors) -> None:
    for where, value in (
        ("input tokens", point.input_tokens),
        ("output tokens", point.output_tokens),
        ("concurrency", point.concurrency),
        ("tp", point.tp),
    ):
        if not math.isfinite(value) or value < 1:
            raise InputError(f"{value!r} is not a number of at least 1", where=where)
        if value > LARGEST:
            raise InputError(f"{value:g} is more than {LARGEST:g}", where=where)
    if not runs_variant(point.shape, point.variant, point.gpu):
        known = sorted(name for name in point.shape.variants if runs_variant(point.shape, name, point.gpu))
        fix = f"it has for: {', '.join(known)}" if known else "choose another GPU"
        raise InputError(f"{point.gpu.name} has no kernels for {point.variant}", where="dtype", fix=fix)
    if not tp_runs(point.shape, point.tp):
        possible = ", ".join(str(tp) for tp in (1, 2, 4, 8, 16) if tp_runs(point.shape, tp))
        raise InputError(
            f"{point.shape.name} cannot be split over {point.tp} GPUs", where="tp", fix=f"it can over {possible}"
        )
    if point.tp > 1:
        factors.ring(point.gpu, point.tp)
