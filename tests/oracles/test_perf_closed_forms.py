"""Capacities that have a closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.domain import model_math
from coral_core.domain.hardware import Gpu, NodeConfig
from coral_core.domain.models import Mla, ModelShape, Moe
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.perf import memory
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import capacity_table
from coral_core.perf.roofline import touched_experts
from tests.fakes.perf_cases import FREE, IDEAL, REAL, factors, gpu, lengths, model, node

HUGE = 1e30
ROOMY = gpu(memory_bytes=10**15)


def one(
    shape: ModelShape,
    of: Gpu,
    phase: Phase,
    given: CapacityAssumptions,
    *,
    request: Lengths | None = None,
    nic: float = HUGE,
    stages: int = 1,
    slo: Slo | None = None,
    config: NodeConfig | None = None,
) -> np.ndarray:
    table = capacity_table(
        shape=shape,
        variant="bf16",
        phase=phase,
        slo=slo or Slo(ttft_s=1e6, tpot_s=1e6),
        lengths=request or lengths(),
        configs=[config or node(of=of, nic=nic)],
        max_stages=stages,
        assumptions=given,
        factors=factors(IDEAL),
    )
    return table.throughput[stages - 1, 0]


def limits(batch: int) -> CapacityAssumptions:
    return CapacityAssumptions(
        usable_memory_frac=1.0,
        workspace_bytes=0.0,
        kernel_overhead_s=0.0,
        step_overhead_s=0.0,
        hop_latency_s=0.0,
        nic_usable_frac=1.0,
        hop_tensors=1,
        max_batch_requests=batch,
    )


def test_compute_bound_prefill_is_peak_over_flops() -> None:
    shape, tokens = model(), 4000.0
    fast_memory = gpu(memory_bytes=10**15, bandwidth=HUGE)
    counts = model_math.parameter_counts(shape)
    per_token = 2 * counts.body + 2 * counts.embedding / tokens + shape.layers * 4 * 8 * 128 * tokens / 2
    expected = 5e13 / per_token
    found = one(shape, fast_memory, Phase.PREFILL, FREE, request=lengths(tokens, 10))
    assert found[-1] == pytest.approx(expected)
    assert found[0] == pytest.approx(expected * shape.layers)


def test_memory_bound_decode_at_batch_one_is_bandwidth_over_bytes() -> None:
    shape = model()
    counts = model_math.parameter_counts(shape)
    context = 500 + 50
    activations = 2 * (8 * 1024 + 2 * (8 + 2 * 4) * 128 + 3 * 4096)
    per_token = 2 * (counts.body + counts.lm_head) + shape.layers * (context * 2 * 2 * 4 * 128 + activations)
    found = one(shape, gpu(memory_bytes=10**15, flops=HUGE), Phase.DECODE, limits(1))
    assert found[-1] == pytest.approx(4e11 / per_token)


def test_nic_bound_prefill_sends_activations_and_kv() -> None:
    shape, nic = model(), 1e6
    kv = 2 * 2 * 4 * 128
    alone = one(shape, ROOMY, Phase.PREFILL, FREE, nic=nic)
    assert alone == pytest.approx([nic / (j * kv) for j in range(1, 7)])
    staged = one(shape, ROOMY, Phase.PREFILL, FREE, nic=nic, stages=2)
    assert staged == pytest.approx([nic / (1024 * 2 + j * kv) for j in range(1, 7)])


def test_nic_bound_decode_receives_the_prompts_kv() -> None:
    found = one(model(), ROOMY, Phase.DECODE, limits(64), nic=1e5)
    assert found == pytest.approx([1e5 / (j * 2 * 2 * 4 * 128 * 500 / 100) for j in range(1, 7)])


def test_one_aggregated_stage_needs_no_nic() -> None:
    slow = one(model(), ROOMY, Phase.AGGREGATED, limits(64), nic=1.0)
    assert slow == pytest.approx(one(model(), ROOMY, Phase.AGGREGATED, limits(64), nic=HUGE))
    assert slow[-1] > 0
    # Two stages pass every token of a request on.
    assert one(model(), ROOMY, Phase.AGGREGATED, limits(64), nic=1.0, stages=2)[0] == pytest.approx(1 / (600 * 2048))


def test_memory_bound_decode_holds_as_many_requests_as_fit() -> None:
    # One stage: rate x latency = batch, so the batch is what memory holds beside the weights.
    shape = model()
    kv = 6 * 550 * 2 * 2 * 4 * 128
    activations = 2 * (4 * 1024 + 3 * 4096) + 1000 * 6
    memory_bytes = int(model_math.weight_bytes(shape, "bf16") + 10.5 * (kv + activations))
    small = gpu(memory_bytes=memory_bytes, flops=HUGE)
    ten = one(shape, gpu(memory_bytes=10**15, flops=HUGE), Phase.DECODE, limits(10))
    assert one(shape, small, Phase.DECODE, limits(200))[-1] == pytest.approx(ten[-1])


def test_pcie_all_reduce_makes_eight_gpus_less_than_eight() -> None:
    shape = model(layers=8)
    slo = Slo(ttft_s=1e6, tpot_s=0.0006)  # one GPU holds the model, but not in time
    eight = node(count=8, nic=HUGE, of=ROOMY)

    def decode(bus: float) -> float:
        table = capacity_table(
            shape=shape,
            variant="bf16",
            phase=Phase.DECODE,
            slo=slo,
            lengths=lengths(),
            configs=[eight],
            max_stages=1,
            assumptions=limits(256),
            factors=factors(REAL, bus=bus),
        )
        return float(table.throughput[0, 0, -1])

    assert decode(1e9) < 0.8 * decode(1e12)


def test_touched_experts_match_a_simulation() -> None:
    moe = Moe(experts=12, top_k=3, intermediate=512)
    rng = np.random.default_rng(7)
    for tokens in (1, 3, 10):
        draws = [len({e for _ in range(tokens) for e in rng.permutation(12)[:3].tolist()}) for _ in range(3000)]
        assert touched_experts(moe, np.array([float(tokens)]))[0] == pytest.approx(np.mean(draws), rel=0.02)


def test_a_latent_cache_is_not_split_by_tensor_parallelism() -> None:
    mla = Mla(kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    shape = replace(model(kv_heads=8), mla=mla)
    assert memory.kv_bytes_per_gpu_layer(shape, "bf16", 8, 100.0) == 100 * (512 + 64) * 2
    # Grouped queries are split until each GPU holds one KV head, then copied.
    grouped = [memory.kv_bytes_per_gpu_layer(model(kv_heads=4), "bf16", tp, 100.0) for tp in (1, 2, 4, 8)]
    assert grouped == [100 * 2 * 2 * 128 * heads for heads in (4, 2, 1, 1)]


def test_latent_decode_attention_is_bound_by_compute_on_slow_matrix_units() -> None:
    mla = Mla(kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    shape, batch = replace(model(layers=1), mla=mla), 64
    slow = gpu(memory_bytes=10**15, flops=1e12, bandwidth=HUGE)
    counts = model_math.parameter_counts(shape)
    per_token = 2 * (counts.body + counts.lm_head) + 550 * 2 * 8 * (2 * 512 + 64)
    assert one(shape, slow, Phase.DECODE, limits(batch))[0] == pytest.approx(1e12 / per_token)
