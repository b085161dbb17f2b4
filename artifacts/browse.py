"""Objects of the store for whoever looks at them: list, describe, fetch, and link. Reads only, but for `fetch`.

Nothing here knows more of an object than its key and bytes say; what is damaged or foreign is shown as far as it goes.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.canonical import parsed_object
from artifacts.keys import INDEX, index_key, manifest_key, manifest_version
from artifacts.library import Manifest, read_manifest
from artifacts.store import Entry, Store
from coral_core.errors import InputError, StoreError

_TEXTS: Final = {".md": "markdown"} | dict.fromkeys((".csv", ".jsonl", ".log", ".svg", ".txt", ".yaml", ".yml"), "text")
_SUGGESTED_OF: Final = 2000
"""Names that a missing key is compared with at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What lies under a prefix: groups (full keys, only where they are not gone into) and objects, both sorted."""

    prefix: str
    groups: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """An object for people. `kind`: json, parquet, manifest, markdown, html, text or binary.

    `document` is its content as JSON has it: the value itself, a table's columns and first rows, the counts of a
    manifest; `text` is set for markdown and text.
    """

    key: str
    url: str
    kind: str
    size_bytes: int
    document: Any = None
    text: str = ""


def listing(store: Store, prefix: str = "", *, recursive: bool = False) -> Listing:
    """Groups and objects directly under the prefix (all objects below where `recursive`); an object's key lists it.

    Raises InputError, with near keys, where nothing is there.
    """
    prefix = prefix.strip("/")
    if recursive:
        found = Listing(prefix=prefix, groups=(), entries=tuple(store.list_entries(prefix)))
    else:
        groups, entries = store.browse(prefix)
        base = f"{prefix}/" if prefix else ""
        found = Listing(prefix=prefix, groups=tuple(f"{base}{name}" for name in groups), entries=tuple(entries))
    if found.groups or found.entries or not prefix:
        return found
    parent = str(PurePosixPath(prefix).parent)
    entries = [entry for entry in store.browse("" if parent == "." else parent)[1] if entry.key == prefix]
    if not entries:
        raise _unknown(store, prefix)
    return Listing(prefix=prefix, groups=(), entries=tuple(entries))


def describe(store: Store, key: str, *, rows: int = 10) -> Description:
    """The object under the key, or the page of the group of that name, with `rows` rows of a table at most.

    Raises InputError, with near keys, where there is none, StoreError where it is not what its name says.
    """
    key, data = _found(store, key)
    where = store.url_of(key)
    name = PurePosixPath(key)
    kind, document, text = "binary", None, ""
    if _is_manifest(key):
        kind, document = "manifest", _summary(read_manifest(store, name.parts[1], manifest_version(key) or 0))
    elif name.suffix == ".json":
        kind, document = "json", _json(data, where)
    elif name.suffix == ".parquet":
        kind, document = "parquet", _table(data, where, rows)
    elif name.suffix == ".html":
        kind = "html"
    elif name.suffix in _TEXTS:
        kind, text = _TEXTS[name.suffix], _text(data, where)
    return Description(key=key, url=where, kind=kind, size_bytes=len(data), document=document, text=text)


def fetch(store: Store, key: str, to: Path, *, force: bool = False) -> Path:
    """Write the object into the file (into the folder, under its own name) `to`: all of it or nothing.

    Raises InputError where there is no such object or folder and where a file is in the way that `force` does not allow
    to replace, StoreError where it cannot be written.
    """
    key = key.strip("/")
    try:
        target = _target(to, PurePosixPath(key).name, force=force)
        data = store.find(key)
        if data is None:
            raise _unknown(store, key)
        _write(target, data, force=force)
    except FileExistsError:
        raise InputError(
            "a file of this name exists", where=str(to), fix="choose another --to, or give --force"
        ) from None
    except OSError as error:
        raise StoreError(
            f"cannot be written: {error.strerror or error}", where=str(to), fix="choose another --to"
        ) from error
    return target


def _target(to: Path, name: str, *, force: bool) -> Path:
    target = to / name if to.is_dir() else to
    if not target.parent.is_dir():
        raise InputError("no such folder", where=str(target.parent), fix="create it, or choose another --to")
    if target.exists() and not force:
        raise FileExistsError
    return target


def _write(target: Path, data: bytes, *, force: bool) -> None:
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if force:
            part.replace(target)
        else:
            target.hardlink_to(part)  # unlike a rename, never in place of a file that came meanwhile
    finally:
        part.unlink(missing_ok=True)


def link_of(store: Store, key: str, *, environment: Mapping[str, str] | None = None) -> str:
    """Where a person opens an object, or the page of a group: a path, a console page on AWS, else the server's URL.

    On AWS the page asks for a login there; links to other S3 servers need one that shows objects over http.
    """
    environment = os.environ if environment is None else environment
    parts = urlsplit(store.url)
    if parts.scheme == "file":
        return Path(unquote(parts.path), key).as_uri()
    if parts.scheme != "s3":
        return store.url_of(key)
    whole = "/".join(filter(None, (parts.path.strip("/"), key)))
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        return f"{endpoint.rstrip('/')}/{parts.netloc}/{quote(whole, safe='/=')}"
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    is_object = "." in PurePosixPath(key).name and not key.endswith("/")
    kind, prefix = ("object", whole) if is_object else ("buckets", f"{whole.rstrip('/')}/")
    return f"https://{region}.console.aws.amazon.com/s3/{kind}/{parts.netloc}?region={region}&prefix={quote(prefix)}"


def _found(store: Store, key: str) -> tuple[str, bytes]:
    """The object, or the group's page, and its bytes."""
    key = key.strip("/")
    for candidate in (key, index_key(key)) if key else (INDEX,):
        data = store.find(candidate)
        if data is not None:
            return candidate, data
    raise _unknown(store, key)


def _unknown(store: Store, key: str) -> InputError:
    """The error for a key that is not there: what is near it, looked for in the nearest group that exists."""
    where = store.url_of(key) if key else store.url
    groups, entries = store.browse(key) if key else ([], [])
    if groups or entries:
        return InputError("a group, not an object", where=where, fix=f"list it with `coral artifacts ls {key}`")
    parts = key.split("/") if key else []
    for depth in range(len(parts) - 1, -1, -1):
        parent = "/".join(parts[:depth])
        groups, entries = store.browse(parent)
        known = [*groups, *(PurePosixPath(entry.key).name for entry in entries)]
        if known:
            near = difflib.get_close_matches(parts[depth], known[:_SUGGESTED_OF])
            fix = f"did you mean {' or '.join('/'.join([*parts[:depth], name]) for name in near)}?"
            if not near:
                fix = f"see `{f'coral artifacts ls {parent}'.strip()}`"
            return InputError("no such object or group", where=where, fix=fix)
    return InputError("the store is empty", where=where, fix="check --store and CORAL_STORE")


def _is_manifest(key: str) -> bool:
    version = manifest_version(key)
    parts = PurePosixPath(key).parts
    return version is not None and len(parts) == 4 and key == manifest_key(parts[1], version)


def _summary(manifest: Manifest) -> dict[str, Any]:
    """The counts and origins of a snapshot, its shards gathered by model, variant, phase and method."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in manifest.shards:
        shard = record.shard
        identity = (shard.model, shard.variant, shard.phase.value, shard.method)
        row = groups.setdefault(
            identity,
            {
                **dict(zip(("model", "variant", "phase", "method"), identity, strict=True)),
                "shards": 0,
                "failed": 0,
                "templates": 0,
                "size_bytes": 0,
            },
        )
        row["shards"] += 1
        row["failed"] += not record.key
        row["templates"] += record.rows
        row["size_bytes"] += record.bytes
    plain = manifest.model_dump(mode="json", exclude={"shards"})
    return {**plain, "size_bytes": sum(r.bytes for r in manifest.shards), "groups": [groups[i] for i in sorted(groups)]}


def _table(data: bytes, where: str, rows: int) -> dict[str, Any]:
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        head = next(file.iter_batches(batch_size=rows), None) if rows else None
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"not a whole Parquet file: {error}", where=where, fix="its writer makes it anew") from error
    columns = [
        {"column": column.name, "type": str(column.type), "nullable": column.nullable} for column in file.schema_arrow
    ]
    return {
        "rows": file.metadata.num_rows,
        "columns": columns,
        "row_groups": file.num_row_groups,
        "head": [] if head is None else [_plain(row) for row in head.to_pylist()],
    }


def _plain(row: Any) -> Any:  # noqa: ANN401 - any row of a table
    """A row as JSON has it: NaN and infinities as null, what JSON does not know as text."""
    return json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)


def _json(data: bytes, where: str) -> Any:  # noqa: ANN401 - any JSON value
    if data.lstrip()[:1] == b"{":
        return parsed_object(data, where=where)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"not valid JSON: {error}", where=where, fix="the object is damaged or foreign") from error


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"not UTF-8 text: {error}", where=where, fix="fetch it with `coral artifacts get`") from error
