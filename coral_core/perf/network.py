"""What the NIC allows: the time of a hop between stages, and the rate at which tokens can enter and leave a node."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.domain import model_math
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths, Phase
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.roofline import ACTIVATION_BYTES

Floats = NDArray[np.float64]


def activation_bytes_per_token(shape: ModelShape, assumptions: CapacityAssumptions) -> float:
    """What one token sends from stage to stage."""
    return float(shape.hidden * ACTIVATION_BYTES * assumptions.hop_tensors)


def hop_time(
    *, shape: ModelShape, config: NodeConfig, dp: int, tokens: Floats, assumptions: CapacityAssumptions
) -> Floats:
    """Seconds to pass a step's activations on; the `dp` replicas of a node share its NIC."""
    rate = config.nic_bytes_per_s * assumptions.nic_usable_frac / dp
    return assumptions.hop_latency_s + tokens * activation_bytes_per_token(shape, assumptions) / rate


def inner_hop_time(
    *, shape: ModelShape, config: NodeConfig, tokens: Floats, assumptions: CapacityAssumptions
) -> Floats:
    """The same between two internal stages, over the link inside the node."""
    message = tokens * activation_bytes_per_token(shape, assumptions)
    return assumptions.inner_hop_latency_s + message / config.gpu.link_bytes_per_s


def nic_bytes_per_unit(
    *,
    shape: ModelShape,
    variant: str,
    phase: Phase,
    lengths: Lengths,
    hops: bool,
    layers: Floats,
    assumptions: CapacityAssumptions,
) -> Floats:
    """Bytes that cross the NIC in its busier direction per unit of throughput, by layers held.

    Activations enter and leave where there are `hops`. Prefill also sends, and decode receives, the KV cache of the
    prompt for the layers held; it streams beside the computation, so it costs rate but no latency.
    """
    activations = activation_bytes_per_token(shape, assumptions) if hops else 0.0
    tokens_in, tokens_out = lengths.mean_input_tokens, lengths.mean_output_tokens
    if phase is Phase.AGGREGATED:
        return np.full_like(layers, activations * (tokens_in + tokens_out))
    prompt_kv = layers * model_math.kv_bytes_per_request_per_layer(shape, variant, tokens_in)
    return activations + prompt_kv / (tokens_in if phase is Phase.PREFILL else tokens_out)


def nic_limit(config: NodeConfig, bytes_per_unit: Floats, assumptions: CapacityAssumptions) -> Floats:
    """Units/s that the NIC lets through; infinite where nothing crosses it."""
    rate = config.nic_bytes_per_s * assumptions.nic_usable_frac
    return np.divide(rate, bytes_per_unit, out=np.full_like(bytes_per_unit, np.inf), where=bytes_per_unit > 0)
