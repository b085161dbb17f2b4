"""Profiles from tables that others made: per-layer times by batch as CSV, in Coral's own columns or in those of layer time tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from coral_core.catalog import catalog_names, find_config, load_catalog
from coral_core.config.resolve import catalog_of
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.perf.layer_times import COLUMNS as LAYER_TIME_COLUMNS
from coral_core.perf.layer_times import read_layer_times
from coral_core.perf.profile import ProfilePoint
from coral_core.units import MS

COLUMNS: Final = ("phase", "tp", "requests", "tokens", "layer_ms")
OPTIONAL: Final = ("fixed_ms", "samples", "cv_frac")
Number = TypeVar("Number", int, float)
_PHASES: Final = {"prefill": Phase.PREFILL, "prompt": Phase.PREFILL, "decode": Phase.DECODE}


def read_points(file: Path) -> tuple[list[ProfilePoint], list[int]]:
    """The rows of a CSV with COLUMNS, and any of OPTIONAL after them, and their lines. InputError names file and line."""
    reader, header = _opened(file)
    more = header[len(COLUMNS) :]
    if tuple(header[: len(COLUMNS)]) != COLUMNS or not set(more) <= set(OPTIONAL) or len(set(more)) < len(more):
        due = f"{','.join(COLUMNS)}, then any of {','.join(OPTIONAL)}; or {','.join(LAYER_TIME_COLUMNS)}"
        raise InputError(f"columns are {','.join(header) or 'none'}", where=f"{file.name}:1", fix=f"due: {due}")
    points: list[ProfilePoint] = []
    for line, cells in enumerate(reader, 2):
        where = f"{file.name}:{line}"
        if not cells and line == len(reader) + 1:
            break  # an empty last line
        if len(cells) != len(header):
            raise InputError(f"{len(cells)} cells, {len(header)} are due", where=where)
        row = dict(zip(header, cells, strict=True))
        if row["phase"].lower() not in _PHASES:
            raise InputError(f"phase is {row['phase']!r}", where=where, fix="prefill or decode")
        points.append(
            ProfilePoint(
                phase=_PHASES[row["phase"].lower()],
                tp=_read(int, row, "tp", where),
                requests=_read(float, row, "requests", where),
                tokens=_read(float, row, "tokens", where),
                layer_s=_read(float, row, "layer_ms", where) * MS,
                fixed_s=_read(float, row, "fixed_ms", where) * MS if row.get("fixed_ms") else None,
                samples=_read(int, row, "samples", where) if row.get("samples") else None,
                cv_frac=_read(float, row, "cv_frac", where) if row.get("cv_frac") else None,
            )
        )
    return points, list(range(2, len(points) + 2))


def is_layer_time_table(file: Path) -> bool:
    """Whether a CSV has the columns of a layer time table: one time per model, node, phase and batch."""
    return _opened(file)[1] == list(LAYER_TIME_COLUMNS)


def points_of_layer_times(
    file: Path, *, model: str, node: str, tp: int, context_tokens: float
) -> tuple[list[ProfilePoint], list[int]]:
    """The rows of one model and node of a layer time table, and their lines.

    Its prompts are of any lengths, so each counts as one prompt of all its tokens; its decode times are of the context
    that the caller knows. InputError names file and line, DataGapError a node without rows.
    """
    times = read_layer_times(file, model)
    points: list[ProfilePoint] = []
    lines: list[int] = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        times.largest_batch(node, phase)  # raises for a node or phase without rows
        batches, seconds = times.points[node, phase]
        lines += times.lines[node, phase]
        points += [
            ProfilePoint(
                phase=phase,
                tp=tp,
                requests=1.0 if phase is Phase.PREFILL else batch,
                tokens=batch if phase is Phase.PREFILL else context_tokens,
                layer_s=time_s,
            )
            for batch, time_s in zip(batches.tolist(), seconds.tolist(), strict=True)
        ]
    return points, lines


def profiled_config(catalog: str, name: str) -> NodeConfig:
    """The node configuration of a catalogue or scenario file (`catalog_of`); InputError says which catalogue has it, if any."""
    try:
        return find_config(catalog_of(catalog), name)
    except InputError as error:
        others = [other for other in catalog_names() if other != catalog]
        having = [other for other in others if name in load_catalog(other).configs]
        fix = (
            f"--catalog {having[0]} has it"
            if having
            else f"{error.fix}; other catalogues: {', '.join(others)}, or a scenario's file"
        )
        raise InputError(error.what, where=error.where, fix=fix) from None


def _opened(file: Path) -> tuple[Sequence[list[str]], list[str]]:
    try:
        rows = list(csv.reader(file.read_text(encoding="utf-8-sig").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read: {error}", where=file.name) from None
    return rows[1:], rows[0] if rows else []


def _read(kind: Callable[[str], Number], row: dict[str, str], column: str, where: str) -> Number:
    try:
        value = kind(row[column])
        known = math.isfinite(value) and value >= 0
    except ValueError:
        raise InputError(f"{column} is {row[column]!r}, must be a number", where=where) from None
    except OverflowError:  # more digits than any number that is meant
        known = False
    if not known:
        raise InputError(f"{column} is {row[column]!r}, must be a finite number, not below 0", where=where)
    return value
