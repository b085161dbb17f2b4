"""Evaluations: the summary as JSON, the figures behind it as Parquet, and reports to read.

summary.json is written last and holds the hashes of the others: where it is, the evaluation is whole. A sweep of the
library's limits lies in a folder of the same group, without a summary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.canonical import canonical_json, parsed_object, sha256_hex
from artifacts.keys import checked_name, evaluation_group, found_time, scenario_group
from artifacts.store import Store
from coral_core.errors import StoreError

SUMMARY: Final = "summary.json"
REPORT: Final = "report.md"
PAGE: Final = "report.html"
SENSITIVITY: Final = "sensitivity.json"
CHART: Final = "sensitivity.svg"
_SENSITIVITY_VERSION: Final = 1
_LOG: Final = logging.getLogger(__name__)


def write_evaluation(
    store: Store,
    scenario: str,
    time: datetime,
    *,
    document: Mapping[str, Any],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    report_md: str,
    report_html: str | None = None,
) -> dict[str, str]:
    """Record an evaluation; URLs by file name. Repeating the same call is harmless.

    Tables without rows are left out, and the page where it could not be made. Raises InputError for content that JSON
    cannot hold (NaN; the key path is named), StoreConflictError where another evaluation has the same scenario and time.
    """
    group = evaluation_group(scenario, time)
    files = {f"{checked_name(name, 'table')}.parquet": _parquet(rows) for name, rows in tables.items() if rows}
    files[REPORT] = report_md.encode()
    if report_html is not None:
        files[PAGE] = report_html.encode()
    hashes = {name: sha256_hex(data) for name, data in files.items()}
    files[SUMMARY] = canonical_json({**document, "sha256": hashes})
    for name, data in files.items():
        store.put_once(f"{group}/{name}", data)
    return {name: store.url_of(f"{group}/{name}") for name in files}


def write_sensitivity(
    store: Store, scenario: str, time: datetime, *, points: Sequence[Mapping[str, Any]], chart_svg: str | None
) -> dict[str, str]:
    """Record a sweep of a scenario's library limits; URLs by file name. Repeating the same call is harmless."""
    group = evaluation_group(scenario, time)
    files = {} if chart_svg is None else {CHART: chart_svg.encode()}
    files[SENSITIVITY] = canonical_json(
        {"schema_version": _SENSITIVITY_VERSION, "scenario": scenario, "points": list(points)}
    )
    for name, data in files.items():
        store.put_once(f"{group}/{name}", data)
    return {name: store.url_of(f"{group}/{name}") for name in files}


def latest_sensitivity(store: Store, scenario: str) -> list[dict[str, Any]]:
    """The points of the newest sweep of the scenario; none where none was recorded.

    Neither are there any, with a warning logged, where it cannot be read: it is only shown beside an evaluation, which
    must not be lost for it.
    """
    try:
        times = _times(store, scenario, SENSITIVITY)
        return _read_points(store, f"{evaluation_group(scenario, times[-1])}/{SENSITIVITY}") if times else []
    except StoreError as error:
        _LOG.warning("the sensitivity is not shown: %s", error)
        return []


def _read_points(store: Store, key: str) -> list[dict[str, Any]]:
    found = parsed_object(store.get(key), where=store.url_of(key))
    if found.get("schema_version") != _SENSITIVITY_VERSION:
        raise StoreError(f"has not schema version {_SENSITIVITY_VERSION}", where=store.url_of(key))
    points: list[dict[str, Any]] = found["points"]
    return points


def list_evaluations(store: Store, scenario: str) -> list[datetime]:
    """Times of the scenario's whole evaluations, oldest first."""
    return _times(store, scenario, SUMMARY)


def _times(store: Store, scenario: str, file: str) -> list[datetime]:
    group = scenario_group(scenario)
    found = (key.removeprefix(f"{group}/").rpartition("/") for key in store.list_keys(group))
    return sorted(time for folder, _, name in found if name == file and (time := found_time(folder)) is not None)


def read_evaluation(store: Store, scenario: str, time: datetime) -> dict[str, Any]:
    """The summary of an evaluation, `sha256` with the hashes of the files beside it."""
    key = f"{evaluation_group(scenario, time)}/{SUMMARY}"
    return parsed_object(store.get(key), where=store.url_of(key))


def read_table(store: Store, scenario: str, time: datetime, name: str) -> pa.Table:
    """One of the evaluation's tables. Raises StoreError where it is not what its summary names."""
    file = f"{checked_name(name, 'table')}.parquet"
    key = f"{evaluation_group(scenario, time)}/{file}"
    data = store.get(key)
    if read_evaluation(store, scenario, time)["sha256"].get(file) != sha256_hex(data):
        raise StoreError("is not what its summary names", where=store.url_of(key), fix="the file was changed later")
    return pq.read_table(pa.BufferReader(data))


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), sink, compression="zstd")
    return bytes(sink.getvalue())
