"""The ledger: predicted against measured, per model, GPU, phase and metric, on the reference data.

Nothing is scored by what it was fitted to: the engine's costs behind a model's serving runs are fitted to the runs of the
other models (k-fold over models); layer times take one factor per GPU and phase from the other model. The kernel
tables behind the factors were measured kernel by kernel, without any serving.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coral_core.catalog.hardware import load_gpus
from coral_core.domain.workload import Lengths
from coral_core.errors import CoralError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import EngineCosts, Factors, load_engine_costs, load_factors
from coral_core.perf.fit import fit_engine_costs
from coral_core.perf.roofline import Step, layer_kernels, layer_time
from coral_core.perf.serving import KernelTimes, ServingPoint, kernel_times, latencies, predict
from tasks.reference_runs import (
    LayerTimeRow,
    ServingRun,
    read_latency_rows,
    read_layer_time_rows,
    read_prompt_rows,
    read_serving_runs,
)
from tasks.reference_shapes import SHAPES

Floats = NDArray[np.float64]

FITTED_ENGINE: Final = "vllm"
FITTED_GPUS: Final = ("H100", "H200")
OLD_ENGINE: Final = "vllm 2023"
ERROR_ENGINES: Final = ("", FITTED_ENGINE, OLD_ENGINE, "tgi")
"""Whose runs make error bars: the engine that Coral starts, and others where only they ran on a GPU; "" is no engine."""
_LAYER_TIME_GPUS: Final = {"a100": "A100-40", "v100": "V100-16", "l4": "L4", "t4": "T4"}
_LAYER_TIME_LENGTHS: Final = Lengths(
    mean_input_tokens=750, mean_output_tokens=240, source="mean of the trace they profile for"
)
_LATENCY_TP: Final = {"llama2-13b": 4, "mistral-7b": 1}

TARGETS: Final = (
    ("serving, vLLM on H100 and H200", "tpot_s", 0.10),
    ("serving, vLLM on H100 and H200", "ttft_s", 0.15),
    ("layer times on A100-40, L4, T4, V100-16", "layer_time_s", 0.12),
    ("whole latencies on A10G", "latency_s", 0.25),
)
"""Group, metric, and the median error that is aimed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, predicted and measured."""

    group: str
    engine: str
    model: str
    gpu: str
    phase: str
    metric: str
    predicted: float
    measured: float

    @property
    def error_frac(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def ledger(folder: Path) -> dict[str, Any]:
    """The ledger as a JSON document: `entries` with the worst first, `targets`, `left_out` by reason.

    Raises DataGapError where a file of the reference data is missing, InputError for values that make no sense.
    """
    return ledger_document(*compare(folder), held_out=True)


def ledger_document(
    compared: Sequence[Compared], left_out: Mapping[str, int], queue_bound: int, *, held_out: bool
) -> dict[str, Any]:
    """Comparisons as a ledger; `held_out`: no model was predicted with what was fitted to its own runs."""
    return {
        "held_out": held_out,
        "entries": entries(compared),
        "targets": _targets(compared),
        "queue_bound_runs_left_out": queue_bound,
        "left_out": dict(sorted(left_out.items())),
    }


def compare(folder: Path) -> tuple[list[Compared], dict[str, int], int]:
    """Every figure predicted and measured, rows left out by reason, and how many runs measure a queue."""
    read = read_serving_runs(folder)
    left_out: dict[str, int] = dict(read.left_out)
    runs: list[ServingRun] = []
    for run in read.runs:
        if reason := _unpredictable(run.point):
            left_out[reason] = left_out.get(reason, 0) + 1
        elif not run.queue_bound:
            runs.append(run)
    compared = [*_serving(runs), *_layer_times(folder), *_latencies(folder), *_prompts(folder)]
    return compared, left_out, sum(run.queue_bound for run in read.runs)


def _unpredictable(point: ServingPoint) -> str:
    """Why there is no prediction for a point, empty where there is one."""
    try:
        kernel_times([point], load_factors())
    except CoralError as error:
        return error.what
    return ""


def entries(compared: Iterable[Compared]) -> list[dict[str, Any]]:
    """One entry per engine, model, GPU, phase and metric: n and quantiles of the relative error, the worst first."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for item in compared:
        groups[item.model, item.gpu, item.phase, item.metric, item.engine].append(item.error_frac)
    rows = [
        {
            **dict(zip(("model", "gpu", "phase", "metric", "engine"), key, strict=True)),
            **quantiles(errors),
            "median_error_frac": float(np.median(errors)),
        }
        for key, errors in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["median_abs_error_frac"])


def quantiles(errors: Sequence[float]) -> dict[str, Any]:
    """n, median and 90th percentile of the absolute relative error."""
    size = np.abs(np.array(errors))
    return {
        "n": len(size),
        "median_abs_error_frac": float(np.median(size)),
        "p90_abs_error_frac": float(np.quantile(size, 0.9)),
    }


def error_rows(compared: Iterable[Compared]) -> list[dict[str, Any]]:
    """One row per GPU, phase and metric over all models and ERROR_ENGINES: what Coral ships as its error bars."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for item in compared:
        if item.engine in ERROR_ENGINES:
            groups[item.gpu, item.phase, item.metric].append(item.error_frac)
    return [
        {"gpu": gpu, "phase": phase, "metric": metric, **quantiles(errors), "p90_slower_frac": slower_frac(errors)}
        for (gpu, phase, metric), errors in sorted(groups.items())
    ]


def slower_frac(errors: Sequence[float]) -> float:
    """The 90th percentile of how much longer things took than predicted, 0 where nine of ten took less."""
    return max(float(np.quantile(1 / (1 + np.array(errors)) - 1, 0.9)), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Serving runs as arrays, (n,) each; `weights` are 0 for runs that fits leave out."""

    runs: tuple[ServingRun, ...]
    times: KernelTimes
    models: NDArray[np.str_]
    ttft_s: Floats
    tpot_s: Floats
    fitted: NDArray[np.bool_]

    @classmethod
    def of(cls, runs: Sequence[ServingRun], factors: Factors) -> Observed:
        """Fits take vLLM's runs on FITTED_GPUS whose concurrency was swept; one alone says no load for sure."""
        return cls(
            runs=tuple(runs),
            times=kernel_times([run.point for run in runs], factors),
            models=np.array([run.point.shape.name for run in runs]),
            ttft_s=np.array([run.ttft_s for run in runs]),
            tpot_s=np.array([run.tpot_s for run in runs]),
            fitted=np.array([is_target(run) and run.swept and not run.queue_bound for run in runs]),
        )

    def costs(self, *, without: str | None = None) -> EngineCosts:
        """Fitted to all models but one; a model counts by the square root of its runs."""
        chosen = self.fitted & (self.models != without)
        counts = {model: int(np.sum(chosen & (self.models == model))) for model in set(self.models.tolist())}
        weights = np.array([chosen[i] / max(counts[model], 1) ** 0.5 for i, model in enumerate(self.models.tolist())])
        return fit_engine_costs(self.times, self.ttft_s, self.tpot_s, weights)


def is_target(run: ServingRun) -> bool:
    """Whether a run is of the engine and GPUs that costs are fitted to."""
    return run.engine == FITTED_ENGINE and run.point.gpu.name in FITTED_GPUS


def _serving(runs: Sequence[ServingRun]) -> list[Compared]:
    observed = Observed.of(runs, load_factors())
    ttft_s, tpot_s = np.zeros(len(runs)), np.zeros(len(runs))
    for model in sorted(set(observed.models.tolist())):
        of = observed.models == model
        ttft_s[of], tpot_s[of] = latencies(observed.times.only(of), observed.costs(without=model))
    found: list[Compared] = []
    for i, run in enumerate(runs):
        group = TARGETS[0][0] if is_target(run) else f"serving, {run.engine} on {run.point.gpu.name}"
        for metric, predicted, measured in (
            ("ttft_s", ttft_s[i], run.ttft_s),
            ("tpot_s", tpot_s[i], run.tpot_s),
        ):
            found.append(
                Compared(
                    group=group,
                    engine=run.engine,
                    model=run.point.shape.name,
                    gpu=run.point.gpu.name,
                    phase="aggregated",
                    metric=metric,
                    predicted=float(predicted),
                    measured=measured,
                )
            )
    return found


def _layer_times(folder: Path) -> list[Compared]:
    """One factor per GPU and phase, the median over the other models' rows."""
    curves: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for (model, node, phase), rows in _by_curve(read_layer_time_rows(folder)).items():
        gpu = _LAYER_TIME_GPUS[node.partition("x")[0]]
        estimated = _layer_seconds(model, node, phase, np.array([row.x for row in rows]))
        curves[model, gpu, phase] += zip(estimated.tolist(), [row.time_s for row in rows], strict=True)
    found: list[Compared] = []
    for (model, gpu, phase), pairs in curves.items():
        others = [
            measured / estimated
            for (other, of, when), points in curves.items()
            if other != model and (of, when) == (gpu, phase)
            for estimated, measured in points
        ]
        factor = float(np.median(others)) if others else 1.0
        found += [
            Compared(
                group=TARGETS[2][0],
                engine="",
                model=model,
                gpu=gpu,
                phase={"prompt": "prefill"}.get(phase, phase),
                metric="layer_time_s",
                predicted=estimated * factor,
                measured=measured,
            )
            for estimated, measured in pairs
        ]
    return found


def _by_curve(rows: Iterable[LayerTimeRow]) -> dict[tuple[str, str, str], list[LayerTimeRow]]:
    curves: dict[tuple[str, str, str], list[LayerTimeRow]] = defaultdict(list)
    for row in rows:
        curves[row.model, row.node, row.phase].append(row)
    return curves


def _layer_seconds(model: str, node: str, phase: str, x: Floats) -> Floats:
    """A layer by itself, without its share of the LM head, at the context that its trace has on average."""
    kind, _, count = node.partition("x")
    none, decode = np.zeros_like(x), phase == "decode"
    time = layer_time(
        shape=SHAPES[model],
        variant="bf16",
        gpu=load_gpus()[_LAYER_TIME_GPUS[kind]],
        tp=int(count or 1),
        step=Step(
            decode_requests=x if decode else none,
            prefill_tokens=none if decode else x,
            prompts=none,
            produced=x,
        ),
        lengths=_LAYER_TIME_LENGTHS,
        factors=load_factors(),
        assumptions=CapacityAssumptions(),
    )
    return time.total_s - time.lm_head_s


def _latencies(folder: Path) -> list[Compared]:
    """Nothing is fitted to these: engines of 2023, whose whole latencies alone are known."""
    gpu = load_gpus()["A10G"]
    found: list[Compared] = []
    for row in read_latency_rows(folder):
        model = next(name for name in _LATENCY_TP if row.name.startswith(name))
        point = ServingPoint(
            shape=SHAPES[model],
            variant="bf16",
            gpu=gpu,
            tp=_LATENCY_TP[model],
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            concurrency=row.concurrency,
        )
        guess = predict(point)
        found.append(
            Compared(
                group=TARGETS[3][0],
                engine="tgi",
                model=model,
                gpu=gpu.name,
                phase="aggregated",
                metric="latency_s",
                predicted=guess.ttft_s + (row.output_tokens - 1) * guess.tpot_s,
                measured=row.latency_s,
            )
        )
    return found


def _prompts(folder: Path) -> list[Compared]:
    """Prompt phases alone on engines of 2023: a step of the prompts, launched kernel by kernel."""
    costs, given = load_engine_costs(), CapacityAssumptions()
    found: list[Compared] = []
    for row in read_prompt_rows(folder):
        shape, gpu = SHAPES[row.model], load_gpus()[row.gpu]
        tokens, prompts = np.array([row.prompt_tokens * row.batch]), np.array([row.batch])
        time = layer_time(
            shape=shape,
            variant="bf16",
            gpu=gpu,
            tp=row.tp,
            step=Step(decode_requests=0 * tokens, prefill_tokens=tokens, prompts=prompts, produced=tokens),
            lengths=Lengths(mean_input_tokens=row.prompt_tokens, mean_output_tokens=1, source="measured with"),
            factors=load_factors(),
            assumptions=given,
        )
        launches_s = layer_kernels(shape, quantised=False).small * costs.launch_s
        step_s = shape.layers * max(float(time.total_s[0]), launches_s) + given.step_overhead_s
        found.append(
            Compared(
                group=f"prompt phases on {row.gpu}",
                engine=OLD_ENGINE,
                model=row.model,
                gpu=row.gpu,
                phase="prefill",
                metric="prompt_s",
                predicted=step_s,
                measured=row.time_s,
            )
        )
    return found


def _targets(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """All groups with their errors; those that have a target with it, and whether it is met."""
    aims = {(group, metric): aim for group, metric, aim in TARGETS}
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in compared:
        groups[item.group, item.metric].append(item.error_frac)
    rows = []
    for (group, metric), errors in groups.items():
        row = {"group": group, "metric": metric, **quantiles(errors)}
        aim = aims.get((group, metric))
        met = None if aim is None else row["median_abs_error_frac"] <= aim
        rows.append({**row, "target_median_frac": aim, "met": met})
    return sorted(rows, key=lambda row: (row["target_median_frac"] is None, -row["median_abs_error_frac"]))
