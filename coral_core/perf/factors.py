"""Efficiency factors: which share of a GPU's vendor peaks kernels reach, and what its all-reduce costs.

The two tables under `data/` hold one row per (GPU, dtype) and per (GPU, group size), each with its source and date.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.hardware import Gpu
from coral_core.errors import DataGapError
from coral_core.units import GB, US

Floats = NDArray[np.float64]

GEMM_TOKENS = (128, 512, 2048, 8192)
"""Rows of the activation matrix at which the share of peak is tabulated."""
ATTENTION_TOKENS = (1024, 4096, 16384)
"""Prompt lengths at which the prefill attention's share of peak is tabulated."""

_EFFICIENCY_FILE = "gpu_efficiency.csv"
_ALL_REDUCE_FILE = "all_reduce.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of vendor peaks for one GPU and compute dtype; the peaks are the GPU's own.

    `gemm_peak_frac` at GEMM_TOKENS, `attention_peak_frac` at ATTENTION_TOKENS. `expert_peak_frac` caps grouped expert
    GEMMs; below the cap they are bound by the bandwidth of the experts they touch.
    """

    gemm_bandwidth_frac: float
    gemm_peak_frac: tuple[float, ...]
    expert_peak_frac: float
    attention_bandwidth_frac: float
    attention_peak_frac: tuple[float, ...]

    def gemm_peak_frac_at(self, tokens: Floats) -> Floats:
        """Share of peak of a GEMM of `tokens` rows: power law between the tabulated points, constant outside."""
        return _power_law(tokens, GEMM_TOKENS, self.gemm_peak_frac)

    def attention_peak_frac_at(self, prompt_tokens: float) -> float:
        """Share of peak of prefill attention over a prompt of this length."""
        return float(_power_law(np.array([prompt_tokens]), ATTENTION_TOKENS, self.attention_peak_frac)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """A ring's bus bandwidth for large messages and its latency for small ones, by group size."""

    bus_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """All efficiency factors: by (GPU, dtype) and by (GPU, group size)."""

    efficiency: Mapping[tuple[str, str], Efficiency]
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
    return Factors(efficiency=efficiency, all_reduce=all_reduce)


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = (files("coral_core.perf") / "data" / name).read_text(encoding="utf-8")
    yield from csv.DictReader(text.splitlines())


def _efficiency(row: Mapping[str, str]) -> Efficiency:
    return Efficiency(
        gemm_bandwidth_frac=float(row["gemm_bandwidth_frac"]),
        gemm_peak_frac=tuple(float(row[f"gemm_peak_frac_m{tokens}"]) for tokens in GEMM_TOKENS),
        expert_peak_frac=float(row["expert_peak_frac"]),
        attention_bandwidth_frac=float(row["attention_bandwidth_frac"]),
        attention_peak_frac=tuple(float(row[f"attention_peak_frac_{tokens}"]) for tokens in ATTENTION_TOKENS),
    )


def _power_law(x: Floats, at: tuple[int, ...], values: tuple[float, ...]) -> Floats:
    # Straight lines in log-log: with slopes below 1 the time of a GEMM never falls when it gets more rows.
    return np.exp(np.interp(np.log(x), np.log(at), np.log(values)))
