"""Time of one mean layer on one tensor-parallel group: the slower of memory and compute, kernel by kernel.

Kernels of a layer run one after the other, so their times add up; inside a kernel memory and compute overlap, so the
larger counts. `m` is the number of tokens in a step, P the parameters, E experts of which k are active:

    dense GEMMs   max( P_bytes / (MBU BW), 2 P m / (MFU(m) peak) )
    experts       fixed + bytes of touched(m) = E (1 - (1 - k/E)^m) experts + FLOPs of m k rows + those rows' bytes,
                  each over the measured kernel's rate (`factors.ExpertKernel`)
    attention     decode: KV read / (MBU BW) or its FLOPs; prefill: causal FLOPs
    elementwise   norms, rotary, activation function: activations moved / (MBU BW); of experts: in their kernel
    overhead      per small kernel and per quantised GEMM of a layer (`layer_kernels`), measured in CUDA graphs
    LM head       one row per request in the step, spread over the layers (see domain.model_math)
    all-reduce    two per layer: latency + 2 (tp-1)/tp bytes / bus bandwidth

A chunk's re-reading of its own prompt's earlier KV is not counted: it is one request's beside a whole batch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.domain import model_math
from coral_core.domain.hardware import Gpu
from coral_core.domain.models import ModelShape, Moe
from coral_core.domain.workload import Lengths, Phase
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import Factors

Floats = NDArray[np.float64]

ACTIVATION_BYTES = 2
"""Activations are 16 bit in every variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one iteration of one replica carries, elementwise over batch sizes.

    `produced` is in the phase's unit: tokens for prefill and decode, requests for aggregated.
    """

    decode_requests: Floats
    prefill_tokens: Floats
    prompts: Floats
    produced: Floats

    @property
    def tokens(self) -> Floats:
        """All tokens that pass the layers."""
        return self.decode_requests + self.prefill_tokens


def step_of(phase: Phase, batch: Floats, lengths: Lengths) -> Step:
    """The step of batch size `batch`: whole prompts of mean length for prefill, requests otherwise.

    Aggregated: beside `batch` decoding requests as many prompt tokens as keep the two in balance, batch * in / out.
    """
    none = np.zeros_like(batch)
    if phase is Phase.DECODE:
        return Step(decode_requests=batch, prefill_tokens=none, prompts=none, produced=batch)
    if phase is Phase.PREFILL:
        tokens = batch * lengths.mean_input_tokens
        return Step(decode_requests=none, prefill_tokens=tokens, prompts=batch, produced=tokens)
    requests = batch / lengths.mean_output_tokens
    return Step(
        decode_requests=batch,
        prefill_tokens=requests * lengths.mean_input_tokens,
        prompts=requests,
        produced=requests,
    )


def mean_context_tokens(lengths: Lengths) -> float:
    """Context of a decoding request, mean over its life: the prompt and half of the output."""
    return lengths.mean_input_tokens + lengths.mean_output_tokens / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one mean layer, by kernel, elementwise over batch sizes."""

    gemm_s: Floats
    experts_s: Floats
    attention_s: Floats
    elementwise_s: Floats
    lm_head_s: Floats
    all_reduce_s: Floats
    overhead_s: float
    memory_bound: NDArray[np.bool_]

    @property
    def total_s(self) -> Floats:
        """The layer's time."""
        kernels = self.gemm_s + self.experts_s + self.attention_s + self.elementwise_s + self.lm_head_s
        return kernels + self.all_reduce_s + self.overhead_s


def layer_time(
    *,
    shape: ModelShape,
    variant: str,
    gpu: Gpu,
    tp: int,
    step: Step,
    lengths: Lengths,
    factors: Factors,
    assumptions: CapacityAssumptions,
) -> LayerTime:
    """Time of one mean layer over `tp` GPUs. Raises DataGapError where a factor is not known."""
    chosen = model_math.variant_of(shape, variant)
    counts = model_math.parameter_counts(shape)
    dense = _Gemm.of(gpu, factors, chosen.compute_dtype)
    wide = _Gemm.of(gpu, factors, "bf16")
    per_gpu = 1 / (shape.layers * tp)

    gemm_memory, gemm_compute = dense.times(counts.body * per_gpu, chosen.weight_bits, step.tokens)
    head_rows = step.decode_requests + step.prompts
    head_memory, head_compute = wide.times(counts.embedding * per_gpu, chosen.embedding_bits, head_rows)
    expert_fixed, expert_memory, expert_compute = _expert_times(
        shape=shape, variant=variant, gpu=gpu, tp=tp, tokens=step.tokens, factors=factors
    )
    attention_memory, attention_compute = _attention_times(
        shape=shape, variant=variant, gpu=gpu, tp=tp, step=step, lengths=lengths, factors=factors
    )
    kernels = layer_kernels(shape, quantised=dense.dtype == "fp8")
    return LayerTime(
        gemm_s=np.maximum(gemm_memory, gemm_compute),
        experts_s=expert_fixed + expert_memory + expert_compute,
        attention_s=attention_memory + attention_compute,
        elementwise_s=_elementwise_bytes(shape, tp) * step.tokens / wide.bandwidth_bytes_per_s,
        lm_head_s=np.maximum(head_memory, head_compute),
        all_reduce_s=_all_reduce_time(shape, gpu, tp, step.tokens, factors),
        overhead_s=kernels.small * assumptions.kernel_overhead_s
        + kernels.quantised * assumptions.quantised_gemm_overhead_s,
        memory_bound=gemm_memory + expert_memory + attention_memory > gemm_compute + expert_compute + attention_compute,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gemm:
    """A GPU's matrix units in one dtype, as (MBU BW, peak, MFU)."""

    bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    gpu: str
    dtype: str
    factors: Factors

    @classmethod
    def of(cls, gpu: Gpu, factors: Factors, wanted: str) -> _Gemm:
        dtype = factors.compute_dtype(gpu, wanted)
        row = factors.efficiency[gpu.name, dtype]
        return cls(
            bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s * row.gemm_bandwidth_frac,
            peak_flops_per_s=gpu.compute_flops_per_s[dtype],
            gpu=gpu.name,
            dtype=dtype,
            factors=factors,
        )

    def times(self, params: float, bits: float, rows: Floats) -> tuple[Floats, Floats]:
        """Memory and compute seconds of a GEMM of `rows` by `params`."""
        row = self.factors.efficiency[self.gpu, self.dtype]
        peak_frac = row.gemm_peak_frac_at(np.maximum(rows, 1e-9))
        memory = np.full_like(rows, params * bits / 8 / self.bandwidth_bytes_per_s)
        return memory, 2 * params * rows / (self.peak_flops_per_s * peak_frac)


def touched_experts(moe: Moe, tokens: Floats) -> Floats:
    """Expected distinct experts of one MoE layer that `tokens` tokens use, routing uniform and independent."""
    return moe.experts * (1 - (1 - moe.top_k / moe.experts) ** tokens)


def _expert_times(
    *, shape: ModelShape, variant: str, gpu: Gpu, tp: int, tokens: Floats, factors: Factors
) -> tuple[float, Floats, Floats]:
    """Seconds per call, of the weights read, and of the rows computed and moved."""
    if shape.moe is None:
        return 0.0, np.zeros_like(tokens), np.zeros_like(tokens)
    chosen = model_math.variant_of(shape, variant)
    counts = model_math.parameter_counts(shape)
    kernel = factors.expert_kernel(gpu, chosen)
    peak = gpu.compute_flops_per_s[factors.compute_dtype(gpu, chosen.expert_compute_dtype)] * kernel.peak_frac
    share = counts.moe_layers / shape.layers
    one, rows = share * counts.expert / tp, shape.moe.top_k * tokens
    read = touched_experts(shape.moe, tokens) * one * chosen.expert_bits / 8 / kernel.bandwidth_frac
    moved = share * kernel.activation_passes * rows * shape.hidden * ACTIVATION_BYTES
    bandwidth = gpu.memory_bandwidth_bytes_per_s
    return share * kernel.fixed_s, read / bandwidth, 2 * one * rows / peak + moved / bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernels:
    """Kernels of one layer that cost by being there: small ones, and GEMMs that quantise their activations first."""

    small: int
    quantised: int


def layer_kernels(shape: ModelShape, *, quantised: bool) -> LayerKernels:
    """Counted from the layer's structure; experts are one measured kernel of their own, with its fixed part.

    Two norms, the QKV and output projections, rotary, cache write and attention in two parts; MLA adds four
    projections, two norms and a concatenation; a router; dense or shared MLPs: two GEMMs and an activation.
    """
    small, gemms = 8, 2
    if shape.mla is not None:
        small, gemms = small + 7, gemms + 2
    if shape.moe is not None:
        small += 1
    if shape.moe is None or shape.moe.shared_experts:
        small, gemms = small + 3, gemms + 2
    return LayerKernels(small=small, quantised=gemms if quantised else 0)


def computes_in_8_bits(shape: ModelShape, variant: str, gpu: Gpu, factors: Factors) -> bool:
    """Whether the dense GEMMs of a variant run in 8 bit on this GPU, so that activations are quantised before each."""
    return factors.compute_dtype(gpu, model_math.variant_of(shape, variant).compute_dtype) == "fp8"


def _attention_times(
    *, shape: ModelShape, variant: str, gpu: Gpu, tp: int, step: Step, lengths: Lengths, factors: Factors
) -> tuple[Floats, Floats]:
    """Memory-bound and compute-bound seconds, each 0 where the other holds (decode); prefill is compute."""
    dtype = factors.compute_dtype(gpu, "bf16")
    row = factors.efficiency[gpu.name, dtype]
    peak_frac = row.attention_peak_frac_at(lengths.mean_input_tokens)
    flops_per_s = gpu.compute_flops_per_s[dtype] * peak_frac * tp
    prefill_flops, decode_flops = attention_flops_per_pair(shape)

    kept = model_math.kept_tokens_per_layer(shape, mean_context_tokens(lengths))
    bytes_per_gpu = kept * model_math.kv_bytes_per_token_per_layer(shape, variant) / kv_shards(shape, tp)
    read_s = bytes_per_gpu / (gpu.memory_bandwidth_bytes_per_s * row.attention_bandwidth_frac)
    compute_s = kept * decode_flops / flops_per_s
    prefill_s = attended_tokens_per_prompt_token(shape, lengths.mean_input_tokens) * prefill_flops / flops_per_s
    memory = step.decode_requests * (read_s if read_s >= compute_s else 0.0)
    compute = step.decode_requests * (compute_s if compute_s > read_s else 0.0)
    return memory, compute + step.prefill_tokens * prefill_s


def _elementwise_bytes(shape: ModelShape, tp: int) -> float:
    # Two norms that each read and write residual and output; rotary and cache write of q, k, v; gate times up.
    moe_frac = 0.0 if shape.moe is None else 1 - shape.moe.dense_layers / shape.layers
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return ACTIVATION_BYTES * (8 * shape.hidden + (2 * heads + 3 * (1 - moe_frac) * shape.intermediate) / tp)


def attention_flops_per_pair(shape: ModelShape) -> tuple[float, float]:
    """FLOPs per (query token, attended token) of one layer: prefill, decode (MLA decodes in its latent space)."""
    mla = shape.mla
    if mla is None:
        both = 4.0 * shape.heads * shape.head_dim
        return both, both
    prefill = 2.0 * shape.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    return prefill, 2.0 * shape.heads * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)


def attended_tokens_per_prompt_token(shape: ModelShape, prompt_tokens: float) -> float:
    """Tokens a prompt's token attends to, mean over the prompt and the layers (causal, windows cut)."""
    causal = prompt_tokens / 2
    window = shape.sliding_window
    if window is None or window.window_tokens >= prompt_tokens:
        return causal
    cut = window.window_tokens * (1 - window.window_tokens / (2 * prompt_tokens))
    frac = window.layers / shape.layers
    return frac * cut + (1 - frac) * causal


def kv_shards(shape: ModelShape, tp: int) -> int:
    """Over how many of `tp` GPUs the KV cache is split; heads beyond that are copies, and a latent is one copy each."""
    return 1 if shape.mla is not None else min(tp, shape.kv_heads)


def _all_reduce_time(shape: ModelShape, gpu: Gpu, tp: int, tokens: Floats, factors: Factors) -> Floats:
    if tp == 1:
        return np.zeros_like(tokens)
    ring = factors.ring(gpu, tp)
    bus = min(ring.bus_bytes_per_s, gpu.link_bytes_per_s)
    message = tokens * shape.hidden * ACTIVATION_BYTES
    return 2 * (ring.latency_s + 2 * (tp - 1) / tp * message / bus)
