"""What may be removed from a library, and its removal, beside writers and readers that go on. Kept snapshots stay whole.

Needed is: the newest snapshots, whatever was replaced or written not long ago, and every snapshot that a plan's decision
names (written first of a plan's files, so plans in the making count). Everything else goes, in this order:

1. The next version is taken by put-if-absent, with the newest content and the list of what is retired. Whoever commits
   later reads that list first and names nothing of it (`library.commit`), and whoever records a plan sees that its
   library is retired (`plans.write_plan`); a commit that was quicker makes this step fail, and all is looked at anew.
2. Plans are read once more: what one of them has come to need since is spared.
3. Manifests go, then data files. A crash leaves data files without a manifest, which the next run finds: never a
   manifest without its data files.

Names stay retired for a week after, so that a removal that was held up cannot meet a file that was written anew.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.keys import is_shard_key, library_group, manifest_group, manifest_key, manifest_version
from artifacts.library import Manifest, commit_as, read_manifest, require_library
from artifacts.plans import DECISION
from artifacts.store import Entry, Store
from coral_core.clock import Clock
from coral_core.errors import InputError, StoreConflictError, StoreError

GUARD: Final = timedelta(hours=24)
"""What is younger is never removed: builds and plans under way may need it."""

_STAYS_RETIRED: Final = timedelta(days=7)
_LONGEST: Final = timedelta(days=36_500)
_SWEEP: Final = timedelta(hours=1)
_ATTEMPTS: Final = 5
_IN_FLIGHT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Keep the newest `keep`, and all that was in use within `older_than` (at least `GUARD`). InputError for nonsense."""

    keep: int = 3
    older_than: timedelta = timedelta(days=30)

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise InputError(f"{self.keep} kept would leave nothing", where="--keep", fix="keep 1 or more")
        if not timedelta() <= self.older_than <= _LONGEST:
            raise InputError(
                f"{self.older_than} is no age from 0 to {_LONGEST.days} days",
                where="--older-than",
                fix="write 30d or 12h",
            )

    def before(self, now: datetime) -> datetime:
        """What was last in use before this moment may go."""
        return now - max(self.older_than, GUARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A version that stays, and why."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRemoval:
    """What retention would remove of a library as it was at version `newest`; `waiting` data files are too young."""

    library: str
    newest: Manifest
    kept: tuple[Kept, ...]
    versions: tuple[int, ...]
    files: tuple[Entry, ...]
    waiting: int

    @property
    def size_bytes(self) -> int:
        """Size of the data files that would go."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def keys(self) -> tuple[str, ...]:
        """Manifests, then data files: the order in which they go."""
        return (*(manifest_key(self.library, v) for v in self.versions), *(entry.key for entry in self.files))


def plan_removal(store: Store, library: str, rule: Rule, now: datetime) -> LibraryRemoval:
    """What the rule lets go of the library at this moment; changes nothing.

    Raises InputError where there is no such library, StoreError where a manifest or a decision cannot be read, as what
    it needs is not known then.
    """
    newest = require_library(store, library)
    written = {
        version: entry.modified
        for entry in store.list_entries(manifest_group(library))
        if (version := manifest_version(entry.key)) is not None
    }
    manifests = {version: _manifest(store, library, version) for version in sorted({*written, newest})}
    kept = _kept(manifests, written, _pinned(store, library), rule, now)
    needed = _files(manifests[version] for version in kept)
    unneeded = [
        entry
        for entry in store.list_entries(f"{library_group(library)}/data")
        if entry.key not in needed and is_shard_key(entry.key)
    ]
    old = tuple(entry for entry in unneeded if entry.modified < rule.before(now))
    contents = [_files([manifests[version]]) for version in kept]
    if not old and all(_files([manifests[version]]) in contents for version in manifests):
        # Every removal repeats a version: one that frees nothing is not worth another number.
        kept |= {version: "same content as one that is kept" for version in manifests if version not in kept}
    return LibraryRemoval(
        library=library,
        newest=manifests[newest],
        kept=tuple(Kept(version=version, reason=kept[version]) for version in sorted(kept)),
        versions=tuple(version for version in sorted(manifests) if version not in kept),
        files=old,
        waiting=len(unneeded) - len(old),
    )


def remove_unneeded(store: Store, library: str, rule: Rule, clock: Clock) -> LibraryRemoval:
    """Remove what the rule lets go of, and say what went; safe beside any other call, and to repeat after a crash.

    Raises as `plan_removal` does, and StoreConflictError where writers committed faster than this could look.
    """
    for _ in range(_ATTEMPTS):
        removal = plan_removal(store, library, rule, clock.now())
        if not removal.keys:
            return removal
        start_s = clock.monotonic_s()
        try:
            _retire(store, removal, clock.now())
        except StoreConflictError:
            continue
        removal = _without_pinned(store, removal)
        for key in removal.keys:
            if clock.monotonic_s() - start_s > _SWEEP.total_seconds():
                raise StoreError("the removal took too long", where=store.url_of(key), fix="run it again: it goes on")
            store.delete(key)
        return removal
    raise StoreConflictError(
        f"other writers committed {_ATTEMPTS} times meanwhile", where=f"library {library}", fix="try again later"
    )


def _kept(
    manifests: Mapping[int, Manifest],
    written: Mapping[int, datetime],
    pinned: Mapping[int, str],
    rule: Rule,
    now: datetime,
) -> dict[int, str]:
    """Why each version is kept that is. A version that repeats another does not count beside it."""
    kept: dict[int, str] = {}
    contents: set[frozenset[str]] = set()
    replaced: datetime | None = None
    for version in sorted(manifests, reverse=True):
        content = _files([manifests[version]])
        if content not in contents and len(contents) < rule.keep:
            kept[version] = "newest" if replaced is None else f"one of the newest {rule.keep}"
            contents.add(content)
        elif version in pinned:
            kept[version] = f"needed by {pinned[version]}"
        elif replaced is not None and replaced >= rule.before(now):
            kept[version] = f"replaced at {replaced:%Y-%m-%d %H:%M} UTC only"
        # One that the listing lacked was written just now.
        replaced = written.get(version, now)
    return kept


def _files(manifests: Iterable[Manifest]) -> frozenset[str]:
    return frozenset(record.key for manifest in manifests for record in manifest.present)


def _manifest(store: Store, library: str, version: int) -> Manifest:
    try:
        return read_manifest(store, library, version)
    except StoreError as error:
        raise StoreError(
            f"nothing is removed, as what it needs is not known: {error.what}", where=error.where, fix=error.fix
        ) from error


def _retire(store: Store, removal: LibraryRemoval, now: datetime) -> None:
    """Take the next version for the newest content and the list of what is retired. StoreConflictError if it is taken."""
    newest = removal.newest
    retired = {key: since for key, since in newest.retired.items() if now - since < _STAYS_RETIRED}
    retired |= dict.fromkeys(removal.keys, now)
    update = {"commit_id": uuid.uuid4().hex, "retired": retired, "repeats": newest.repeats or newest.version}
    commit_as(store, newest.model_copy(update=update), newest.version + 1)


def _without_pinned(store: Store, removal: LibraryRemoval) -> LibraryRemoval:
    """The removal without what a plan needs that was recorded since it was planned."""
    pinned = _pinned(store, removal.library)
    spared = [version for version in removal.versions if version in pinned]
    if not spared:
        return removal
    needed = _files(_manifest(store, removal.library, version) for version in spared)
    return replace(
        removal,
        kept=(*removal.kept, *(Kept(version=v, reason=f"needed by {pinned[v]}") for v in spared)),
        versions=tuple(version for version in removal.versions if version not in pinned),
        files=tuple(entry for entry in removal.files if entry.key not in needed),
    )


class _Library(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    version: int = Field(ge=1)


class _Decision(BaseModel):
    model_config = ConfigDict(extra="ignore")

    library: _Library


def _pinned(store: Store, library: str) -> dict[int, str]:
    """The library's versions that plans name, each with the newest such plan's group."""
    keys = [key for key in store.list_keys("plans") if key.endswith(f"/{DECISION}")]
    pinned: dict[int, str] = {}
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        for key, used in zip(keys, pool.map(lambda key: _used_library(store, key), keys), strict=True):
            if used is not None and used.name == library:
                pinned[used.version] = key.removesuffix(f"/{DECISION}")
    return pinned


def _used_library(store: Store, key: str) -> _Library | None:
    """What a decision names; None where it was removed meanwhile."""
    data = store.find(key)
    if data is None:
        return None
    try:
        return _Decision.model_validate_json(data).library
    except ValidationError as error:
        raise StoreError(
            "nothing is removed, as what this decision needs is not known: it is damaged or foreign",
            where=store.url_of(key),
            fix="remove its folder, or move it out of plans/",
        ) from error
