"""Profiles in the store: one Parquet object per model, node configuration and engine, its metadata beside the columns.

Key: `profiles/<model>/<config>/<engine>-<version>-<dtype>[-<hash of flags>]/<time>.parquet`; the newest of a group counts, older ones stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from artifacts.group_pages import index_group
from artifacts.keys import found_time, profile_group, time_text
from artifacts.store import Store
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, StoreError
from coral_core.perf.profile import Profile, ProfileKey, ProfilePoint
from coral_core.perf.profile_check import check_values

SCHEMA: Final = pa.schema(
    [
        pa.field("phase", pa.string(), nullable=False),
        pa.field("tp", pa.int64(), nullable=False),
        pa.field("requests", pa.float64(), nullable=False),
        pa.field("tokens", pa.float64(), nullable=False),
        pa.field("layer_s", pa.float64(), nullable=False),
        pa.field("fixed_s", pa.float64()),
        pa.field("samples", pa.int64()),
        pa.field("cv_frac", pa.float64()),
    ]
)
FORMAT: Final = 1
_META: Final = b"coral.profile"
_SUFFIX: Final = ".parquet"


class _Metadata(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: int
    model: str
    variant: str
    config: str
    engine: str
    version: str
    flags: tuple[str, ...]
    source: str
    as_of: date
    kv_tokens: dict[int, float]
    start_s: dict[int, float]


def write_profile(store: Store, profile: Profile, *, time: datetime) -> str:
    """Write a profile, checked before (`checked_points`), once; its key. Raises StoreError where the store fails."""
    key = f"{_group(profile.key)}/{time_text(time)}{_SUFFIX}"
    rows = [{**asdict(point), "phase": point.phase.value} for point in profile.points]
    metadata = _Metadata(
        format=FORMAT,
        **asdict(profile.key),
        source=profile.source,
        as_of=profile.as_of,
        kv_tokens=dict(profile.kv_tokens),
        start_s=dict(profile.start_s),
    )
    table = pa.Table.from_pylist(rows, schema=SCHEMA).replace_schema_metadata({_META: metadata.model_dump_json()})
    out = pa.BufferOutputStream()
    pq.write_table(table, out, compression="zstd")
    store.put_once(key, out.getvalue().to_pybytes())
    index_group(store, _group(profile.key))
    return key


def newest_profile(store: Store, model: str, config: str, engine: str) -> Profile | None:
    """The newest profile of a group (`ProfileKey.engine_name`); None where there is none."""
    keys = _keys(store, profile_group(model, config, engine))
    return read_profile(store, keys[-1]) if keys else None


def list_profiles(store: Store) -> list[str]:
    """Keys of the newest profile of each group, sorted."""
    newest: dict[str, str] = {}
    for key in _keys(store, "profiles"):
        newest[key.rpartition("/")[0]] = key
    return sorted(newest.values())


def profiles_of(store: Store, model: str, variant: str) -> Iterator[tuple[str, Profile]]:
    """(key, newest profile) of each configuration and engine of a model in one dtype."""
    for key in list_profiles(store):
        if key.split("/")[1] == model:
            profile = read_profile(store, key)
            if profile.key.variant == variant:
                yield key, profile


def read_profile(store: Store, key: str) -> Profile:
    """The profile under a key. Raises StoreError where it cannot be read, is none, or lies in another one's place."""
    data = store.get(key)
    try:
        table = pq.read_table(pa.BufferReader(data))
        metadata = _Metadata.model_validate_json((table.schema.metadata or {}).get(_META, b"{}"))
    except (pa.ArrowException, ValidationError, OSError) as error:
        raise StoreError(
            f"is no profile: {_first_line(error)}",
            where=store.url_of(key),
            fix="remove it: the one before it then counts",
        ) from None
    if not table.schema.remove_metadata().equals(SCHEMA) or metadata.format != FORMAT:
        raise StoreError(f"has another format than {FORMAT}", where=store.url_of(key))
    facts: dict[str, Any] = metadata.model_dump()
    names = ("model", "variant", "config", "engine", "version", "flags")
    own = ProfileKey(**{name: facts[name] for name in names})
    if key.rpartition("/")[0] != _group(own):
        raise StoreError(f"is the profile of {_group(own)}", where=store.url_of(key), fix="move it there")
    return Profile(
        key=own,
        points=_points(table, store.url_of(key)),
        source=metadata.source,
        as_of=metadata.as_of,
        kv_tokens=metadata.kv_tokens,
        start_s=metadata.start_s,
    )


def _points(table: pa.Table, where: str) -> tuple[ProfilePoint, ...]:
    try:
        points = tuple(ProfilePoint(**{**row, "phase": Phase(row["phase"])}) for row in table.to_pylist())
        check_values(points, where=where)
    except InputError as error:
        raise StoreError(error.what, where=error.where, fix=error.fix) from None
    except (ValueError, TypeError) as error:
        raise StoreError(f"is no profile: {_first_line(error)}", where=where) from None
    return points


def _group(key: ProfileKey) -> str:
    return profile_group(key.model, key.config, key.engine_name)


def _keys(store: Store, group: str) -> list[str]:
    """Keys of profiles, by time within a group; what else lies there is passed over."""
    return sorted(
        key
        for key in store.list_keys(group)
        if key.endswith(_SUFFIX) and found_time(key.rpartition("/")[2].removesuffix(_SUFFIX)) is not None
    )


def _first_line(error: Exception) -> str:
    return json.dumps(str(error).splitlines()[0] if str(error) else type(error).__name__)
