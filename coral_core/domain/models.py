"""Models as the planner sees them: layers, bytes, attention pattern, experts, and the dtypes they may be served in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Mixture of experts: routed `experts` of which `top_k` are active, `shared_experts` always are.

    The first `dense_layers` layers carry a dense MLP of the model's `intermediate` instead.
    """

    experts: int
    top_k: int
    intermediate: int
    shared_experts: int = 0
    dense_layers: int = 0
    expert_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek): a compressed KV entry per token, not sharded by TP."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """`layers` of the model's layers attend to the last `window_tokens` only; the others to all."""

    window_tokens: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder-only transformer, enough to count its parameters, bytes and FLOPs.

    `published_params` is the figure its makers state, for checking; `None` where there is none.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    max_context_tokens: int
    source: str
    as_of: date
    gated_mlp: bool = True
    attention_bias: bool = False
    moe: Moe | None = None
    mla: Mla | None = None
    sliding_window: SlidingWindow | None = None
    published_params: float | None = None
    variants: Mapping[str, Variant] = field(default_factory=dict)
    default_variant: str = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to store and compute a model.

    Bits per weight include scales (MXFP4: 4.25). `expert_bits` applies to routed experts, `embedding_bits` to
    embeddings and LM head, `weight_bits` to everything else. `compute_dtype` is what the matrix units run in,
    `expert_compute_dtype` the same for experts. `kv_bits` is per element of the KV cache.
    """

    name: str
    weight_bits: float
    expert_bits: float
    embedding_bits: float
    kv_bits: float
    compute_dtype: str
    expert_compute_dtype: str
