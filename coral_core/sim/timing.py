"""A node's timing and KV room from hardware and model: the same layer times that capacities T^ rest on.

A node's timing splits `perf.roofline`'s layer time by what each kernel depends on: the LM head on sampled rows, attention
on KV read and on attended pairs, all others (GEMMs, experts, all-reduce, ...) on the tokens of a batch. Batches of the planner's
mean lengths take the planner's time (to the tables' interpolation); other batches take theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from coral_core.domain import model_math
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths, Phase
from coral_core.perf import memory
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import Factors
from coral_core.perf.network import activation_bytes_per_token
from coral_core.perf.roofline import LayerTime, Step, attended_tokens_per_prompt_token, layer_time, mean_context_tokens
from coral_core.perf.search import Layout
from coral_core.sim.inputs import NodeTiming, SimModel
from coral_core.sim.profiled import ProfiledTiming

GRID = np.concatenate([[0.0], np.unique(np.rint(np.geomspace(1, 32768, 96)))])
"""Batch sizes in tokens at which layer times are tabulated: steps of at most 12%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as it is served and asked for, and what estimates assume.

    `measured`: timings by phase, node configuration and TP that come before estimates: those that capacities rest on.
    """

    shape: ModelShape
    variant: str
    lengths: Lengths
    assumptions: CapacityAssumptions
    factors: Factors
    measured: Mapping[tuple[Phase, str, int], ProfiledTiming] = field(default_factory=dict)

    @property
    def kept_tokens(self) -> float:
        """KV tokens a decoding request of mean lengths reads in a mean layer."""
        return model_math.kept_tokens_per_layer(self.shape, mean_context_tokens(self.lengths))

    @property
    def pairs_per_prompt_token(self) -> float:
        """Attended tokens per token of a mean prompt in a mean layer."""
        return attended_tokens_per_prompt_token(self.shape, self.lengths.mean_input_tokens)


def sim_model(
    served: Served,
    *,
    max_wait_s: float = math.inf,
    prompt_s: float = 0.0,
    prompt_token_s: float = 0.0,
    max_handover_s: float = math.inf,
) -> SimModel:
    """What the simulator must know of the model itself, and when its requests are turned away."""
    window = served.shape.sliding_window
    return SimModel(
        name=served.shape.name,
        kv_bytes_per_token=model_math.kv_bytes_per_token_per_layer(served.shape, served.variant),
        activation_bytes_per_token=activation_bytes_per_token(served.shape, served.assumptions),
        window_tokens=math.inf if window is None else window.window_tokens,
        window_frac=0.0 if window is None else window.layers / served.shape.layers,
        max_wait_s=max_wait_s,
        prompt_s=prompt_s,
        prompt_token_s=prompt_token_s,
        max_handover_s=max_handover_s,
    )


def node_timing(served: Served, config: NodeConfig, layers: int, layout: Layout) -> NodeTiming:
    """Timing of one data-parallel replica of a node that holds `layers` in `layout`.

    Raises DataGapError where a GPU's efficiency is not known.
    """

    def times(step: Step) -> LayerTime:
        return layer_time(
            shape=served.shape,
            variant=served.variant,
            gpu=config.gpu,
            tp=layout.tp,
            step=step,
            lengths=served.lengths,
            factors=served.factors,
            assumptions=served.assumptions,
        )

    one, none, tokens = np.ones(1), np.zeros(1), GRID[1:]
    batch = times(Step(decode_requests=tokens, prefill_tokens=0 * tokens, prompts=0 * tokens, produced=tokens))
    decode = times(Step(decode_requests=one, prefill_tokens=none, prompts=none, produced=one))
    prompt = times(Step(decode_requests=none, prefill_tokens=one, prompts=none, produced=one))
    held = -(-layers // layout.pp)
    # Whatever kernel is neither attention nor LM head depends on the tokens of the batch alone.
    token_s = held * (batch.total_s - batch.attention_s - batch.lm_head_s - batch.overhead_s)
    row_s = held * batch.lm_head_s
    return NodeTiming(
        grid=tuple(GRID.tolist()),
        token_s=(float(token_s[0]), *token_s.tolist()),
        row_s=(0.0, *row_s.tolist()),
        fixed_s=held * batch.overhead_s + served.assumptions.step_overhead_s,
        kept_token_s=held * float(decode.attention_s[0]) / served.kept_tokens,
        pair_s=held * float(prompt.attention_s[0]) / served.pairs_per_prompt_token,
        depth=layout.pp,
        inner_hop_s=served.assumptions.inner_hop_latency_s,
        inner_hop_token_s=_link_token_s(served, config),
    )


def measured_timing(
    served: Served, config: NodeConfig, layers: int, layout: Layout, *, profile: ProfiledTiming, first: bool
) -> NodeTiming:
    """As `node_timing`, from a measured profile; `first`: a node of the first stage, which pays what a step takes besides."""
    return replace(
        profile.node(-(-layers // layout.pp), first=first),
        depth=layout.pp,
        inner_hop_s=served.assumptions.inner_hop_latency_s,
        inner_hop_token_s=_link_token_s(served, config),
    )


def _link_token_s(served: Served, config: NodeConfig) -> float:
    return activation_bytes_per_token(served.shape, served.assumptions) / config.gpu.link_bytes_per_s


def kv_blocks(
    served: Served,
    config: NodeConfig,
    layers: int,
    layout: Layout,
    *,
    batch_tokens: float,
    rows: float,
    block_tokens: int,
) -> int:
    """KV blocks of one replica beside weights and the activations of its largest batch; 0 where they do not fit."""
    held = -(-layers // layout.pp)
    size = np.array([float(batch_tokens)])
    step = Step(decode_requests=0 * size, prefill_tokens=size, prompts=0 * size + rows, produced=size)
    free_bytes = memory.usable_bytes(config.gpu, served.assumptions)
    free_bytes -= held * memory.weight_bytes_per_gpu_layer(served.shape, served.variant, layout.tp)
    free_bytes -= float(memory.activation_bytes_per_gpu(served.shape, layout.tp, step)[0])
    token_bytes = held * memory.kv_bytes_per_gpu_layer(served.shape, served.variant, layout.tp, 1.0)
    return max(int(free_bytes / (token_bytes * block_tokens)), 0)
