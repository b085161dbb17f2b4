"""Parameters, bytes and KV of a model, counted from its dimensions.

Every figure is closed-form arithmetic on a `ModelShape`; nothing is fitted. A stage of j layers is charged j/L of the
whole model: embeddings and LM head are spread over the layers as layer equivalents, and layers that differ (first
dense layers, sliding windows) enter by their mean, so that a stage's capacity does not depend on its position in the
pipeline (DESIGN 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from coral_core.domain.models import ModelShape, Variant
from coral_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of the whole model, by the part they belong to; sums over all layers where not said otherwise.

    `embedding` is the input table, `lm_head` the output matrix (0 where tied). `expert` is one routed expert of one
    layer. `dense_mlp` covers layers without experts, `routed_experts` all routed experts of all MoE layers.
    """

    attention: float
    dense_mlp: float
    routed_experts: float
    shared_experts: float
    router: float
    norms: float
    embedding: float
    lm_head: float
    expert: float
    moe_layers: int

    @property
    def total(self) -> float:
        """All stored parameters."""
        return self.body + self.routed_experts + self.embedding + self.lm_head

    @property
    def body(self) -> float:
        """What every token passes in the layers: all but routed experts, embedding and LM head."""
        return self.attention + self.dense_mlp + self.shared_experts + self.router + self.norms


def variant_of(shape: ModelShape, name: str) -> Variant:
    """The variant called `name`; raises InputError that lists the known ones."""
    try:
        return shape.variants[name]
    except KeyError:
        known = ", ".join(sorted(shape.variants)) or "none"
        raise InputError(f"model {shape.name} has no variant {name!r}", fix=f"known: {known}") from None


def attention_params_per_layer(shape: ModelShape) -> float:
    """Projections of one attention layer, grouped-query or multi-head latent, biases included."""
    mla = shape.mla
    if mla is None:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = queries + 2 * keys + shape.hidden if shape.attention_bias else 0
        return float(2 * shape.hidden * queries + 2 * shape.hidden * keys + bias)
    query_width = shape.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        query = shape.hidden * query_width
    else:
        query = mla.q_lora_rank * (shape.hidden + query_width + 1)
    down = shape.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    up = mla.kv_lora_rank * shape.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return float(query + down + up + shape.heads * mla.v_head_dim * shape.hidden)


def dense_mlp_params_per_layer(shape: ModelShape) -> float:
    """The MLP of one layer without experts."""
    return float(_mlp_matrices(shape) * shape.hidden * shape.intermediate)


def expert_params(shape: ModelShape) -> float:
    """One routed expert of one layer, its biases included; 0 for a dense model."""
    moe = shape.moe
    if moe is None:
        return 0.0
    matrices = _mlp_matrices(shape)
    bias = (matrices - 1) * moe.intermediate + shape.hidden if moe.expert_bias else 0
    return float(matrices * shape.hidden * moe.intermediate + bias)


def router_params_per_layer(shape: ModelShape) -> float:
    """The gate of one MoE layer; 0 for a dense model."""
    moe = shape.moe
    return 0.0 if moe is None else float(moe.experts * (shape.hidden + (1 if moe.expert_bias else 0)))


def parameter_counts(shape: ModelShape) -> ParameterCounts:
    """Parameters by part. Shared experts have the routed experts' width and no bias."""
    moe = shape.moe
    moe_layers = 0 if moe is None else shape.layers - moe.dense_layers
    expert = expert_params(shape)
    table = float(shape.vocab * shape.hidden)
    shared = 0 if moe is None else moe.shared_experts * _mlp_matrices(shape) * shape.hidden * moe.intermediate
    return ParameterCounts(
        attention=shape.layers * attention_params_per_layer(shape),
        dense_mlp=(shape.layers - moe_layers) * dense_mlp_params_per_layer(shape),
        routed_experts=moe_layers * expert * (0 if moe is None else moe.experts),
        shared_experts=float(moe_layers * shared),
        router=moe_layers * router_params_per_layer(shape),
        norms=float((2 * shape.layers + 1) * shape.hidden),
        embedding=table,
        lm_head=0.0 if shape.tied_embeddings else table,
        expert=expert,
        moe_layers=moe_layers,
    )


def embedding_params(shape: ModelShape) -> float:
    """Input table plus LM head (one matrix where tied)."""
    counts = parameter_counts(shape)
    return counts.embedding + counts.lm_head


def total_params(shape: ModelShape) -> float:
    """All stored parameters."""
    return parameter_counts(shape).total


def active_params(shape: ModelShape) -> float:
    """Parameters one token is multiplied with: half its FLOPs, attention scores aside.

    The input table is a lookup and does not count; the LM head does, tied or not.
    """
    counts = parameter_counts(shape)
    top_k = 0 if shape.moe is None else shape.moe.top_k
    return counts.body + counts.moe_layers * top_k * counts.expert + counts.embedding


def weight_bytes(shape: ModelShape, variant: str) -> float:
    """Stored bytes of all weights in `variant`; raises InputError for an unknown variant."""
    chosen = variant_of(shape, variant)
    counts = parameter_counts(shape)
    bits = (
        counts.body * chosen.weight_bits
        + counts.routed_experts * chosen.expert_bits
        + (counts.embedding + counts.lm_head) * chosen.embedding_bits
    )
    return bits / 8


def weight_bytes_per_layer(shape: ModelShape, variant: str) -> float:
    """Mean bytes a stage holds per layer, the share of embeddings and LM head included (see the module's text)."""
    return weight_bytes(shape, variant) / shape.layers


def layer_equivalents(shape: ModelShape, variant: str) -> float:
    """How many mean layers (by bytes) embeddings and LM head weigh."""
    outer = embedding_params(shape) * variant_of(shape, variant).embedding_bits / 8
    return outer / ((weight_bytes(shape, variant) - outer) / shape.layers)


def kv_bytes_per_token_per_layer(shape: ModelShape, variant: str) -> float:
    """KV cache of one token in one layer that keeps it; MLA: the latent and the rotary key, one copy for all heads."""
    bits = variant_of(shape, variant).kv_bits
    if shape.mla is not None:
        return (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim) * bits / 8
    return 2 * shape.kv_heads * shape.head_dim * bits / 8


def kept_tokens_per_layer(shape: ModelShape, context_tokens: float) -> float:
    """Tokens of one request that a layer keeps and attends to, mean over layers; sliding ones keep at most a window."""
    window = shape.sliding_window
    if window is None:
        return context_tokens
    sliding_frac = window.layers / shape.layers
    return sliding_frac * min(context_tokens, window.window_tokens) + (1 - sliding_frac) * context_tokens


def kv_bytes_per_request_per_layer(shape: ModelShape, variant: str, context_tokens: float) -> float:
    """KV cache of one request of `context_tokens` in one layer, mean over layers."""
    return kept_tokens_per_layer(shape, context_tokens) * kv_bytes_per_token_per_layer(shape, variant)


def _mlp_matrices(shape: ModelShape) -> int:
    return 3 if shape.gated_mlp else 2
