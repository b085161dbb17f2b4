"""One's own measurements in the ledger: serving runs from a CSV, and the profiles in the store, each against its prediction."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from artifacts.profiles import list_profiles, read_profile
from artifacts.store import Store
from coral_core.catalog import catalog_names, load_catalog, load_models
from coral_core.catalog.hardware import load_gpus
from coral_core.catalog.model_ids import gpu_by_any_name, model_by_any_name, variant_by_name
from coral_core.config.settings import load_settings
from coral_core.domain.hardware import Gpu
from coral_core.errors import DataGapError, InputError, NoSolutionError, StoreError, StoreUnreachableError
from coral_core.perf.serving import ServingPoint, predict
from tasks.ledger import Compared
from tasks.profile_compare import estimated_layer_s

COLUMNS: Final = (
    *("model", "dtype", "gpu", "tp", "input_tokens", "output_tokens", "concurrency"),
    *("ttft_s", "tpot_s"),
)

SMALLEST: Final = 1e-9
LARGEST: Final = 1e9
"""No time, length or number of clients of a run lies beyond these."""


def own_runs(file: Path, *, engine: str) -> tuple[list[Compared], dict[str, int]]:
    """TTFT and TPOT of a CSV's runs against predictions, and how many runs have none for which reason.

    An empty dtype is what the model's id says, else the model's own. InputError names file and line.
    """
    models, gpus = load_models(load_settings().models), load_gpus()
    found: list[Compared] = []
    left_out: dict[str, int] = {}
    for where, row in _rows(file):
        output_tokens = _number(row, "output_tokens", where)
        metrics = ("ttft_s", "tpot_s") if output_tokens > 1 else ("ttft_s",)  # one token has no further ones
        measured = {metric: _number(row, metric, where) for metric in metrics}
        try:
            shape = model_by_any_name(models, row["model"])
            point = ServingPoint(
                shape=shape,
                variant=variant_by_name(models, row["model"], row["dtype"] or None),
                gpu=gpu_by_any_name(gpus, row["gpu"]),
                tp=_whole(row, "tp", where),
                input_tokens=_number(row, "input_tokens", where),
                output_tokens=output_tokens,
                concurrency=_whole(row, "concurrency", where),
            )
            guess = predict(point)
        except InputError as error:
            raise error if error.where.startswith(where) else error.at(where) from None
        except (NoSolutionError, DataGapError) as error:
            left_out[error.what] = left_out.get(error.what, 0) + 1
            continue
        found += [
            Compared(
                group=f"own runs, {engine} on {point.gpu.name}",
                engine=engine,
                model=shape.name,
                gpu=point.gpu.name,
                phase="aggregated",
                metric=metric,
                predicted=getattr(guess, metric),
                measured=measured_s,
            )
            for metric, measured_s in measured.items()
        ]
    return found, left_out


def stored_profiles_compared(store: Store) -> tuple[list[Compared], dict[str, int]]:
    """Every point of the newest profiles against the estimate, and how many profiles have none for which reason."""
    models = load_models(load_settings().models)
    found: list[Compared] = []
    left_out: dict[str, int] = {}
    for key in list_profiles(store):
        try:
            profile = read_profile(store, key)
        except StoreUnreachableError:
            raise
        except StoreError as error:  # one that is damaged does not take the others' comparison away
            left_out[f"{error.where}: {error.what}{f' ({error.fix})' if error.fix else ''}"] = 1
            continue
        shape, gpu = models.get(profile.key.model), _gpu_of(profile.key.config)
        if shape is None or gpu is None or profile.key.variant not in shape.variants:
            what = f"profile of {profile.key.model} in {profile.key.variant} on {profile.key.config}, which is not known here"
            left_out[what] = left_out.get(what, 0) + 1
            continue
        found += [
            Compared(
                group=f"profiles, {profile.key.engine} on {gpu.name}",
                engine=profile.key.engine_name,
                model=shape.name,
                gpu=gpu.name,
                phase=point.phase.value,
                metric="layer_time_s",
                predicted=estimated_layer_s(point, shape, profile.key.variant, gpu),
                measured=point.layer_s,
            )
            for point in profile.points
        ]
    return found, left_out


def _gpu_of(config: str) -> Gpu | None:
    catalogs = (load_catalog(name) for name in catalog_names())
    return next((catalog.configs[config].gpu for catalog in catalogs if config in catalog.configs), None)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        rows = list(csv.reader(file.read_text(encoding="utf-8-sig").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read: {error}", where=file.name) from None
    if not rows or tuple(rows[0]) != COLUMNS:
        header = ",".join(rows[0]) if rows else "none"
        raise InputError(f"columns are {header}", where=f"{file.name}:1", fix=f"due: {','.join(COLUMNS)}")
    for line, cells in enumerate(rows[1:], 2):
        if len(cells) != len(COLUMNS):
            raise InputError(f"{len(cells)} cells, {len(COLUMNS)} are due", where=f"{file.name}:{line}")
        yield f"{file.name}:{line}", dict(zip(COLUMNS, cells, strict=True))


def _number(row: dict[str, str], column: str, where: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not SMALLEST <= value <= LARGEST:
        raise InputError(f"{column} is {row[column]!r}, must be a number from {SMALLEST:g} to {LARGEST:g}", where=where)
    return value


def _whole(row: dict[str, str], column: str, where: str) -> int:
    value = _number(row, column, where)
    if value != int(value):
        raise InputError(f"{column} is {row[column]!r}, must be a whole number", where=where)
    return int(value)
