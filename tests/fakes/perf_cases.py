"""Small models, GPUs and nodes for tests of stage capacity, and factors under which kernels reach their peaks."""

from __future__ import annotations

from datetime import date

from coral_core.domain.hardware import Gpu, LinkKind, NodeConfig
from coral_core.domain.models import ModelShape, Moe, SlidingWindow, Variant
from coral_core.domain.workload import Lengths
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import AllReduce, Efficiency, ExpertKernel, Factors

AS_OF = date(2026, 11, 29)


def variant(name: str, *, bits: float = 16, dtype: str = "bf16") -> Variant:
    return Variant(
        name=name,
        weight_bits=bits,
        expert_bits=bits,
        embedding_bits=16,
        kv_bits=16,
        compute_dtype=dtype,
        expert_compute_dtype=dtype,
    )


def model(
    *,
    layers: int = 6,
    hidden: int = 1024,
    heads: int = 8,
    kv_heads: int = 4,
    intermediate: int = 4096,
    vocab: int = 1000,
    moe: Moe | None = None,
    window: SlidingWindow | None = None,
) -> ModelShape:
    return ModelShape(
        name="toy",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=intermediate,
        vocab=vocab,
        tied_embeddings=False,
        max_context_tokens=100_000,
        source="test",
        as_of=AS_OF,
        moe=moe,
        sliding_window=window,
        variants={
            "bf16": variant("bf16"),
            "fp8": variant("fp8", bits=8, dtype="fp8"),
            "fp32": variant("fp32", bits=32, dtype="fp32"),
        },
    )


def gpu(
    name: str = "toy",
    *,
    memory_bytes: int = 4 * 10**9,
    bandwidth: float = 4e11,
    flops: float = 5e13,
    dtypes: tuple[str, ...] = ("bf16",),
    link: float = 1e11,
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        compute_flops_per_s={dtype: flops * (2 if dtype == "fp8" else 1) for dtype in dtypes},
        link_kind=LinkKind.NVLINK,
        link_bytes_per_s=link,
        source="test",
        as_of=AS_OF,
    )


def node(
    name: str = "node", *, count: int = 1, nic: float = 2e9, of: Gpu | None = None, source: str = "test"
) -> NodeConfig:
    return NodeConfig(
        name=name,
        gpu=gpu() if of is None else of,
        gpu_count=count,
        nic_bytes_per_s=nic,
        cloud="x",
        source=source,
        as_of=AS_OF,
    )


def lengths(tokens_in: float = 500.0, tokens_out: float = 100.0) -> Lengths:
    return Lengths(mean_input_tokens=tokens_in, mean_output_tokens=tokens_out, source="test")


IDEAL = Efficiency(
    gemm_bandwidth_frac=1.0,
    gemm_peak_frac=(1.0, 1.0, 1.0, 1.0),
    attention_bandwidth_frac=1.0,
    attention_peak_frac=(1.0, 1.0, 1.0),
)
REAL = Efficiency(
    gemm_bandwidth_frac=0.8,
    gemm_peak_frac=(0.3, 0.7, 0.8, 0.75),
    attention_bandwidth_frac=0.75,
    attention_peak_frac=(0.3, 0.5, 0.6),
)
IDEAL_EXPERTS = ExpertKernel(fixed_s=0.0, bandwidth_frac=1.0, peak_frac=1.0, activation_passes=0.0)
REAL_EXPERTS = ExpertKernel(fixed_s=2e-5, bandwidth_frac=0.8, peak_frac=0.4, activation_passes=3.0)


def factors(row: Efficiency = REAL, *, bus: float = 5e10, latency_s: float = 1e-5, dtype: str = "bf16") -> Factors:
    return Factors(
        efficiency={("toy", dtype): row},
        experts={("toy", "full"): REAL_EXPERTS if row is REAL else IDEAL_EXPERTS},
        all_reduce={("toy", n): AllReduce(bus_bytes_per_s=bus / n, latency_s=latency_s) for n in (2, 4, 8)},
    )


FREE = CapacityAssumptions(
    usable_memory_frac=1.0,
    workspace_bytes=0.0,
    kernel_overhead_s=0.0,
    quantised_gemm_overhead_s=0.0,
    step_overhead_s=0.0,
    hop_latency_s=0.0,
    inner_hop_latency_s=0.0,
    nic_usable_frac=1.0,
    hop_tensors=1,
)
"""No overheads: what remains is the roofline."""
