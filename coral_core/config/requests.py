"""The requests of a scenario's evaluation: drawn from its statistics, or its traces replayed."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import numpy as np

from coral_core.config.resolve import ResolvedModel, ResolvedScenario
from coral_core.config.scenario import LengthsSpec, ModelSpec, TraceSpec, WorkloadSpec
from coral_core.domain.workload import Trace
from coral_core.workload import TokenMoments, TokenQuantiles, named_workload, read_trace, scale_rate, synthesize


def request_traces(resolved: ResolvedScenario, *, seed: int) -> dict[str, Trace]:
    """Per model all requests that arrive within the scenario's epochs; the same seed, the same requests.

    Arrivals are a renewal process of the model's rate and the workload's burstiness that begins at 0; lengths have the
    distribution of the named statistics, or the means given and `cv_tokens`. A trace is replayed at the model's rate, from its
    start again where it is shorter; the seed does not change it. Requests longer than the model's context are cut to it.
    Each model draws its own numbers, so adding a model leaves the others as they are.
    """
    scenario = resolved.scenario
    horizon_s = scenario.epochs.count * scenario.epochs.duration_s
    return {
        model.shape.name: _within_context(_requests(spec, model, scenario.workload, horizon_s, seed), model)
        for spec, model in zip(scenario.models, resolved.models, strict=True)
    }


def _requests(spec: ModelSpec, model: ResolvedModel, workload: WorkloadSpec, horizon_s: float, seed: int) -> Trace:
    rate = model.demand.requests_per_s
    if rate == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return Trace(
            name=model.shape.name,
            arrival_s=np.zeros(0),
            input_tokens=nothing,
            output_tokens=nothing,
            source="no demand",
        )
    if isinstance(spec.lengths, TraceSpec):
        return _replayed(scale_rate(read_trace(spec.lengths.trace, spec.lengths.format), rate), rate, horizon_s)
    prompt: TokenMoments | TokenQuantiles
    response: TokenMoments | TokenQuantiles
    if isinstance(spec.lengths, LengthsSpec):
        means = (spec.lengths.mean_input_tokens, spec.lengths.mean_output_tokens)
        prompt, response = (_moments(mean, workload.cv_tokens) for mean in means)
    else:
        statistics = named_workload(spec.lengths)
        prompt, response = statistics.drawn_input_tokens, statistics.drawn_output_tokens
    expected = rate * horizon_s
    # enough to reach the horizon but for one case in a billion; then the last seconds are quiet
    enough = math.ceil(expected + 6 * max(workload.burstiness, 1.0) * math.sqrt(expected)) + 10
    trace = synthesize(
        name=model.shape.name,
        requests=enough,
        requests_per_s=rate,
        input_tokens=prompt,
        output_tokens=response,
        rng=np.random.default_rng([seed, zlib.crc32(model.shape.name.encode())]),
        burstiness=workload.burstiness,
    )
    return _first(trace, horizon_s)


def _moments(mean_tokens: float, cv: float) -> TokenMoments:
    """A mean of at most one token leaves no room for spread."""
    return TokenMoments(mean_tokens=max(mean_tokens, 1.0), cv=cv if mean_tokens > 1 else 0.0)


def _replayed(trace: Trace, rate: float, horizon_s: float) -> Trace:
    """The trace from its start, again and again with one mean gap between."""
    period_s = len(trace) / rate
    times = math.ceil(horizon_s / period_s)
    shift_s = np.repeat(np.arange(times) * period_s, len(trace))
    repeated = replace(
        trace,
        arrival_s=np.tile(trace.arrival_s - trace.arrival_s[0], times) + shift_s,
        input_tokens=np.tile(trace.input_tokens, times),
        output_tokens=np.tile(trace.output_tokens, times),
    )
    return _first(repeated, horizon_s)


def _first(trace: Trace, horizon_s: float) -> Trace:
    n = int(np.searchsorted(trace.arrival_s, horizon_s, side="left"))
    return replace(
        trace,
        arrival_s=trace.arrival_s[:n],
        input_tokens=trace.input_tokens[:n],
        output_tokens=trace.output_tokens[:n],
    )


def _within_context(trace: Trace, model: ResolvedModel) -> Trace:
    context = model.shape.max_context_tokens
    output = np.minimum(trace.output_tokens, context - 1)
    return replace(trace, input_tokens=np.minimum(trace.input_tokens, context - output), output_tokens=output)
