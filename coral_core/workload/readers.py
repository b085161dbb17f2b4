"""Readers of request traces: Azure LLM inference CSV, BurstGPT CSV, Mooncake JSON lines.

Files are read whole, by column, and refused whole: a fault raises InputError with file and line. Requests must be in
order of arrival; they are never sorted silently, because a time that goes back is the mark of files strung together.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
from numpy.typing import NDArray

from coral_core.domain.workload import Trace
from coral_core.errors import InputError, unknown_name
from coral_core.units import MS

TraceFormat = Literal["auto", "azure", "burstgpt", "mooncake"]

MOST_TOKENS: Final = 100_000_000
"""Beyond any context there is: a slip of the unit or a broken file."""

# What no trace there is comes near to, so that another unit is the likelier explanation.
LONGEST_SPAN_S: Final = 10 * 365 * 86_400.0
HIGHEST_MOONCAKE_RATE_PER_S: Final = 1_000.0
FEWEST_FOR_RATE: Final = 1_000

_ZONE: Final = re.compile(r":[\d.]+ ?(Z|[+-]\d\d(:?\d\d)?)$")
_ARROW_COLUMN: Final = re.compile(r"CSV column #(\d+): ")
_ARROW_ROW: Final = re.compile(r"Row #(\d+): (?:CSV conversion error to \S+: )?")


def read_trace(
    path: Path,
    format: TraceFormat = "auto",  # noqa: A002 - the word a user types
    *,
    keep_failures: bool = False,
) -> Trace:
    """The requests of the trace file at `path`, in seconds from the first one.

    Formats: `azure` (TIMESTAMP,ContextTokens,GeneratedTokens, or arrival_s,input_tokens,output_tokens in seconds),
    `burstgpt` (Timestamp in seconds, Request tokens, Response tokens; other columns are not used), `mooncake` (one
    JSON object a line: timestamp in ms, input_length, output_length). `auto` goes by the header, and refuses what
    looks like another unit of time; a format that is named is taken at its word. Compressed files (.gz, ...) are read
    as they are. BurstGPT's requests without prompt or response failed; they are left out and counted in
    `Trace.dropped`, or kept where `keep_failures` is set and they have a prompt.

    Raises InputError, with file and line: unreadable or empty file, unknown columns, a line that lacks columns or is
    no whole JSON object, a value that is missing, not a number, not finite, negative or beyond reason, and times that
    go back. So a file cut short is refused, but not a CSV cut at the end of a line or within its last number: a last
    line without a line end is legal, and nothing in it tells `1` from the start of `109`.
    """
    if format not in get_args(TraceFormat):
        raise unknown_name("trace format", format, get_args(TraceFormat))
    try:
        head = _head(path)
        layout = _detect(head, where=f"{path}:1")
        if format not in {"auto", layout.format}:
            raise InputError(f"is not in format {format} but in {layout.format}", where=f"{path}:1")
        columns = _read_json_lines(path, layout) if layout.format == "mooncake" else _read_csv(path, layout, head)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path)) from error
    _check_values(columns, layout, path)
    if format == "auto":
        _check_unit_of_time(columns, layout, path)
    return _trace(columns, layout, path, keep_failures=keep_failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How a format names arrival, prompt and response, and its unit of time (None: time stamps)."""

    format: TraceFormat
    names: tuple[str, str, str]
    unit_s: float | None

    @property
    def least_input_tokens(self) -> int:
        """BurstGPT records requests that failed before their prompt was counted."""
        return 0 if self.format == "burstgpt" else 1


_MOONCAKE: Final = _Layout(format="mooncake", names=("timestamp", "input_length", "output_length"), unit_s=MS)
_CSV_LAYOUTS: Final = (
    _Layout(format="azure", names=("TIMESTAMP", "ContextTokens", "GeneratedTokens"), unit_s=None),
    _Layout(format="azure", names=("arrival_s", "input_tokens", "output_tokens"), unit_s=1.0),
    _Layout(format="burstgpt", names=("Timestamp", "Request tokens", "Response tokens"), unit_s=1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """A file's columns as they stand, NaN where a value is missing; `arrival_s` from any origin."""

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]


def _head(path: Path) -> list[str]:
    """The first two lines, decompressed."""
    with pa.input_stream(str(path), compression="detect") as stream:
        start: bytes = stream.read(65_536)
    return start.decode("utf-8-sig", errors="replace").splitlines()[:2]


def _detect(head: list[str], *, where: str) -> _Layout:
    if not head or not head[0].strip():
        raise InputError("is empty, or starts with an empty line", where=where)
    if head[0].lstrip().startswith("{"):
        return _MOONCAKE
    header = next(csv.reader([head[0]]))
    for layout in _CSV_LAYOUTS:
        if set(layout.names) <= set(header):
            repeated = sorted(name for name in layout.names if header.count(name) > 1)
            if repeated:
                raise InputError(f"column {repeated[0]!r} is there twice", where=where)
            return layout
    known = "; ".join(f"{layout.format}: {','.join(layout.names)}" for layout in (*_CSV_LAYOUTS, _MOONCAKE))
    raise InputError(
        f"columns {','.join(header)[:200]} are those of no known trace", where=where, fix=f"known: {known}"
    )


def _read_csv(path: Path, layout: _Layout, head: list[str]) -> _Columns:
    header, first = ([*csv.reader(head), []])[:2]
    time_type = pa.float64()
    if layout.unit_s is None:
        stamp = dict(zip(header, first, strict=False)).get(layout.names[0], "")
        time_type = pa.timestamp("ns", "UTC" if _ZONE.search(stamp) else None)
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            table = pyarrow.csv.read_csv(
                stream,
                # One thread: only then do errors carry the row, which is the line because no line is skipped.
                read_options=pyarrow.csv.ReadOptions(use_threads=False),
                parse_options=pyarrow.csv.ParseOptions(ignore_empty_lines=False),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict(zip(layout.names, (time_type, pa.int64(), pa.int64()), strict=True)),
                    include_columns=layout.names,
                    null_values=[],
                ),
            )
    except pa.ArrowInvalid as error:
        raise _csv_fault(str(error), header, path) from None
    arrival, *tokens = (table[name] for name in layout.names)
    if layout.unit_s is None:
        stamps_ns = arrival.to_numpy().astype(np.int64)
        # From the first stamp on, before the division: seconds since 1970 in float64 are good to 0.2 us only.
        arrival_s = (stamps_ns - (stamps_ns[0] if len(stamps_ns) else 0)) * 1e-9
    else:
        arrival_s = arrival.to_numpy() * layout.unit_s
    input_tokens, output_tokens = (column.to_numpy().astype(np.float64) for column in tokens)
    return _Columns(arrival_s=arrival_s, input_tokens=input_tokens, output_tokens=output_tokens)


def _csv_fault(message: str, header: list[str], path: Path) -> InputError:
    """Arrow's error, with the line as place and the column by name."""
    row, column = _ARROW_ROW.search(message), _ARROW_COLUMN.search(message)
    text = message[row.end() :] if row else message
    return InputError(
        f"{header[int(column[1])]}: {text}" if column else text, where=f"{path}:{row[1]}" if row else str(path)
    )


def _read_json_lines(path: Path, layout: _Layout) -> _Columns:
    schema = pa.schema([pa.field(name, pa.float64()) for name in layout.names])
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            table = pyarrow.json.read_json(
                stream,
                read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=2**24),
                parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
    except pa.ArrowInvalid as error:
        raise _json_fault(path, layout, str(error)) from None
    arrival, input_tokens, output_tokens = (table[name].to_numpy() for name in layout.names)
    return _Columns(arrival_s=arrival * MS, input_tokens=input_tokens, output_tokens=output_tokens)


def _json_fault(path: Path, layout: _Layout, fallback: str) -> InputError:
    """The first line that is no JSON object of numbers: Arrow counts rows by block, so look again, line by line."""
    for line, text in _json_lines(path):
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            return InputError(f"not valid JSON: {error.msg}", where=f"{path}:{line}")
        if not isinstance(record, dict):
            return InputError("is not a JSON object", where=f"{path}:{line}")
        for name in layout.names:
            value = record.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                return InputError(f"{name} is {value!r}, must be a number", where=f"{path}:{line}")
    return InputError(fallback, where=str(path))


def _json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines that are not blank."""
    with pa.input_stream(str(path), compression="detect") as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")
        for line, content in enumerate(text, start=1):
            if content.strip():
                yield line, content


def _check_values(columns: _Columns, layout: _Layout, path: Path) -> None:
    arrival, prompt, response = layout.names
    if not len(columns.arrival_s):
        raise InputError("holds no requests", where=str(path))
    faults: list[tuple[NDArray[np.bool_], str]] = [
        (~np.isfinite(columns.arrival_s), f"{arrival} is missing or not finite"),
        (columns.arrival_s < 0, f"{arrival} goes back behind the first request or is negative"),
    ]
    for name, tokens, least in (
        (prompt, columns.input_tokens, layout.least_input_tokens),
        (response, columns.output_tokens, 0),
    ):
        whole = np.isfinite(tokens) & (tokens == np.floor(tokens))
        faults += [
            (~whole, f"{name} is missing or not a whole number"),
            (tokens < least, f"{name} is below {least}"),
            (tokens > MOST_TOKENS, f"{name} is above {MOST_TOKENS}"),
        ]
    with np.errstate(invalid="ignore"):  # infinite times are a fault of their own
        backwards = np.diff(columns.arrival_s, prepend=columns.arrival_s[:1]) < 0
    faults.append((backwards, f"{arrival} goes back: requests must be in order of arrival"))
    first = min(((int(mask.argmax()), text) for mask, text in faults if mask.any()), default=None)
    if first is not None:
        raise InputError(first[1], where=f"{path}:{_line_of(first[0], layout, path)}")


def _line_of(index: int, layout: _Layout, path: Path) -> int:
    """The line of request `index`."""
    if layout.format != "mooncake":
        return index + 2
    return next(islice(_json_lines(path), index, None))[0]


def _check_unit_of_time(columns: _Columns, layout: _Layout, path: Path) -> None:
    span_s = columns.arrival_s[-1] - columns.arrival_s[0]
    name, requests = layout.names[0], len(columns.arrival_s)
    fix = f"if it is right, name the format: {layout.format}"
    if span_s > LONGEST_SPAN_S:
        raise InputError(
            f"{name} spans {span_s / 31_557_600:.0f} years: it looks as if it were in a smaller unit",
            where=str(path),
            fix=fix,
        )
    if layout.format == "mooncake" and requests >= FEWEST_FOR_RATE and requests > HIGHEST_MOONCAKE_RATE_PER_S * span_s:
        raise InputError(
            f"{requests} requests within {span_s:.3g} s: {name} looks as if it were in seconds, not ms",
            where=str(path),
            fix=fix,
        )


def _trace(columns: _Columns, layout: _Layout, path: Path, *, keep_failures: bool) -> Trace:
    kept = np.ones(len(columns.arrival_s), dtype=np.bool_)
    if layout.format == "burstgpt":
        kept = (columns.input_tokens > 0) & ((columns.output_tokens > 0) | keep_failures)
    dropped = len(kept) - int(kept.sum())
    if dropped == len(kept):
        raise InputError("holds failed requests only, without prompt or response", where=str(path))
    arrival_s = columns.arrival_s[kept]
    note = f"; {dropped} of {len(kept)} requests failed there and are left out" if dropped else ""
    return Trace(
        name=path.name.split(".")[0],
        arrival_s=arrival_s - arrival_s[0],
        input_tokens=columns.input_tokens[kept].astype(np.int64),
        output_tokens=columns.output_tokens[kept].astype(np.int64),
        source=f"{path.name} ({layout.format} trace{note})",
        dropped=dropped,
    )
