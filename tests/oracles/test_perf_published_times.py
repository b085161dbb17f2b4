"""The roofline beside published per-layer times. Its GEMM factors for these four GPUs were fitted to the single-GPU
rows of the same data, so single GPUs show the quality of the fit and only several GPUs are a test of the model."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from coral_core.catalog.hardware import load_gpus
from coral_core.domain.workload import Phase
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import load_factors
from coral_core.perf.roofline import Step, layer_time
from tests.fakes.perf_cases import lengths, model

GPUS = {"a100": "A100-40", "v100": "V100-16", "l4": "L4", "t4": "T4"}
LLAMA_70B = model(layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672, vocab=32000)
# Helix profiles at the mean lengths of its trace.
HELIX_LENGTHS = lengths(750.0, 240.0)


def measured(folder: Path, node: str, phase: str) -> Iterator[tuple[float, float]]:
    with (folder / "perf" / "helix_layer_times.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["node"], row["phase"]) == ("llama2_70b", node, phase):
                yield float(row["x"]), float(row["time_ms_per_layer"]) / 1000


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize("node", ["a100", "v100", "l4", "l4x2", "t4", "t4x2", "t4x4"])
def test_layer_times_are_near_helix_profiles(
    node: str, phase: Phase, reference_data: Path, record_property: Callable[[str, object], None]
) -> None:
    kind, _, count = node.partition("x")
    tokens, times = map(
        np.array, zip(*measured(reference_data, node, {"prefill": "prompt"}.get(phase, phase)), strict=True)
    )
    none = np.zeros_like(tokens)
    decode = phase is Phase.DECODE
    step = Step(
        decode_requests=tokens if decode else none,
        prefill_tokens=none if decode else tokens,
        prompts=none,
        produced=tokens,
    )
    found = layer_time(
        shape=LLAMA_70B,
        variant="bf16",
        gpu=load_gpus()[GPUS[kind]],
        tp=int(count or 1),
        step=step,
        lengths=HELIX_LENGTHS,
        factors=load_factors(),
        assumptions=CapacityAssumptions(),
    )
    # Helix timed a layer by itself, without LM head.
    errors = (found.total_s - found.lm_head_s) / times - 1
    record_property("median_error_frac", float(np.median(errors)))
    record_property("p90_absolute_error_frac", float(np.quantile(np.abs(errors), 0.9)))
    assert abs(np.median(errors)) < 0.3
    assert np.median(np.abs(errors)) < 0.3
