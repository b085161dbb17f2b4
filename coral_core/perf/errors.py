"""How wrong predictions were where they could be compared with measurements: quantiles by GPU, phase and metric.

`data/errors.csv` keeps what `coral ledger` finds; errors are relative, |predicted / measured - 1|, of models that
nothing was fitted to.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from coral_core.domain.workload import Phase

FILE: Final = "errors.csv"

CAPACITY_METRICS: Final = {
    Phase.PREFILL: (("prefill", "layer_time_s"), ("aggregated", "ttft_s"), ("prefill", "prompt_s")),
    Phase.DECODE: (("decode", "layer_time_s"), ("aggregated", "tpot_s")),
    Phase.AGGREGATED: (("aggregated", "tpot_s"), ("decode", "layer_time_s")),
}
"""Whose error stands for that of a phase's capacities, the nearest first; whole latencies where there is none of them."""

_WHOLE: Final = ("aggregated", "latency_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBar:
    """Quantiles of the relative error of one metric on one GPU over `n` comparisons.

    `p90_slower_frac`: by how much more than predicted nine of ten measurements took at most.
    """

    gpu: str
    phase: str
    metric: str
    n: int
    median_frac: float
    p90_frac: float
    p90_slower_frac: float


@cache
def load_errors() -> dict[tuple[str, str, str], ErrorBar]:
    """By (GPU, phase, metric)."""
    text = (files("coral_core.perf") / "data" / FILE).read_text(encoding="utf-8")
    return {
        (row["gpu"], row["phase"], row["metric"]): ErrorBar(
            gpu=row["gpu"],
            phase=row["phase"],
            metric=row["metric"],
            n=int(row["n"]),
            median_frac=float(row["median_abs_error_frac"]),
            p90_frac=float(row["p90_abs_error_frac"]),
            p90_slower_frac=float(row["p90_slower_frac"]),
        )
        for row in csv.DictReader(text.splitlines())
    }


def capacity_error(gpu: str, phase: Phase) -> ErrorBar | None:
    """The error of a GPU's estimated capacities in a phase; None where nothing was measured to compare with."""
    known = load_errors()
    for of, metric in (*CAPACITY_METRICS[phase], _WHOLE):
        if (gpu, of, metric) in known:
            return known[gpu, of, metric]
    return None


def pessimistic_factor(gpu: str, phase: Phase) -> float:
    """By what times of a GPU's estimates are multiplied to hold in nine of ten comparisons; at least 1.

    A GPU that nothing is known of takes the worst of the others.
    """
    bar = capacity_error(gpu, phase)
    if bar is not None:
        return 1 + bar.p90_slower_frac
    known = {name for name, _, _ in load_errors()}
    return 1 + max(found.p90_slower_frac for name in known if (found := capacity_error(name, phase)))


def capacity_error_fracs(gpus: Iterable[str], phase: Phase) -> tuple[float | None, ...]:
    """The 90th percentile for each GPU, None where it is not known."""
    found = [capacity_error(gpu, phase) for gpu in gpus]
    return tuple(None if bar is None else bar.p90_frac for bar in found)
