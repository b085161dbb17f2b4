"""The object store: local folders, S3 and (for tests) memory behind one small interface.

The only file that imports obstore. Put-if-absent is the only primitive that correctness relies upon: it exists on S3
(`If-None-Match: *`) and on local folders (hard link) alike. Every write is one put of bytes in memory, so no reader
ever sees a part of an object under its key.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from artifacts.store_errors import explained, first_line, is_missing_bucket
from coral_core.errors import InputError, StoreConflictError, StoreError, StoreUnreachableError

if TYPE_CHECKING:  # obstore has these names for type checkers only
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config

SCHEMES: Final = "file:///absolute/folder, s3://bucket/prefix or memory://name"

# A flow has its own retries: a dead endpoint must be told within seconds, not obstore's three minutes.
_S3_RETRIES: Final[RetryConfig] = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
_TIMEOUT: Final = timedelta(seconds=120)
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_TRIES: Final = 3
_PAUSE_S: Final = 0.2
_RETRY_WITHIN_S: Final = 10.0
"""The library repeats reads and answers of 5xx, but neither creates nor removals nor listings whose connection broke."""

_EXISTS: Final = "an object exists under this key"
_REFRESH: Final = "refresh and try again"


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object as a listing gives it; `modified` is by the store's clock."""

    key: str
    size_bytes: int
    modified: datetime


class Store:
    """Objects under keys below one URL. Open with `open_store`; pickles as its URL and is opened anew there.

    Every method raises StoreError, naming the object and the fix, where the store cannot be reached, refuses, or has
    no such object, and InputError for a key that is not a plain relative path.
    """

    __slots__ = ("_objects", "url")

    def __init__(self, url: str, objects: ObjectStore) -> None:
        self.url = url
        self._objects = objects

    def __reduce__(self) -> tuple[object, ...]:
        return (open_store, (self.url,))

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def url_of(self, key: str) -> str:
        """The full URL of an object or group, for people and links."""
        return f"{self.url}/{key}"

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write the object, or raise StoreConflictError and change nothing where one exists under this key.

        Where an answer was lost it is found out by reading whether the write took effect; so bytes that tell writers
        apart (a token, a hash) are recognised as one's own. A conflict may still be with one's own object, where the
        client repeated a request by itself: see `put_once`.
        """
        try:
            self._create(key, data)
        except StoreUnreachableError as error:
            self._settled(key, data, error)

    def _create(self, key: str, data: bytes) -> None:
        with self._reported(key, "writing"):
            obstore.put(self._objects, _checked(key), data, mode="create", use_multipart=False)

    def _settled(self, key: str, data: bytes, first: StoreUnreachableError) -> None:
        """Find out what became of a create whose answer was lost, and repeat it where nothing did."""
        for _ in _pauses():
            try:
                found = self.find(key)
                if found == data:
                    return
                if found is None:
                    self._create(key, data)
                    return
            except StoreConflictError:
                continue  # the lost one arrived in between, or another writer's: read which
            except StoreUnreachableError:
                continue
            raise StoreConflictError(_EXISTS, where=self.url_of(key), fix=_REFRESH)
        raise first

    def put_once(self, key: str, data: bytes) -> None:
        """Like `put_if_absent`, but accepts that exactly these bytes are there already: safe to repeat."""
        try:
            self.put_if_absent(key, data)
        except StoreConflictError:
            if self.find(key) != data:
                raise

    def put(self, key: str, data: bytes) -> None:
        """Write the object, in place of any that exists. For pages that are regenerated, never for records."""
        with self._reported(key, "writing"):
            obstore.put(self._objects, _checked(key), data, mode="overwrite", use_multipart=False)

    def get(self, key: str) -> bytes:
        """All bytes of the object."""
        data = self.find(key)
        if data is None:
            raise StoreError("no such object", where=self.url_of(key), fix="check the name and the store's URL")
        return data

    def find(self, key: str) -> bytes | None:
        """All bytes of the object, or None where there is none under this key."""
        with self._reported(key, "reading"):
            try:
                return bytes(obstore.get(self._objects, _checked(key)).bytes())
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                return None

    def exists(self, key: str) -> bool:
        """Whether there is an object under this key."""
        return self.size_bytes(key) is not None

    def size_bytes(self, key: str) -> int | None:
        """Size of the object without reading it, or None where there is none under this key."""
        with self._reported(key, "reading"):
            try:
                return int(obstore.head(self._objects, _checked(key))["size"])
            except FileNotFoundError:
                return None

    def list_keys(self, prefix: str) -> list[str]:
        """All keys below the group `prefix`, sorted. For browsing: correctness never rests on a listing."""
        return [entry.key for entry in self.list_entries(prefix)]

    def list_entries(self, prefix: str) -> list[Entry]:
        """All objects below the group `prefix`, sorted by key."""
        return self._listed(prefix, after=None)

    def list_keys_after(self, prefix: str, key: str) -> list[str]:
        """All keys below the group `prefix` that sort behind `key`, sorted; cheap however many lie before it."""
        return [entry.key for entry in self._listed(prefix, after=_checked(key))]

    def _listed(self, prefix: str, *, after: str | None) -> list[Entry]:
        def once() -> list[Entry]:
            with self._reported(prefix, "listing"):
                pages = obstore.list(self._objects, _checked(prefix) if prefix else None, offset=after)
                return sorted((_entry(found) for page in pages for found in page), key=lambda entry: entry.key)

        return _repeated(once)

    def list_groups(self, prefix: str) -> list[str]:
        """Names of the groups directly below the group `prefix`, sorted. For browsing."""
        return self.browse(prefix)[0]

    def browse(self, prefix: str) -> tuple[list[str], list[Entry]]:
        """Names of the groups directly below the group `prefix`, and the objects directly in it, both sorted."""

        def once() -> tuple[list[str], list[Entry]]:
            with self._reported(prefix, "listing"):
                found = obstore.list_with_delimiter(self._objects, _checked(prefix) if prefix else None)
                groups = sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"])
                return groups, sorted(map(_entry, found["objects"]), key=lambda entry: entry.key)

        return _repeated(once)

    def delete(self, key: str) -> None:
        """Remove the object; it is no error where there is none."""

        def once() -> None:
            with self._reported(key, "removing"):
                try:
                    obstore.delete(self._objects, _checked(key))
                except FileNotFoundError as error:
                    if is_missing_bucket(error):
                        raise

        _repeated(once)

    def check(self) -> None:
        """Write, read and remove a probe, and see that put-if-absent refuses: some S3 servers silently overwrite.

        A few requests: for whoever will write after long work. Raises StoreError where the store is not fit for use.
        """
        key = f"probes/{uuid.uuid4().hex}"
        try:
            self.put_if_absent(key, b"first")
        except StoreError as error:
            raise StoreError(f"the store cannot be written: {error.what}", where=self.url, fix=error.fix) from error
        try:
            self.put_if_absent(key, b"second")
        except StoreConflictError:
            if self.get(key) == b"first":
                return
            raise StoreError("gives back other bytes than were written", where=self.url) from None
        else:
            raise StoreError(
                "the store ignores If-None-Match, so writers would overwrite each other",
                where=self.url,
                fix="use a store with conditional writes: AWS S3, SeaweedFS, MinIO, or a local folder",
            )
        finally:
            self.delete(key)

    @contextmanager
    def _reported(self, key: str, action: str) -> Iterator[None]:
        """Turn whatever the library raises into StoreError at the object's URL, saying what was being done to it."""
        try:
            yield
        except AlreadyExistsError as error:
            raise StoreConflictError(_EXISTS, where=self.url_of(key), fix=_REFRESH) from error
        except (BaseError, OSError) as error:
            raise explained(error, action=action, where=self.url_of(key), store_url=self.url) from error


def _pauses() -> Iterator[None]:
    """A few tries, each after a longer pause, for as long as that is worth it: whoever calls has retries as well."""
    end_s = time.monotonic() + _RETRY_WITHIN_S
    for attempt in range(_TRIES):
        if time.monotonic() > end_s:
            return
        time.sleep(_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0))  # noqa: S311 - spreads writers, keeps no secret
        yield


def _repeated(call: Callable[[], Result]) -> Result:
    """The call's result, for calls that may be repeated and that the library does not repeat by itself."""
    try:
        return call()
    except StoreUnreachableError as error:
        first = error
    for _ in _pauses():
        try:
            return call()
        except StoreUnreachableError:
            continue
    raise first


def open_store(url: str) -> Store:
    """The store at `url`: file:///folder (or a plain path), s3://bucket/prefix, or memory://name within this process.

    S3 takes its settings from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION,
    AWS_ENDPOINT_URL_S3 before AWS_ENDPOINT_URL. Plain http is for loopback endpoints unless AWS_ALLOW_HTTP=true.
    Raises InputError for a URL of another kind, StoreError where a local folder cannot be made.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise InputError("a store URL has no query or fragment", where=url, fix=f"use {SCHEMES}")
    match parts.scheme:
        case "":
            if not url:
                raise InputError("the store URL is empty", where="store", fix=f"use {SCHEMES}")
            return _open_folder(Path(url).absolute())
        case "file":
            if parts.netloc not in {"", "localhost"} or not parts.path:
                raise InputError("a file URL needs an absolute path", where=url, fix="write file:///absolute/folder")
            return _open_folder(Path(unquote(parts.path)))
        case "s3":
            return _open_bucket(url, bucket=parts.netloc, prefix=parts.path.strip("/"))
        case "memory":
            return _open_memory(f"memory://{parts.netloc}{parts.path}".rstrip("/"))
        case _:
            raise InputError(f"unknown kind of store {parts.scheme!r}", where=url, fix=f"use {SCHEMES}")


def _open_folder(folder: Path) -> Store:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Store(folder.as_uri().rstrip("/"), LocalStore(folder))
    except (OSError, BaseError) as error:
        raise StoreError(
            f"the folder cannot be opened: {error}", where=str(folder), fix="name a folder that you may write"
        ) from error


def _open_bucket(url: str, *, bucket: str, prefix: str) -> Store:
    if not bucket:
        raise InputError("the URL names no bucket", where=url, fix="write s3://bucket/prefix")
    if prefix:
        _checked(prefix)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config: S3Config = {"endpoint": endpoint} if endpoint else {}
    allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"true", "1"}
    if endpoint:
        address = urlsplit(endpoint)
        if address.scheme not in {"http", "https"} or not address.hostname:
            raise InputError(f"{endpoint!r} is not an http(s) URL", where="AWS_ENDPOINT_URL_S3 / AWS_ENDPOINT_URL")
        allow_http = allow_http or address.hostname in _LOOPBACK
        if address.scheme == "http" and not allow_http:
            raise InputError(
                f"{endpoint} would send credentials and data in the clear",
                where="AWS_ENDPOINT_URL_S3 / AWS_ENDPOINT_URL",
                fix="use https, or set AWS_ALLOW_HTTP=true on a network you trust",
            )
    client: ClientConfig = {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=5),
        "timeout": _TIMEOUT,
    }
    try:
        objects = S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            retry_config=_S3_RETRIES,
        )
    except (BaseError, ValueError) as error:
        raise InputError(
            f"the S3 settings are not usable: {first_line(error)}", where=url, fix="check the AWS_* variables"
        ) from error
    return Store(f"s3://{bucket}/{prefix}".rstrip("/"), objects)


_MEMORY: Final[dict[str, MemoryStore]] = {}
_MEMORY_LOCK: Final = Lock()


def _open_memory(url: str) -> Store:
    """The same name is the same store within a process; another process has its own."""
    with _MEMORY_LOCK:
        return Store(url, _MEMORY.setdefault(url, MemoryStore()))


def _entry(found: ObjectMeta) -> Entry:
    return Entry(key=str(found["path"]), size_bytes=int(found["size"]), modified=found["last_modified"])


def _checked(key: str) -> str:
    """`key`, if it is a plain relative path; obstore would silently re-encode others."""
    parts = key.split("/")
    if not all(part and part.isascii() and part.isprintable() and part not in {".", ".."} for part in parts) or any(
        sign in key for sign in '\\{}^%`[]"<>~#|*?\x7f'
    ):
        raise InputError("not a plain relative key", where=repr(key), fix="join plain names by single slashes")
    return key
