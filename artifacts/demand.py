"""Measured demand of a fleet: small objects of JSON lines, appended by whoever counts requests, read by whoever plans.

One line is one `DemandSample`: {"time": end, "duration_s", "model", "requests_per_s", "mean_input_tokens",
"mean_output_tokens"}. An object is written once and named by the time its last sample ends, so that a reader finds the
stretches it needs by name. Lines that cannot be read cost themselves only, and are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from artifacts.canonical import canonical_json
from artifacts.keys import demand_group, demand_key, demand_time
from artifacts.store import Store
from coral_core.errors import InputError
from coral_core.forecast.history import DemandSample

LONGEST_OBJECT_S: Final = 3600.0
"""No object holds samples that end further apart: readers look no further behind a stretch than this."""
_READERS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDemand:
    """The samples of some stretches of time, `objects` read, and what could not be read of them."""

    samples: tuple[DemandSample, ...]
    objects: int
    faults: tuple[str, ...]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    time: AwareDatetime
    duration_s: float
    model: str
    requests_per_s: float
    mean_input_tokens: float | None = None
    mean_output_tokens: float | None = None


def append_demand(store: Store, fleet: str, samples: Iterable[DemandSample], *, source: str) -> list[str]:
    """Write the samples, in objects of an hour at most; their keys. Repeating the same call is harmless.

    `source` names the writer. Raises InputError for a name that cannot be in a key, StoreConflictError where the writer
    has told other samples of the same time before.
    """
    keys = []
    for group in _hours(sorted(samples, key=lambda sample: (sample.time_s, sample.model))):
        key = demand_key(fleet, _time(group[-1].time_s), source)
        store.put_once(key, b"".join(canonical_json(_document(sample)) + b"\n" for sample in group))
        keys.append(key)
    return keys


def read_demand(store: Store, fleet: str, windows: Sequence[tuple[float, float]]) -> StoredDemand:
    """All samples that end within any of the windows (from, to; seconds since 1970), and some around them.

    Objects of other names are passed over. Raises StoreError where the store cannot be read.
    """
    spans = [(_time(start_s), _time(end_s + LONGEST_OBJECT_S)) for start_s, end_s in windows]
    days = {start + timedelta(days=n) for start, end in spans for n in range((end.date() - start.date()).days + 1)}
    listed = {key for group in sorted({demand_group(fleet, day) for day in days}) for key in store.list_keys(group)}
    wanted = sorted(
        key
        for key in listed
        if (time := demand_time(key)) is not None and any(start <= time <= end for start, end in spans)
    )
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda key: _parsed(store.find(key) or b"", store.url_of(key)), wanted))
    return StoredDemand(
        samples=tuple(sample for samples, _ in found for sample in samples),
        objects=len(wanted),
        faults=tuple(fault for _, faults in found for fault in faults),
    )


def _hours(samples: Sequence[DemandSample]) -> list[list[DemandSample]]:
    groups: list[list[DemandSample]] = []
    for sample in samples:
        if not groups or sample.time_s - groups[-1][0].time_s > LONGEST_OBJECT_S:
            groups.append([])
        groups[-1].append(sample)
    return groups


def _document(sample: DemandSample) -> dict[str, object]:
    return {
        "time": _time(sample.time_s),
        "duration_s": sample.duration_s,
        "model": sample.model,
        "requests_per_s": sample.requests_per_s,
        "mean_input_tokens": sample.mean_input_tokens,
        "mean_output_tokens": sample.mean_output_tokens,
    }


def _parsed(data: bytes, where: str) -> tuple[list[DemandSample], list[str]]:
    """The samples of the lines that are whole, and one fault for each other line."""
    samples, faults = [], []
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            parsed = _Line.model_validate_json(line)
            samples.append(DemandSample(time_s=parsed.time.timestamp(), **parsed.model_dump(exclude={"time"})))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            faults.append(f"{where}:{number}: {place + ': ' if place else ''}{first['msg']}; the line is left out")
        except InputError as error:
            faults.append(f"{where}:{number}: {error}; the line is left out")
    if not lines:
        faults.append(f"{where}: is empty")
    return samples, faults


def _time(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)
