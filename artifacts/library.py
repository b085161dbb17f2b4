"""Versioned snapshots of a template library: commit by one numbered manifest, read by its explicit paths.

Data files first, then the manifest by put-if-absent: readers see a whole snapshot or none, and of two writers of the
same number exactly one wins. A snapshot is whole in itself, so the loser simply takes the next number.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, Self

import pyarrow as pa
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from artifacts.canonical import canonical_json, parsed_object
from artifacts.keys import checked_name, is_name, manifest_group, manifest_key, manifest_version
from artifacts.schemas import SCHEMA_VERSION, TEMPLATE_SCHEMA, checked_columns
from artifacts.shards import ShardRecord, ShardStatus, moved_shard, read_shard, shard_bytes, shard_tables
from artifacts.store import Store
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, NoSolutionError, StoreConflictError, StoreError

_IN_FLIGHT: Final = 8
_COMMIT_ATTEMPTS: Final = 50
_DAMAGED: Final = (
    "this manifest is damaged or foreign: remove this object, which leaves the version before it as the newest, "
    "or name an older version (--library-version, show --version)"
)


class Manifest(BaseModel):
    """One snapshot of a library: its shards, what they were made from, and what became of each.

    `version` is 0 in a draft. `inputs` maps the name of each input to its hash, `parameters` echoes those of the build.
    `commit_id` is of this draft alone, so that a writer knows its own manifest after a lost answer.
    `retired`: keys (data files and manifests) that retention may be removing, and since when; no later snapshot names
    one of them. `repeats`: the version whose content this is, where retention had to take a number; 0 otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = SCHEMA_VERSION
    library: str
    version: int = Field(ge=0)
    created_at: AwareDatetime
    code_version: str
    commit_id: str
    inputs: Mapping[str, str]
    parameters: Mapping[str, JsonValue]
    shards: tuple[ShardRecord, ...]
    shards_expected: int
    shards_present: int
    shards_failed: int
    rows: int
    statistics: Mapping[str, float]
    retired: Mapping[str, AwareDatetime] = {}
    repeats: int = Field(default=0, ge=0)

    @property
    def partial(self) -> bool:
        """Whether shards failed, so that templates are missing from the snapshot."""
        return self.shards_failed > 0

    @property
    def present(self) -> tuple[ShardRecord, ...]:
        """The shards that have a data file."""
        return tuple(record for record in self.shards if record.status is ShardStatus.PRESENT)

    @property
    def failed(self) -> tuple[ShardRecord, ...]:
        """The shards that were given up."""
        return tuple(record for record in self.shards if record.status is ShardStatus.FAILED)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        present = self.present
        counted = (len(self.shards), len(present), len(self.shards) - len(present), sum(r.rows for r in present))
        stated = (self.shards_expected, self.shards_present, self.shards_failed, self.rows)
        if counted != stated:
            raise ValueError(f"has (shards, present, failed, rows) {counted} but states {stated}")
        if len({record.key for record in present}) != len(present):
            raise ValueError("names a data file twice")
        return self


def draft_manifest(
    *,
    library: str,
    shards: Sequence[ShardRecord],
    shards_expected: int,
    created_at: datetime,
    code_version: str,
    inputs: Mapping[str, str],
    parameters: Mapping[str, Any],
    statistics: Mapping[str, float] | None = None,
    allow_partial: bool = False,
) -> Manifest:
    """The manifest of a finished build, ready for `commit`; shards in the order of their keys.

    Raises NoSolutionError where shards failed and `allow_partial` is not set, ValueError where a shard is not recorded.
    """
    checked_name(library, "library")
    if len(shards) != shards_expected:
        raise ValueError(f"{shards_expected} shards were planned and {len(shards)} are recorded")
    failed = [record for record in shards if record.status is ShardStatus.FAILED]
    if failed and not allow_partial:
        raise NoSolutionError(
            f"{len(failed)} of {shards_expected} shards failed, first {failed[0].shard}: {failed[0].error}",
            where=f"library {library}",
            fix="build again (finished shards are reused), or allow a partial snapshot",
        )
    return Manifest(
        library=library,
        version=0,
        created_at=created_at,
        code_version=code_version,
        commit_id=uuid.uuid4().hex,
        inputs=dict(inputs),
        parameters=parsed_object(canonical_json(parameters), where="parameters"),
        shards=tuple(sorted(shards, key=lambda record: record.shard.key(library))),
        shards_expected=shards_expected,
        shards_present=shards_expected - len(failed),
        shards_failed=len(failed),
        rows=sum(record.rows for record in shards),
        statistics=dict(statistics or {}),
    )


def commit(store: Store, draft: Manifest) -> Manifest:
    """Publish the draft as the library's next version and return it with its number.

    Its data files must all be in the store. Those that retention may be removing just now are stored anew under other
    names: whoever takes a number has read what the version before it calls retired, and of retention and another writer
    only one gets that number. Raises StoreError where a data file is missing, StoreConflictError where other writers
    took every number that was tried.
    """
    _require_data_files(store, draft)
    version = newest_version(store, draft.library) + 1
    for _ in range(_COMMIT_ATTEMPTS):
        try:
            return commit_as(store, _clear_of_retired(store, draft, version), version)
        except StoreConflictError:
            version = max(version + 1, newest_version(store, draft.library) + 1)
    raise StoreConflictError(
        f"other writers took {_COMMIT_ATTEMPTS} versions in a row",
        where=f"library {draft.library}",
        fix="try again later",
    )


def commit_as(store: Store, draft: Manifest, version: int) -> Manifest:
    """Publish the draft as exactly this version. Raises StoreConflictError where another writer has it."""
    manifest = draft.model_copy(update={"version": version})
    store.put_once(manifest_key(manifest.library, version), canonical_json(manifest.model_dump()))
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySnapshot:
    """One committed version of a library, opened for reading."""

    store: Store
    manifest: Manifest

    @property
    def models(self) -> tuple[str, ...]:
        """Models that the build covered, sorted."""
        return tuple(sorted({record.shard.model for record in self.manifest.shards}))

    def read(
        self,
        *,
        models: Collection[str] | None = None,
        variants: Collection[str] | None = None,
        phases: Collection[Phase] | None = None,
        methods: Collection[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The rows of the chosen models, variants, phases and methods (all where None), shards in manifest order.

        Raises InputError for a model or column that the library does not have, StoreError for a data file that is
        missing, truncated, changed or foreign.
        """
        names = checked_columns(columns)
        chosen = self._chosen(models, variants, phases, methods)
        if not chosen:
            return TEMPLATE_SCHEMA.empty_table().select(names)
        with ThreadPoolExecutor(_IN_FLIGHT) as pool:
            return pa.concat_tables(
                list(pool.map(lambda record: read_shard(self.store, record, columns=names), chosen))
            )

    def tables(
        self,
        *,
        models: Collection[str] | None = None,
        variants: Collection[str] | None = None,
        phases: Collection[Phase] | None = None,
        methods: Collection[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[tuple[ShardRecord, pa.Table]]:
        """What `read` gives, a row group at a time with the shard it is of; raises as it does, as it goes on.

        Holds the compressed files of two shards and one row group, however large the library is.
        """
        names = checked_columns(columns)
        chosen = self._chosen(models, variants, phases, methods)
        return self._streamed(chosen, names)

    def _streamed(self, chosen: Sequence[ShardRecord], names: Sequence[str]) -> Iterator[tuple[ShardRecord, pa.Table]]:
        with ThreadPoolExecutor(1) as pool:
            files: deque[Future[bytes]] = deque()
            for number, record in enumerate(chosen):
                # The next file is on its way while this one's rows are in use.
                files.extend(
                    pool.submit(shard_bytes, self.store, item) for item in chosen[number + len(files) : number + 2]
                )
                data = files.popleft().result()
                for table in shard_tables(record, data, where=self.store.url_of(record.key), columns=names):
                    yield record, table

    def _chosen(
        self,
        models: Collection[str] | None,
        variants: Collection[str] | None,
        phases: Collection[Phase] | None,
        methods: Collection[str] | None,
    ) -> list[ShardRecord]:
        for model in models or ():
            if model not in self.models:
                raise InputError(
                    f"the library has no model {model!r}",
                    where=f"library {self.manifest.library} version {self.manifest.version}",
                    fix=f"it has {', '.join(self.models) or 'none'}; build one with this model",
                )
        return [
            record
            for record in self.manifest.present
            if (models is None or record.shard.model in models)
            and (variants is None or record.shard.variant in variants)
            and (phases is None or record.shard.phase in phases)
            and (methods is None or record.shard.method in methods)
        ]


def open_library(store: Store, library: str, version: int | None = None) -> LibrarySnapshot:
    """The library's snapshot of this version, the newest where None.

    Raises InputError where there is no such library or version, StoreError for a damaged manifest.
    """
    if version is None:
        version = require_library(store, library)
    return LibrarySnapshot(store=store, manifest=read_manifest(store, library, version))


def require_library(store: Store, library: str) -> int:
    """The library's newest version. Raises InputError where there is none."""
    version = newest_version(store, library)
    if version == 0:
        raise InputError(
            "no such library in the store",
            where=store.url_of(manifest_group(library)),
            fix=f"it has {', '.join(list_libraries(store)) or 'none'}; build one with `coral library build`",
        )
    return version


def read_manifest(store: Store, library: str, version: int) -> Manifest:
    """The manifest of one version, strictly validated. Raises InputError where absent, StoreError where damaged."""
    key = manifest_key(library, version)
    where = store.url_of(key)
    data = store.find(key)
    if data is None:
        versions = ", ".join(map(str, list_versions(store, library))) or "none"
        raise InputError(f"library {library} has no version {version}", where=where, fix=f"it has {versions}")
    stated = parsed_object(data, where=where, fix=_DAMAGED).get("schema_version")
    if isinstance(stated, int) and stated > SCHEMA_VERSION:
        raise StoreError(f"written by a newer coral (schema version {stated})", where=where, fix="update coral")
    try:
        manifest = Manifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "manifest"
        raise StoreError(f"{place}: {first['msg']}", where=where, fix=_DAMAGED) from error
    if (manifest.library, manifest.version) != (library, version):
        raise StoreError(
            f"is of library {manifest.library} version {manifest.version}, moved here", where=where, fix=_DAMAGED
        )
    return manifest


def newest_version(store: Store, library: str) -> int:
    """The newest committed version, 0 where there is none. Looks past the listing, which may lag behind."""
    version = max(list_versions(store, library), default=0)
    while store.exists(manifest_key(library, version + 1)):
        version += 1
    return version


def list_versions(store: Store, library: str) -> list[int]:
    """All committed versions, oldest first."""
    versions = [manifest_version(key) for key in store.list_keys(manifest_group(library))]
    return sorted(version for version in versions if version is not None)


def list_libraries(store: Store) -> list[str]:
    """Names of the libraries in the store that have a snapshot, sorted; groups with other names are not ours."""
    return [name for name in store.list_groups("libraries") if is_name(name) and list_versions(store, name)]


def retired_before(store: Store, library: str, version: int) -> Mapping[str, datetime]:
    """What the last readable manifest before this version calls retired; empty where there is none."""
    listed = {earlier for earlier in list_versions(store, library) if earlier < version}
    for earlier in sorted(listed | {version - 1}, reverse=True):
        try:
            return read_manifest(store, library, earlier).retired
        except (InputError, StoreError):
            continue  # absent, or damaged: readers are told, writers go on
    return {}


def require_not_retired(store: Store, library: str, version: int) -> None:
    """Raise StoreConflictError where retention may be removing this version: what needs it must not be written."""
    key = manifest_key(library, version)
    if key in retired_before(store, library, newest_version(store, library) + 1):
        raise StoreConflictError(
            "this version of the library is being removed (retention)",
            where=store.url_of(key),
            fix="plan again with the newest version, or one that `coral library list` shows",
        )


def _clear_of_retired(store: Store, draft: Manifest, version: int) -> Manifest:
    """The draft, to be published as this version, with no data file that is retired."""
    retired = retired_before(store, draft.library, version)
    shards = tuple(
        moved_shard(store, draft.library, record, avoid=retired) if record.key in retired else record
        for record in draft.shards
    )
    return draft.model_copy(update={"shards": shards, "retired": dict(retired)})


def _require_data_files(store: Store, draft: Manifest) -> None:
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        sizes = list(pool.map(lambda record: store.size_bytes(record.key), draft.present))
    for record, size in zip(draft.present, sizes, strict=True):
        if size != record.bytes:
            raise StoreError(
                f"the data file of {record.shard} has {size or 'no'} bytes, not {record.bytes}",
                where=store.url_of(record.key),
                fix="build again: other shards are reused",
            )
