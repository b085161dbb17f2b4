"""Measured serving runs and layer times of the reference data, as records; nothing of it ships with Coral."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coral_core.catalog import load_models
from coral_core.catalog.hardware import load_gpus
from coral_core.catalog.model_ids import gpu_by_any_name, model_by_any_name, variant_by_dtype
from coral_core.errors import CoralError, DataGapError, InputError
from coral_core.perf.serving import ServingPoint
from coral_core.units import MS

RUNS: Final = "perf/serving_runs_h100_h200.csv"
QUEUE_BOUND: Final = 5.0
"""A run whose TTFT is more times that of its series at the lowest concurrency measures a queue."""

_MORE: Final = "more cells than columns"
_FETCH_AGAIN: Final = "cut short, or another file: fetch it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """One measured run. `swept`: its series has several concurrencies; `queue_bound`: see QUEUE_BOUND."""

    point: ServingPoint
    engine: str
    ttft_s: float
    tpot_s: float
    swept: bool
    queue_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsRead:
    """The runs of a file, and why rows were left out: reason -> count."""

    runs: tuple[ServingRun, ...]
    left_out: dict[str, int]


def read_serving_runs(folder: Path) -> RunsRead:
    """The aggregated runs of the reference data; rows that say the same twice count once.

    DataGapError where the file is not there, InputError names file and line of a value that makes no sense.
    """
    series: dict[tuple[object, ...], list[tuple[ServingPoint, str, float, float]]] = {}
    left_out: dict[str, int] = {}
    seen: set[tuple[object, ...]] = set()
    for line, row in _rows(folder / RUNS):
        if row["mode"] != "agg":
            _count(left_out, "prefill and decode apart")
            continue
        try:
            point = _point(row, f"{RUNS}:{line}")
        except CoralError as error:
            _count(left_out, f"{row['model_path']} on {row['system']}: {error.what}")
            continue
        ttft_s, tpot_s = (_number(row, f"silicon_{what}_ms", f"{RUNS}:{line}") * MS for what in ("ttft", "tpot"))
        engine = row["backend"]
        load = (point.tp, point.input_tokens, point.output_tokens)
        identity = (engine, point.shape.name, point.variant, point.gpu.name, *load, point.concurrency, ttft_s, tpot_s)
        if identity in seen:
            _count(left_out, "said twice")
            continue
        seen.add(identity)
        # Attention data parallelism and expert parallelism make no difference here: the GPUs are the same.
        series.setdefault(identity[:7], []).append((point, engine, ttft_s, tpot_s))
    runs: list[ServingRun] = []
    for rows in series.values():
        least = min(point.concurrency for point, *_ in rows)
        first_s = min(ttft_s for point, _, ttft_s, _ in rows if point.concurrency == least)
        swept = len({point.concurrency for point, *_ in rows}) > 1
        runs += [
            ServingRun(
                point=point,
                engine=engine,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                swept=swept,
                queue_bound=ttft_s > QUEUE_BOUND * first_s,
            )
            for point, engine, ttft_s, tpot_s in rows
        ]
    return RunsRead(runs=tuple(runs), left_out=left_out)


def _point(row: dict[str, str], where: str) -> ServingPoint:
    shape = model_by_any_name(load_models(), row["model_path"])
    gpu = gpu_by_any_name(load_gpus(), row["system"])
    # A file of one precision may name that of its experts apart.
    dtype = row["gemm_quant_mode"] or row["precision"] or ""
    concurrency = row["concurrency"] or row["batch_size"]
    return ServingPoint(
        shape=shape,
        variant=variant_by_dtype(shape, dtype or ("fp8" if "fp8" in shape.variants else None)),
        gpu=gpu,
        tp=round(_number(row, "tp_size", where)),
        input_tokens=_number(row, "isl", where),
        output_tokens=_number(row, "osl", where),
        concurrency=round(_positive(concurrency, "concurrency", where)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimeRow:
    """One measured time of a layer: `phase` `prompt` (x in tokens) or `decode` (x in requests)."""

    model: str
    node: str
    phase: str
    x: float
    time_s: float


def read_layer_time_rows(folder: Path) -> list[LayerTimeRow]:
    """The published layer times of the reference data."""
    file = "perf/helix_layer_times.csv"
    return [
        LayerTimeRow(
            model=row["model"],
            node=row["node"],
            phase=row["phase"],
            x=_number(row, "x", f"{file}:{line}"),
            time_s=_number(row, "time_ms_per_layer", f"{file}:{line}") * MS,
        )
        for line, row in _rows(folder / file)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """One measured run that states only whole latencies: mean seconds of a request at a concurrency."""

    name: str
    instance: str
    concurrency: int
    input_tokens: float
    output_tokens: float
    latency_s: float


def read_latency_rows(folder: Path) -> list[LatencyRow]:
    """The A10G runs of the reference data."""
    file = "perf/fmbench_g5.csv"
    return [
        LatencyRow(
            name=row["experiment_name"],
            instance=row["instance_type"].removeprefix("ml."),
            concurrency=round(_number(row, "concurrency", f"{file}:{line}")),
            input_tokens=_number(row, "prompt_token_count_mean", f"{file}:{line}"),
            output_tokens=_number(row, "completion_token_count_mean", f"{file}:{line}"),
            latency_s=_number(row, "latency_mean", f"{file}:{line}"),
        )
        for line, row in _rows(folder / file)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One measured prompt phase of a whole model: `batch` prompts of `prompt_tokens` on `tp` GPUs."""

    model: str
    gpu: str
    tp: int
    prompt_tokens: float
    batch: float
    time_s: float


def read_prompt_rows(folder: Path) -> list[PromptRow]:
    """The prompt times of the reference data on A100 and H100 at full power."""
    file = "perf/splitwise_perf_model_median.csv"
    names = {"a100-80gb": "A100-80", "h100-80gb": "H100"}
    return [
        PromptRow(
            model=row["model"].replace("llama2-70b", "llama2_70b"),
            gpu=names[row["hardware"]],
            tp=round(_number(row, "tensor_parallel", f"{file}:{line}")),
            prompt_tokens=_number(row, "prompt_size", f"{file}:{line}"),
            batch=_number(row, "batch_size", f"{file}:{line}"),
            time_s=_number(row, "prompt_time", f"{file}:{line}") * MS,
        )
        for line, row in _rows(folder / file)
        if row["hardware"] in names
    ]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    if not path.is_file():
        raise DataGapError(f"there is no {path.name}", where=str(path.parent), fix="name the folder of reference data")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, restkey=_MORE)
        try:
            if any(not name for name in reader.fieldnames or [""]):
                raise InputError("has no columns, or some without a name", where=f"{path.name}:1", fix=_FETCH_AGAIN)
            for row in reader:
                if _MORE in row or None in row.values():
                    cells = "more" if _MORE in row else "fewer"
                    place = f"{path.name}:{reader.line_num}"
                    raise InputError(f"{cells} cells than columns", where=place, fix=_FETCH_AGAIN)
                yield reader.line_num, _Row(row, path.name)
            if reader.line_num < 2:
                raise InputError("has no rows", where=path.name, fix=_FETCH_AGAIN)
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"cannot be read: {error}", where=path.name, fix=_FETCH_AGAIN) from None


class _Row(dict[str, str]):
    """A row that names its file where a column is asked for that the file lacks."""

    def __init__(self, cells: dict[str, str], file: str) -> None:
        super().__init__(cells)
        self.file = file

    def __missing__(self, column: str) -> str:
        raise InputError(f"has no column {column!r}", where=f"{self.file}:1", fix=_FETCH_AGAIN)


def _number(row: dict[str, str], column: str, where: str) -> float:
    return _positive(row[column], column, where)


def _positive(text: str, column: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{column} is {text!r}, must be a number above 0", where=where)
    return value


def _count(counts: dict[str, int], reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1
