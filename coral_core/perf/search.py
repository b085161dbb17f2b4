"""The best batch and internal layout of one node, for every number of stages and of layers held.

Data: per layout TP x PP x DP = n and per batch size b the layer time t(b), the step's tokens m(b) and product u(b);
the stage's latency budget beta and the rest rho of the pipeline's (both by the number of stages S), hop h(b) (S > 1).
Variables: the layout, integer b in 1..b_max.
Constraints, for j layers of which a GPU holds g = ceil(j/PP):
    latency    j t + PP o + (PP-1) h_inner + h <= beta; aggregated also ceil(in/C) times its compute part <= beta_ttft
    memory     g (weights + KV of live requests) + activations <= usable, per GPU; live requests per replica
               = max(rate (latency + h + rho) / DP, b): Little's law, the other stages taking at most rho; prefill holds
               another b, whose KV is being sent
Objective: maximise rate = min( DP u / (g t + o), NIC limit(j), what the memory constraint leaves ): a node may idle
between steps, so more of any resource never lowers the result.

A hop adds latency, not occupancy. The search is exact over all b up to DENSE; above, a grid of ratio GRID_RATIO is
refined around its best point.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths, Phase
from coral_core.errors import DataGapError
from coral_core.perf import memory, network
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.errors import pessimistic_factor
from coral_core.perf.factors import Factors
from coral_core.perf.measured import measured_fixed_s, measured_layer_s, profiled_tps
from coral_core.perf.profile import Profile
from coral_core.perf.roofline import LayerTime, Step, layer_time, mean_context_tokens, step_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DENSE = 48
GRID_RATIO = 1.06
REFINEMENTS = 25
PREFILL_KV_BATCHES = 2
"""Batches whose KV a prefill GPU holds at least: the one in computation and the one being sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Tensor, pipeline and data parallelism inside a node; their product is the number of GPUs."""

    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that is written so; DataGapError for anything else."""
        match = re.fullmatch(r"tp([1-9]\d*) pp([1-9]\d*) dp([1-9]\d*)", text)
        if match is None:
            raise DataGapError(f"layout {text!r} is not of the form 'tp2 pp1 dp4'")
        tp, pp, dp = map(int, match.groups())
        return cls(tp=tp, pp=pp, dp=dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutLimits:
    """Which layouts count: those that a runtime can run. None: no limit; `whole_node`: all GPUs share every layer."""

    tp: int | None = None
    max_pp: int | None = None
    max_dp: int | None = None
    whole_node: bool = False

    def allow(self, layout: Layout) -> bool:
        """Whether a layout is among them."""
        return (
            (self.tp is None or layout.tp == self.tp)
            and (self.max_pp is None or layout.pp <= self.max_pp)
            and (self.max_dp is None or layout.dp <= self.max_dp)
            and not (self.whole_node and layout.pp * layout.dp > 1)
        )


ANY_LAYOUT: Final = LayoutLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Latency budgets, (S,) each. `stage_s`: the bound on one stage per step, `rest_s`: on all other stages together.

    `first_token_s` bounds a prompt's chunks in one stage (aggregated; infinite otherwise). `hops`: S > 1.
    """

    stage_s: Floats
    rest_s: Floats
    first_token_s: Floats
    hops: NDArray[np.bool_]

    def only(self, stages: int) -> Budgets:
        """The budgets of one number of stages, (1,)."""
        one = slice(stages - 1, stages)
        return Budgets(
            stage_s=self.stage_s[one],
            rest_s=self.rest_s[one],
            first_token_s=self.first_token_s[one],
            hops=self.hops[one],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that the capacity of a node depends on, but the node and its budgets."""

    shape: ModelShape
    variant: str
    phase: Phase
    lengths: Lengths
    assumptions: CapacityAssumptions
    factors: Factors
    limits: LayoutLimits = ANY_LAYOUT
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    """Measured times by node configuration; they come before estimates."""

    def profile_of(self, config: NodeConfig) -> Profile | None:
        """The profile that a configuration's capacity comes from; None where it is estimated."""
        found = self.profiles.get(config.name)
        return found if found is not None and profiled_tps(found, self.phase) else None

    @property
    def max_batch(self) -> int:
        """Largest batch per replica: the engine's limits on requests and on prompt tokens in a step."""
        limit = self.assumptions.max_batch_requests
        tokens_in = self.lengths.mean_input_tokens
        if self.phase is Phase.PREFILL:
            limit = min(limit, int(self.assumptions.max_prefill_tokens / tokens_in))
        if self.phase is Phase.AGGREGATED:
            limit = min(limit, int(self.assumptions.max_prefill_tokens * self.lengths.mean_output_tokens / tokens_in))
        return max(limit, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSteps:
    """Steps of one replica of `tp` GPUs of one type for every batch 1..b_max: (b_max,) arrays, by batch - 1."""

    step: Step
    time: LayerTime
    layer_s: Floats
    fixed_s: float
    activation_bytes: Floats


def replica_steps(question: Question, config: NodeConfig, tp: int) -> ReplicaSteps:
    """Tabulate all batches; the same for all layouts with this `tp` of nodes with this GPU, unless a profile says more.

    `layer_s` and `fixed_s` are a profile's where there is one; `time` is the estimate in any case.
    """
    step = step_of(question.phase, np.arange(1.0, question.max_batch + 1), question.lengths)
    time = layer_time(
        shape=question.shape,
        variant=question.variant,
        gpu=config.gpu,
        tp=tp,
        step=step,
        lengths=question.lengths,
        factors=question.factors,
        assumptions=question.assumptions,
    )
    activation_bytes = memory.activation_bytes_per_gpu(question.shape, tp, step)
    layer_s, fixed_s = time.total_s, question.assumptions.step_overhead_s
    if (profile := question.profile_of(config)) is not None:
        layer_s = measured_layer_s(profile, question.phase, tp, step, question.lengths)
        fixed_s = measured_fixed_s(profile, question.phase, tp, assumed_s=fixed_s)
    elif question.assumptions.pessimistic:
        factor = pessimistic_factor(config.gpu.name, question.phase)
        layer_s, fixed_s = factor * layer_s, factor * fixed_s
    return ReplicaSteps(step=step, time=time, layer_s=layer_s, fixed_s=fixed_s, activation_bytes=activation_bytes)


def layouts(question: Question, config: NodeConfig) -> list[Layout]:
    """Internal layouts the engine can run: heads and MLP widths divide by TP; KV heads divide by it or into it.

    TP only at sizes whose all-reduce is known on this GPU, or that were measured where there is a profile; an MLA latent
    is not split, so it sets no limit.
    """
    shape, n = question.shape, config.gpu_count
    profile = question.profile_of(config)
    measured = None if profile is None else profiled_tps(profile, question.phase)
    possible = [
        Layout(tp=tp, pp=pp, dp=n // tp // pp)
        for tp in range(1, n + 1)
        if n % tp == 0 and tp_runs(shape, tp) and (tp == 1 or (config.gpu.name, tp) in question.factors.all_reduce)
        if measured is None or tp in measured
        for pp in range(1, n // tp + 1)
        if n // tp % pp == 0 and pp <= shape.layers
    ]
    return [layout for layout in possible if question.limits.allow(layout)]


def tp_runs(shape: ModelShape, tp: int) -> bool:
    """Whether heads and MLP widths of a model can be split over `tp` GPUs; KV heads are split, or copied."""
    widths = [shape.heads, shape.intermediate] + ([] if shape.moe is None else [shape.moe.intermediate])
    kv_heads_fit = shape.mla is not None or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    return kv_heads_fit and all(width % tp == 0 for width in widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best throughput, (S, L), and the batch that gives it; 0 where there is none."""

    rate: Floats
    batch: Ints


def best_batch(question: Question, config: NodeConfig, layout: Layout, steps: ReplicaSteps, budgets: Budgets) -> Best:
    """Search all batches of one layout, for all S and all j = 1..L at once."""
    layers = np.arange(1, question.shape.layers + 1)
    evaluator = Evaluator(question, config, layout, steps, budgets)
    grid = _grid(question.max_batch)
    values = evaluator.rates(layers[None, :, None], grid[None, None, :])
    at = values.argmax(axis=2)
    rate, batch = np.take_along_axis(values, at[..., None], axis=2)[..., 0], grid[at]
    if grid[-1] > DENSE:
        low, high = grid[np.maximum(at - 1, 0)], grid[np.minimum(at + 1, len(grid) - 1)]
        fine = np.rint(np.linspace(low, high, REFINEMENTS, axis=2)).astype(np.int64)
        values = evaluator.rates(layers[None, :, None], fine)
        at = values.argmax(axis=2)
        fine_rate = np.take_along_axis(values, at[..., None], axis=2)[..., 0]
        better = fine_rate > rate
        rate = np.where(better, fine_rate, rate)
        batch = np.where(better, np.take_along_axis(fine, at[..., None], axis=2)[..., 0], batch)
    return Best(rate=rate, batch=np.where(rate > 0, batch, 0))


def _grid(max_batch: int) -> Ints:
    dense = np.arange(1, min(max_batch, DENSE) + 1)
    if max_batch <= DENSE:
        return dense
    count = int(np.ceil(np.log(max_batch / DENSE) / np.log(GRID_RATIO))) + 1
    return np.unique(np.concatenate([dense, np.rint(np.geomspace(DENSE, max_batch, count)).astype(np.int64)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One step of a layout, arrays of (S, layers, batch) or of shapes that broadcast to it."""

    latency_s: Floats
    hop_s: Floats
    residence_s: Floats
    rate: Floats
    nic_rate: Floats
    memory_rate: Floats
    in_time: NDArray[np.bool_]


class Evaluator:
    """Rates of one layout for (S, layers, batch) arrays that broadcast together."""

    def __init__(
        self, question: Question, config: NodeConfig, layout: Layout, steps: ReplicaSteps, budgets: Budgets
    ) -> None:
        self.question, self.config, self.layout = question, config, layout
        self.steps, self.budgets = steps, budgets
        shape, variant, assumptions = question.shape, question.variant, question.assumptions
        lengths, tp = question.lengths, layout.tp
        tokens = steps.step.tokens
        self.hop_s = network.hop_time(shape=shape, config=config, dp=layout.dp, tokens=tokens, assumptions=assumptions)
        inner = network.inner_hop_time(shape=shape, config=config, tokens=tokens, assumptions=assumptions)
        self.fixed_s = layout.pp * steps.fixed_s + (layout.pp - 1) * inner
        self.weights = memory.weight_bytes_per_gpu_layer(shape, variant, tp)
        self.kv_decode = memory.kv_bytes_per_gpu_layer(shape, variant, tp, mean_context_tokens(lengths))
        self.kv_prompt = memory.kv_bytes_per_gpu_layer(shape, variant, tp, lengths.mean_input_tokens)
        self.free = memory.usable_bytes(config.gpu, assumptions)
        self.least_prefilling = 1.0 if question.phase is Phase.AGGREGATED else 0.0

    def latency_s(self, layers: Ints, batch: Ints) -> Floats:
        """Compute latency of a step through the node."""
        result: Floats = layers * self.steps.layer_s[batch - 1] + self.fixed_s[batch - 1]
        return result

    def occupancy_s(self, layers: Ints, batch: Ints) -> Floats:
        """Time a step occupies the slowest internal stage."""
        held = -(-layers // self.layout.pp)
        result: Floats = held * self.steps.layer_s[batch - 1] + self.steps.fixed_s
        return result

    def chunks(self, batch: Ints) -> Floats:
        """Steps that one prompt takes (aggregated)."""
        result: Floats = np.ceil(self.question.lengths.mean_output_tokens / batch)
        return result

    def nic_rate(self, layers: Ints) -> Floats:
        """The NIC's limit, (S, L, 1)."""
        question = self.question
        limits = [
            network.nic_limit(
                self.config,
                network.nic_bytes_per_unit(
                    shape=question.shape,
                    variant=question.variant,
                    phase=question.phase,
                    lengths=question.lengths,
                    hops=hops,
                    layers=layers.astype(np.float64),
                    assumptions=question.assumptions,
                ),
                question.assumptions,
            )
            for hops in (False, True)
        ]
        return np.where(self.budgets.hops[:, None, None], limits[1], limits[0])

    def kv_bytes(self, rate: Floats, residence_s: Floats, batch: Ints) -> Floats:
        """KV on one GPU per layer held, at a node's `rate`."""
        if self.question.phase is Phase.PREFILL:
            prompts_s = residence_s / self.layout.dp / self.question.lengths.mean_input_tokens
            live: Floats = np.maximum(rate * prompts_s, batch) + (PREFILL_KV_BATCHES - 1) * batch
            return live * self.kv_prompt
        decoding_s, prefilling_s = self.replica_load(residence_s, batch)
        decoding: Floats = np.maximum(rate * decoding_s, batch) * self.kv_decode
        return decoding + np.maximum(rate * prefilling_s, self.least_prefilling) * self.kv_prompt

    def replica_load(self, residence_s: Floats, batch: Ints) -> tuple[Floats, Floats]:
        """Decoding and prefilling requests per replica and unit of the node's rate (Little's law), in seconds.

        A prompt holds KV while its chunks pass; it is charged in full from its first chunk.
        """
        if self.question.phase is Phase.DECODE:
            return residence_s / self.layout.dp, np.zeros_like(residence_s)
        per_replica = residence_s / self.layout.dp
        return self.question.lengths.mean_output_tokens * per_replica, self.chunks(batch) * per_replica

    def memory_rate(self, spare: Floats, residence_s: Floats, batch: Ints) -> Floats:
        """The largest rate whose KV fits into `spare` bytes per layer held; 0 where not even the batch itself does."""
        if self.question.phase is Phase.PREFILL:
            prompts_s = residence_s / self.layout.dp / self.question.lengths.mean_input_tokens
            prompts = spare / self.kv_prompt - (PREFILL_KV_BATCHES - 1) * batch
            return np.where(prompts >= batch, prompts / prompts_s, 0.0)
        decoding_s, prefilling_s = self.replica_load(residence_s, batch)
        decoding, prefilling = decoding_s * self.kv_decode, prefilling_s * self.kv_prompt
        floor_decoding, floor_prefilling = batch * self.kv_decode, self.least_prefilling * self.kv_prompt
        # KV is the sum of two maxima, each of a line and a floor: it fits where all four sums do.
        with np.errstate(divide="ignore"):
            both = np.minimum(spare / (decoding + prefilling), (spare - floor_prefilling) / decoding)
            most = np.where(prefilling > 0, np.minimum(both, (spare - floor_decoding) / prefilling), both)
        result: Floats = np.where(floor_decoding + floor_prefilling <= spare, most, 0.0)
        return result

    def state(self, layers: Ints, batch: Ints) -> State:
        """What a step looks like, and which constraints hold."""
        budgets, layout = self.budgets, self.layout
        index = batch - 1
        latency = self.latency_s(layers, batch)
        hop = np.where(budgets.hops[:, None, None], self.hop_s[index], 0.0)
        nic_rate = self.nic_rate(layers)
        in_time = latency + hop <= budgets.stage_s[:, None, None]
        if self.question.phase is Phase.AGGREGATED:
            in_time &= self.chunks(batch) * latency + hop <= budgets.first_token_s[:, None, None]
        held = -(-layers // layout.pp)
        residence = latency + hop + budgets.rest_s[:, None, None]
        spare = (self.free - self.steps.activation_bytes[index]) / held - self.weights
        memory_rate = self.memory_rate(spare, residence, batch)
        rate = np.minimum(layout.dp * self.steps.step.produced[index] / self.occupancy_s(layers, batch), nic_rate)
        return State(
            latency_s=latency,
            hop_s=hop,
            residence_s=residence,
            rate=np.minimum(rate, memory_rate),
            nic_rate=nic_rate,
            memory_rate=memory_rate,
            in_time=in_time,
        )

    def rates(self, layers: Ints, batch: Ints) -> Floats:
        """Throughput of the node; 0 where a constraint fails."""
        state = self.state(layers, batch)
        result: Floats = np.where(state.in_time & (layers >= self.layout.pp), state.rate, 0.0)
        return result
