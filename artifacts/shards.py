"""Shards of a template library: one Parquet file each, written once under the hash of its inputs, reused by resume.

Every file carries a seal, the SHA-256 of all its bytes with the seal's own digits as zeros: without a manifest, too, any
changed bit shows, and is seen before a byte is parsed. A file that is not whole is never deleted nor overwritten, for
older manifests name it by its hash and another writer may be at it as well: its shard is written anew under the next
repair's name, by put-if-absent.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from artifacts.canonical import canonical_json, sha256_hex
from artifacts.keys import shard_key
from artifacts.schemas import SCHEMA_VERSION, TEMPLATE_SCHEMA, require_template_schema
from artifacts.store import Store
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import StoreConflictError, StoreError

_LOG: Final = logging.getLogger(__name__)
_METADATA_KEY: Final = b"coral.shard"
_SEAL_KEY: Final = b"coral.seal"
_SEAL: Final = b"sha256 of this file, these digits as zeros: "
_DIGITS: Final = 64
_REPAIRS: Final = 9
_STRICT: Final = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
_REBUILD: Final = "build the library again and use its new version: only shards that are not whole are solved anew"


class ShardKey(BaseModel):
    """Which shard: part `part` of `parts` of one (model, variant, phase, SLO, method), and the hash of its inputs."""

    model_config = _STRICT

    model: str
    variant: str
    phase: Phase
    ttft_s: float = Field(gt=0)
    tpot_s: float = Field(gt=0)
    method: str
    part: int = Field(ge=0)
    parts: int = Field(ge=1)
    inputs_hash: str

    @property
    def slo(self) -> Slo:
        """The latency bounds."""
        return Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s)

    def key(self, library: str, *, repair: int = 0) -> str:
        """Where its data file lies, or the one that stands in for `repair` damaged ones.

        Raises InputError for names that cannot be part of a key.
        """
        return shard_key(
            library,
            model=self.model,
            variant=self.variant,
            phase=self.phase,
            slo=self.slo,
            method=self.method,
            part=self.part,
            parts=self.parts,
            inputs_hash=self.inputs_hash,
            repair=repair,
        )

    def __str__(self) -> str:
        return f"{self.model} {self.variant} {self.phase.value} {self.method} part {self.part + 1} of {self.parts}"


class ShardStatus(StrEnum):
    """`present`: its data file is in the store; `failed`: there is none, `error` says why."""

    PRESENT = "present"
    FAILED = "failed"


class ShardRecord(BaseModel):
    """What became of one shard. `key`, `rows`, `bytes`, `sha256` describe its data file: empty where it failed."""

    model_config = _STRICT

    shard: ShardKey
    status: ShardStatus
    attempts: int = Field(ge=1)
    key: str = ""
    rows: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    sha256: str = ""
    statistics: Mapping[str, float] = {}
    error: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.status is ShardStatus.PRESENT and not (self.key and self.bytes and self.sha256 and not self.error):
            raise ValueError("a present shard has a key, bytes and a hash, and no error")
        if self.status is ShardStatus.FAILED and (self.key or self.rows or self.bytes or self.sha256 or not self.error):
            raise ValueError("a failed shard has an error and no data file")
        return self


class _Embedded(BaseModel):
    """What a data file says of itself."""

    model_config = _STRICT

    schema_version: int
    shard: ShardKey
    rows: int
    attempts: int
    statistics: Mapping[str, float]


class ShardWriter:
    """The data file of one shard in the making: rows come piece by piece, and only their compressed form is held."""

    def __init__(self, shard: ShardKey) -> None:
        self._shard = shard
        self._rows = 0
        self._sink = io.BytesIO()  # an output stream on a store would publish half a file when it fails
        # The checksums are for other readers of Parquet: here the seal covers the pages too.
        self._file = pq.ParquetWriter(self._sink, TEMPLATE_SCHEMA, compression="zstd", write_page_checksum=True)

    def add(self, table: pa.Table) -> None:
        """Append rows. Raises StoreError for another schema, ValueError for rows that are not of this shard."""
        require_template_schema(table.schema, where=str(self._shard))
        stranger = _stranger(self._shard, table)
        if stranger:
            raise ValueError(f"rows of {stranger} in the shard {self._shard}")
        self._file.write_table(table.replace_schema_metadata(None))
        self._rows += table.num_rows

    def store(
        self, store: Store, library: str, *, statistics: Mapping[str, float] | None = None, attempts: int = 1
    ) -> ShardRecord:
        """Store the rows under the hash of the shard's inputs and say what was stored; nothing can be added then.

        Where a whole file of that name exists its record is returned instead: equal inputs have equal results. Where
        there are damaged ones, this is logged and counted in the statistics as `damaged_files`. Raises StoreError where
        even the last repair is damaged.
        """
        place = _place_of(store, library, self._shard)
        if place.record is not None:
            return place.record
        repaired = {"damaged_files": len(place.damaged)} if place.damaged else {}
        embedded = _Embedded(
            schema_version=SCHEMA_VERSION,
            shard=self._shard,
            rows=self._rows,
            attempts=attempts,
            statistics={**(statistics or {}), **repaired},
        )
        self._file.add_key_value_metadata(
            {_METADATA_KEY: canonical_json(embedded.model_dump()), _SEAL_KEY: _SEAL + b"0" * _DIGITS}
        )
        self._file.close()
        data = _sealed(self._sink.getvalue())
        try:
            store.put_if_absent(place.key, data)
        except StoreConflictError:
            existing = find_shard(store, library, self._shard)
            if existing is None:
                raise  # deleted between the two calls: someone tidies up here, do not fight over it
            return existing
        for error in place.damaged:
            _LOG.warning("%s: %s; its shard was written anew as %s", error.where, error.what, place.key)
        return _record(embedded, place.key, data)


def write_shard(
    store: Store,
    library: str,
    shard: ShardKey,
    table: pa.Table,
    *,
    statistics: Mapping[str, float] | None = None,
    attempts: int = 1,
) -> ShardRecord:
    """Store all rows of a shard at once; see `ShardWriter`."""
    writer = ShardWriter(shard)
    writer.add(table)
    return writer.store(store, library, statistics=statistics, attempts=attempts)


def find_shard(store: Store, library: str, shard: ShardKey) -> ShardRecord | None:
    """The record of the shard, if a whole data file of it is in the store from an earlier build; damaged ones are no file.

    Raises StoreError where the store fails, or where all files of all repairs are damaged.
    """
    return _place_of(store, library, shard).record


def failed_shard(shard: ShardKey, *, error: str, attempts: int) -> ShardRecord:
    """The record of a shard that was given up after `attempts`."""
    return ShardRecord(shard=shard, status=ShardStatus.FAILED, attempts=attempts, error=error or "no reason was given")


def read_shard(store: Store, record: ShardRecord, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a present shard, after checking that they are those that its record describes.

    Raises StoreError for an object that is missing, truncated, changed or foreign.
    """
    where = store.url_of(record.key)
    return pa.concat_tables(shard_tables(record, shard_bytes(store, record), where=where, columns=columns))


def shard_bytes(store: Store, record: ShardRecord) -> bytes:
    """The data file of a present shard. Raises StoreError unless it is the one whose hash the record names."""
    where = store.url_of(record.key)
    data = store.find(record.key)
    if data is None:
        raise StoreError("a data file of the library is missing", where=where, fix=_REBUILD)
    if len(data) != record.bytes or sha256_hex(data) != record.sha256:
        raise StoreError(
            f"damaged: its {len(data)} bytes are not the {record.bytes} whose hash the manifest names",
            where=where,
            fix=_REBUILD,
        )
    return data


def shard_tables(
    record: ShardRecord, data: bytes, *, where: str, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The rows of a data file as its row groups, an empty table first. Raises StoreError for rows of another shard."""
    embedded, tables = _parsed(data, where=where, columns=columns)
    if embedded.shard != record.shard or embedded.rows != record.rows:
        raise StoreError(
            f"holds {embedded.rows} rows of {embedded.shard}, not {record.rows} of {record.shard}",
            where=where,
            fix=_REBUILD,
        )
    return tables


def moved_shard(store: Store, library: str, record: ShardRecord, *, avoid: Container[str]) -> ShardRecord:
    """The same shard under a key that is not among those to avoid: as it is there already, else stored anew.

    Raises StoreError where its data file has gone or no name is left.
    """
    data = store.find(record.key)
    is_whole = data is not None and sha256_hex(data) == record.sha256
    for repair in range(_REPAIRS + 1):
        key = record.shard.key(library, repair=repair)
        if key in avoid:
            continue
        if data is not None and is_whole:
            try:
                store.put_once(key, data)
            except StoreConflictError:
                _LOG.debug("%s: another file of this shard is there", key)
            else:
                return record.model_copy(update={"key": key})
        there = store.find(key)
        if there is None:
            continue
        try:
            return _verified(there, key, record.shard, where=store.url_of(key))
        except StoreError as error:
            _LOG.warning("%s: %s", error.where, error.what)
    raise StoreError(
        "a data file was removed by retention before it could be used", where=store.url_of(record.key), fix=_REBUILD
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The whole file of a shard, or where to write one; and what is wrong with those in the way."""

    key: str
    record: ShardRecord | None
    damaged: list[StoreError]


def _place_of(store: Store, library: str, shard: ShardKey) -> _Place:
    damaged: list[StoreError] = []
    for repair in range(_REPAIRS + 1):
        key = shard.key(library, repair=repair)
        data = store.find(key)
        if data is None:
            return _Place(key=key, record=None, damaged=damaged)
        try:
            return _Place(key=key, record=_verified(data, key, shard, where=store.url_of(key)), damaged=damaged)
        except StoreError as error:
            damaged.append(error)
    raise StoreError(
        f"all {len(damaged)} data files of {shard} are damaged, so writing another will not help",
        where=damaged[0].where,
        fix="check the storage, then delete them and build again",
    )


def _verified(data: bytes, key: str, shard: ShardKey, *, where: str) -> ShardRecord:
    """The record of a file found under the shard's key. Raises StoreError unless it is exactly what a writer stored."""
    if _sealed(data) != data:
        raise StoreError("damaged: its bytes do not have the hash that it states", where=where, fix=_REBUILD)
    embedded, _ = _parsed(data, where=where, columns=[])
    if embedded.shard != shard:
        raise StoreError(f"holds the shard {embedded.shard}, not {shard}", where=where, fix=_REBUILD)
    return _record(embedded, key, data)


def _sealed(data: bytes) -> bytes:
    """The file with the seal that it should have; empty where it has no place for one."""
    start = data.rfind(_SEAL) + len(_SEAL)
    end = start + _DIGITS
    if start < len(_SEAL) or end > len(data):
        return b""
    digest = hashlib.sha256(memoryview(data)[:start])
    digest.update(b"0" * _DIGITS)
    digest.update(memoryview(data)[end:])
    return b"".join((data[:start], digest.hexdigest().encode(), data[end:]))


def _record(embedded: _Embedded, key: str, data: bytes) -> ShardRecord:
    return ShardRecord(
        shard=embedded.shard,
        status=ShardStatus.PRESENT,
        attempts=embedded.attempts,
        key=key,
        rows=embedded.rows,
        bytes=len(data),
        sha256=sha256_hex(data),
        statistics=embedded.statistics,
    )


def _parsed(data: bytes, *, where: str, columns: Sequence[str] | None) -> tuple[_Embedded, Iterator[pa.Table]]:
    """What the file says of itself, and its rows, a row group at a time; StoreError unless both are whole and of this version.

    The rows are read, and errors in them raised, as the iterator goes on.
    """
    with _damage_named(where):
        file = pq.ParquetFile(io.BytesIO(data))
        embedded = _Embedded.model_validate_json((file.metadata.metadata or {})[_METADATA_KEY])
        require_template_schema(file.schema_arrow, where=where)
    if embedded.schema_version != SCHEMA_VERSION or file.metadata.num_rows != embedded.rows:
        raise StoreError(
            f"schema version {embedded.schema_version} with {file.metadata.num_rows} of {embedded.rows} rows",
            where=where,
            fix=_REBUILD,
        )
    return embedded, _row_groups(file, where, TEMPLATE_SCHEMA.names if columns is None else list(columns))


def _row_groups(file: pq.ParquetFile, where: str, columns: list[str]) -> Iterator[pa.Table]:
    wanted = pa.schema([TEMPLATE_SCHEMA.field(name) for name in columns])
    yield wanted.empty_table()
    for group in range(file.num_row_groups):
        with _damage_named(where):
            table = file.read_row_group(group, columns=columns)
        yield table.replace_schema_metadata(None).select(columns).cast(wanted)


@contextmanager
def _damage_named(where: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"not a whole Parquet file: {error}", where=where, fix=_REBUILD) from error
    except (KeyError, ValidationError) as error:
        raise StoreError("a Parquet file, but not a shard of a library", where=where, fix=_REBUILD) from error


def _stranger(shard: ShardKey, table: pa.Table) -> str:
    """A value in the rows that is not the shard's, as text; empty where there is none."""
    identity: dict[str, Any] = {
        "model": shard.model,
        "variant": shard.variant,
        "phase": shard.phase.value,
        "ttft_s": shard.ttft_s,
        "tpot_s": shard.tpot_s,
        "method": shard.method,
    }
    for column, value in identity.items():
        for found in pc.unique(table[column]).to_pylist():
            if found != value:
                return f"{column}={found}"
    return ""
