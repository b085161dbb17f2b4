"""Bytes on one GPU: weights, KV cache and activations of what it holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.domain import model_math
from coral_core.domain.hardware import Gpu
from coral_core.domain.models import ModelShape
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.roofline import ACTIVATION_BYTES, Step, kv_shards

Floats = NDArray[np.float64]

LOGITS_BYTES = 6
"""Per vocabulary entry and sampled row: 16-bit logits and their 32-bit copy for sampling."""


def usable_bytes(gpu: Gpu, assumptions: CapacityAssumptions) -> float:
    """What weights, KV and activations may take on one GPU; 0 where the workspace alone is more."""
    return max(gpu.memory_bytes * assumptions.usable_memory_frac - assumptions.workspace_bytes, 0.0)


def weight_bytes_per_gpu_layer(shape: ModelShape, variant: str, tp: int) -> float:
    """Weights of one layer (with its share of embeddings and LM head) on one of `tp` GPUs."""
    return model_math.weight_bytes_per_layer(shape, variant) / tp


def kv_bytes_per_gpu_layer(shape: ModelShape, variant: str, tp: int, context_tokens: float) -> float:
    """KV cache of one request in one layer on one of `tp` GPUs."""
    kept = model_math.kept_tokens_per_layer(shape, context_tokens)
    return kept * model_math.kv_bytes_per_token_per_layer(shape, variant) / kv_shards(shape, tp)


def activation_bytes_per_gpu(shape: ModelShape, tp: int, step: Step) -> Floats:
    """Peak of temporaries of one step: residual stream and MLP (experts: of the active ones), and the sampled logits."""
    moe = shape.moe
    width = shape.intermediate if moe is None else moe.intermediate * (moe.top_k + moe.shared_experts)
    per_token = ACTIVATION_BYTES * (4 * shape.hidden + 3 * width / tp)
    return step.tokens * per_token + (step.decode_requests + step.prompts) * shape.vocab * LOGITS_BYTES / tp
