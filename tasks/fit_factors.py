"""Make the shipped tables of factors again from reference data: kernels, the engine's costs, and error bars.

Expert kernels: per GPU and kind of weights, the terms of `factors.ExpertKernel` fitted to measured grouped GEMMs (skewed
routing, expert or tensor parallelism up to 8), none faster than the GPU's peaks. Engine costs: fitted to all serving runs
of `ledger.Observed`. Error bars: the ledger's, of models left out of the fit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from coral_core.catalog.hardware import load_gpus
from coral_core.catalog.models import standard_variants
from coral_core.domain.hardware import Gpu
from coral_core.errors import DataGapError
from coral_core.perf.factors import load_engine_costs, load_factors
from coral_core.perf.fit import fit_terms
from coral_core.units import MS, US
from tasks.ledger import Observed, compare, error_rows
from tasks.reference_runs import read_serving_runs

Floats = NDArray[np.float64]

KERNELS: Final = "perf/aic_ops_moe.parquet"
SYSTEMS: Final = {
    "a100_sxm": "A100-80",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "b200_sxm": "B200",
    "rtx_pro_6000_server": "RTX-PRO-6000",
}
KERNEL_SOURCES: Final = {
    ("full", "bfloat16"): ("vllm_fused_moe", "triton_tritonexperts", "trtllmbf16experts", "flashinfer_cutlass"),
    ("fp8", "fp8_block"): ("fp8moe_triton", "monolithic"),
    ("fp8", "fp8"): ("flashinfer_cutlass",),
    ("mxfp4", "w4a16_mxfp4"): ("gptossmxfp4",),
    ("int4", "int4_wo"): ("marlin",),
}
"""Kind of weights, its name in the data -> the kernels that the engine takes, by a part of their names, first wins."""

MOST_PARALLEL: Final = 8
_BITS: Final = {"full": 16.0, "fp8": 8.0, "mxfp4": 4.25, "int4": standard_variants()["int4"].expert_bits}
AIC: Final = "aiconfigurator {what} (Apache-2.0), {how}"


def fit_tables(folder: Path, *, as_of: date) -> dict[str, str]:
    """The fitted tables as CSV texts by file name, in the form of those that ship.

    `expert_kernels.csv` holds the measured GPUs only. Raises DataGapError where a file is missing.
    """
    runs = [run for run in read_serving_runs(folder).runs if not run.queue_bound and run.engine == "vllm"]
    chosen = [run for run in runs if run.point.gpu.name in {"H100", "H200"}]
    if not chosen:
        raise DataGapError("there is no run of vLLM on H100 or H200 to fit to", where=str(folder))
    costs = asdict(Observed.of(chosen, load_factors()).costs())
    made = {"source": AIC.format(what="serving runs", how="vLLM 0.12 to 0.18 on H100 and H200"), "as_of": str(as_of)}
    compared, _, _ = compare(folder)
    ledger = {"source": "coral ledger on the reference data", "as_of": str(as_of)}
    return {
        "engine_costs.csv": _csv([{"cost": name, "value": f"{value:.3g}", **made} for name, value in costs.items()]),
        "expert_kernels.csv": _csv([{**row, "as_of": str(as_of)} for row in expert_kernel_rows(folder)]),
        "errors.csv": _csv([{**_rounded(row), **ledger} for row in error_rows(compared)]),
    }


def changes(tables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Fitted beside shipped, for engine costs and expert kernels: what, fitted, shipped."""
    shipped = asdict(load_engine_costs())
    rows: list[dict[str, Any]] = [
        {"what": row["cost"], "fitted": float(row["value"]), "shipped": shipped[row["cost"]]}
        for row in csv.DictReader(io.StringIO(tables["engine_costs.csv"]))
    ]
    experts = load_factors().experts
    for row in csv.DictReader(io.StringIO(tables["expert_kernels.csv"])):
        known = experts.get((row["gpu"], row["weights"]))
        for column, value in (
            ("fixed_us", None if known is None else known.fixed_s / US),
            ("bandwidth_frac", known and known.bandwidth_frac),
            ("peak_frac", known and known.peak_frac),
            ("activation_passes", None if known is None else known.activation_passes),
        ):
            rows.append(
                {"what": f"{row['gpu']} {row['weights']} {column}", "fitted": float(row[column]), "shipped": value}
            )
    return rows


def expert_kernel_rows(folder: Path) -> list[dict[str, str]]:
    """One row per GPU and kind of weights that the reference data has kernels of."""
    path = folder / KERNELS
    if not path.is_file():
        raise DataGapError(f"there is no {path.name}", where=str(path.parent), fix="name the folder of reference data")
    table = pq.read_table(path).to_pydict()
    columns = {name: np.array(values) for name, values in table.items() if name not in {"power", "power_limit"}}
    skewed = columns["distribution"] != "balanced"
    parallel = columns["moe_tp_size"] * columns["moe_ep_size"] <= MOST_PARALLEL
    rows: list[dict[str, str]] = []
    for system, name in SYSTEMS.items():
        gpu = load_gpus()[name]
        of = skewed & parallel & (columns["system"] == system)
        for (kind, dtype), kernels in KERNEL_SOURCES.items():
            typed = of & (columns["moe_dtype"] == dtype)
            named = [typed & (np.char.find(columns["kernel_source"].astype(str), part) >= 0) for part in kernels]
            found = next((rows_of for rows_of in named if rows_of.any()), None)
            if found is None or any((row["gpu"], row["weights"]) == (name, kind) for row in rows):
                continue
            rows.append(_kernel_row(gpu, kind, {key: values[found] for key, values in columns.items()}))
    return rows


def _kernel_row(gpu: Gpu, kind: str, columns: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    tokens, top_k, experts = (columns[name].astype(float) for name in ("num_tokens", "topk", "num_experts"))
    ranks = columns["moe_ep_size"].astype(float)
    one = 3.0 * columns["hidden_size"] * columns["inter_size"] / columns["moe_tp_size"]
    touched = experts / ranks * (1 - (1 - top_k / experts) ** tokens)
    rows = tokens * top_k / ranks
    peak = gpu.compute_flops_per_s["fp8" if kind == "fp8" else "bf16"]
    bandwidth = gpu.memory_bandwidth_bytes_per_s
    terms = np.stack(
        [
            np.ones_like(tokens),
            touched * one * _BITS[kind] / 8 / bandwidth,
            2 * one * rows / peak,
            2 * rows * columns["hidden_size"] / bandwidth,
        ],
        axis=1,
    )
    # No part may be faster than the GPU: skewed routing touches fewer experts than the term counts.
    fixed_s, memory, compute, moved = fit_terms(
        terms, columns["latency"].astype(float) * MS, least=np.array([0.0, 1.0, 1.0, 0.0])
    )
    return {
        "gpu": gpu.name,
        "weights": kind,
        "fixed_us": f"{fixed_s / US:.1f}",
        "bandwidth_frac": f"{1 / memory:.2f}",
        "peak_frac": f"{1 / compute:.2f}",
        "activation_passes": f"{moved:.1f}",
        "source": AIC.format(what="kernel measurements", how="vLLM kernels, skewed routing"),
    }


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in row.items()}


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
