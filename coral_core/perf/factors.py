"""Efficiency factors: which share of a GPU's vendor peaks kernels reach, and what its all-reduce and the engine cost.

The tables under `data/` hold one row per (GPU, dtype), per (GPU, kind of expert weights), per (GPU, group size) and per
cost of the engine, each with its source and date. `coral profile fit` makes them again from reference data.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.hardware import Gpu
from coral_core.domain.models import Variant
from coral_core.errors import DataGapError
from coral_core.units import GB, US

Floats = NDArray[np.float64]

GEMM_TOKENS = (128, 512, 2048, 8192)
"""Rows of the activation matrix at which the share of peak is tabulated."""
ATTENTION_TOKENS = (1024, 4096, 16384)
"""Prompt lengths at which the prefill attention's share of peak is tabulated."""

FULL_BITS = 16
"""Weights of so many bits are not quantised."""

_EFFICIENCY_FILE = "gpu_efficiency.csv"
_EXPERTS_FILE = "expert_kernels.csv"
_ALL_REDUCE_FILE = "all_reduce.csv"
_ENGINE_FILE = "engine_costs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of vendor peaks for one GPU and compute dtype; the peaks are the GPU's own.

    `gemm_peak_frac` at GEMM_TOKENS, `attention_peak_frac` at ATTENTION_TOKENS.
    """

    gemm_bandwidth_frac: float
    gemm_peak_frac: tuple[float, ...]
    attention_bandwidth_frac: float
    attention_peak_frac: tuple[float, ...]

    def gemm_peak_frac_at(self, tokens: Floats) -> Floats:
        """Share of peak of a GEMM of `tokens` rows: power law between the tabulated points, constant outside."""
        return _power_law(tokens, GEMM_TOKENS, self.gemm_peak_frac)

    def attention_peak_frac_at(self, prompt_tokens: float) -> float:
        """Share of peak of prefill attention over a prompt of this length."""
        return float(_power_law(np.array([prompt_tokens]), ATTENTION_TOKENS, self.attention_peak_frac)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """Grouped GEMMs of one MoE layer with weights of one kind, routing included; the three parts of its time add up.

    `fixed_s` per call; the touched experts' weights at `bandwidth_frac` of the memory bandwidth (above 1 where skewed
    routing touches fewer experts than uniform routing would); FLOPs at `peak_frac` of the compute dtype's peak; and
    `activation_passes` times the routed rows (16 bit, hidden wide) through memory.
    """

    fixed_s: float
    bandwidth_frac: float
    peak_frac: float
    activation_passes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """What the engine adds to the kernels, the same on every GPU.

    `step_overhead_s` per step, `kernel_overhead_s` per small kernel of a layer, `quantised_gemm_overhead_s` per GEMM
    whose activations are quantised first: with the kernels recorded in CUDA graphs, as decode steps are. A step with
    prompts is launched kernel by kernel: it takes at least `launch_s` per kernel. The last four make a first token:
    `request_s` per request outside the steps, the steps of its own prompt times `own_steps_factor`, and
    `burst_frac` of the time that all clients' prompts take when sent at once.
    """

    step_overhead_s: float
    kernel_overhead_s: float
    quantised_gemm_overhead_s: float
    launch_s: float
    request_s: float
    own_steps_factor: float
    burst_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """A ring's bus bandwidth for large messages and its latency for small ones, by group size."""

    bus_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """All efficiency factors: by (GPU, dtype), by (GPU, kind of expert weights) and by (GPU, group size)."""

    efficiency: Mapping[tuple[str, str], Efficiency]
    experts: Mapping[tuple[str, str], ExpertKernel]
    all_reduce: Mapping[tuple[str, int], AllReduce]

    def compute_dtype(self, gpu: Gpu, wanted: str) -> str:
        """The dtype the matrix units run in for a model that wants `wanted`.

        A dtype that the GPU lacks, or whose efficiency on it is not known, is computed in 16 bit (weight-only
        quantisation: weights are still read at their own bits); bf16 falls back to fp16. Raises DataGapError where
        the GPU has no 16-bit row either, or where `wanted` is wider than 16 bit and has none.
        """
        candidates = (wanted,) if wanted == "fp32" else (wanted, "bf16", "fp16")
        for dtype in candidates:
            if dtype in gpu.compute_flops_per_s and (gpu.name, dtype) in self.efficiency:
                return dtype
        rows = ", ".join(sorted({name for name, _ in self.efficiency}))
        raise DataGapError(
            f"no efficiency of GPU {gpu.name} is known for {' or '.join(dict.fromkeys(candidates))}",
            fix=f"measure it, or add its row to coral_core/perf/data/{_EFFICIENCY_FILE}; known GPUs: {rows}",
        )

    def ring(self, gpu: Gpu, tp: int) -> AllReduce:
        """The all-reduce of `tp` GPUs. Raises DataGapError where it is not known."""
        if (gpu.name, tp) not in self.all_reduce:
            raise DataGapError(f"no all-reduce of {tp} x {gpu.name} is known", where="tp")
        return self.all_reduce[gpu.name, tp]

    def expert_kernel(self, gpu: Gpu, variant: Variant) -> ExpertKernel:
        """The kernel of a variant's experts, that of 16-bit weights where its own kind is not known on this GPU.

        Raises DataGapError where neither is.
        """
        for kind in (expert_kind(variant), "full"):
            if (gpu.name, kind) in self.experts:
                return self.experts[gpu.name, kind]
        raise DataGapError(
            f"no expert kernel of GPU {gpu.name} is known",
            fix=f"measure it, or add its row to coral_core/perf/data/{_EXPERTS_FILE}",
        )


def expert_kind(variant: Variant) -> str:
    """Which kernels run a variant's experts: `full` (16 bit), `fp8`, `mxfp4` or `int4`."""
    if variant.expert_bits >= FULL_BITS:
        return "full"
    if variant.expert_compute_dtype == "fp8":
        return "fp8"
    return "mxfp4" if variant.expert_compute_dtype == "bf16" else "int4"


@cache
def load_engine_costs() -> EngineCosts:
    """The shipped costs of the engine."""
    known = {row["cost"]: float(row["value"]) for row in _rows(_ENGINE_FILE)}
    return EngineCosts(**{item.name: known[item.name] for item in fields(EngineCosts)})


@cache
def load_factors() -> Factors:
    """The shipped tables."""
    efficiency = {(row["gpu"], row["dtype"]): _efficiency(row) for row in _rows(_EFFICIENCY_FILE)}
    all_reduce = {
        (row["gpu"], int(row["gpus"])): AllReduce(
            bus_bytes_per_s=float(row["bus_gb_per_s"]) * GB, latency_s=float(row["latency_us"]) * US
        )
        for row in _rows(_ALL_REDUCE_FILE)
    }
    experts = {
        (row["gpu"], row["weights"]): ExpertKernel(
            fixed_s=float(row["fixed_us"]) * US,
            bandwidth_frac=float(row["bandwidth_frac"]),
            peak_frac=float(row["peak_frac"]),
            activation_passes=float(row["activation_passes"]),
        )
        for row in _rows(_EXPERTS_FILE)
    }
    return Factors(efficiency=efficiency, experts=experts, all_reduce=all_reduce)


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = (files("coral_core.perf") / "data" / name).read_text(encoding="utf-8")
    yield from csv.DictReader(text.splitlines())


def _efficiency(row: Mapping[str, str]) -> Efficiency:
    return Efficiency(
        gemm_bandwidth_frac=float(row["gemm_bandwidth_frac"]),
        gemm_peak_frac=tuple(float(row[f"gemm_peak_frac_m{tokens}"]) for tokens in GEMM_TOKENS),
        attention_bandwidth_frac=float(row["attention_bandwidth_frac"]),
        attention_peak_frac=tuple(float(row[f"attention_peak_frac_{tokens}"]) for tokens in ATTENTION_TOKENS),
    )


def _power_law(x: Floats, at: tuple[int, ...], values: tuple[float, ...]) -> Floats:
    # Straight lines in log-log: with slopes below 1 the time of a GEMM never falls when it gets more rows.
    return np.exp(np.interp(np.log(x), np.log(at), np.log(values)))
