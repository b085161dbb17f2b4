"""CURVE keys in files: a coordinator's pair, agents' pairs with the coordinator's public key, and who is let in.

Private files are JSON, mode 0600; one that others may read is refused. The list of who is let in has a line
`NAME PUBLIC-KEY` per key, and may change while a coordinator runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coral_core.errors import InputError

KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE pair in Z85. `server`: the coordinator's public key, in an agent's file only."""

    public: str
    secret: str = field(repr=False)
    server: str = ""

    def __post_init__(self) -> None:
        for name in ("public", "secret", *(("server",) if self.server else ())):
            if not _is_key(getattr(self, name)):
                raise InputError("is no CURVE key (40 characters of Z85)", where=name)


def write_private(path: Path, pair: KeyPair) -> None:
    """A new private file, mode 0600 from its first byte on. Raises InputError where there is one already."""
    document = {"public": pair.public, "secret": pair.secret} | ({"server": pair.server} if pair.server else {})
    if path.exists():
        raise InputError("is there already", where=str(path), fix="move it away first, or give another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1) + "\n")


def read_private(path: Path) -> KeyPair:
    """The pair in a private file. Raises InputError for one that others may read, or that holds none."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the keys: {error}", where=str(path), fix="they are made by: coral keys new"
        ) from None
    if mode & _OTHERS:
        raise InputError("others may read this private file", where=str(path), fix=f"chmod 600 {path}")
    try:
        return KeyPair(**json.loads(text))
    except InputError as error:
        raise error.at(str(path)) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(
            f"is no file of keys: {error}", where=str(path), fix="they are made by: coral keys new"
        ) from None


def read_allowed(path: Path) -> dict[str, str]:
    """Public key -> name of all that are let in. Raises InputError with the line of what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read who is let in: {error}", where=str(path), fix="the list is made by: coral keys new agent"
        ) from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("# "):
            continue
        name, _, key = line.strip().partition(" ")
        if not NAME.fullmatch(name) or not _is_key(key.strip()):
            raise InputError("is no line `NAME PUBLIC-KEY`", where=f"{path}:{number}")
        if name in found.values() or key.strip() in found:
            raise InputError(f"{name} or its key is there twice", where=f"{path}:{number}")
        found[key.strip()] = name
    return found


def write_allowed(path: Path, allowed: dict[str, str]) -> None:
    """The list whole: a coordinator that reads it meanwhile sees the old or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{name} {key}\n" for key, name in allowed.items()]
        partial.write_text("".join(["# name and public key of the agents that are let in\n", *lines]), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None


@contextmanager
def changing_allowed(path: Path) -> Iterator[dict[str, str]]:
    """Public key -> name of all that are let in, to be changed by nobody else meanwhile; written back unless by an error.

    Of two who read, change and write at once the later one would undo what the other did: let a withdrawn key in again.
    """
    try:
        lock = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        allowed = read_allowed(path) if path.exists() else {}
        yield allowed
        write_allowed(path, allowed)


class AllowedKeys:
    """Who is let in, read anew when the file has changed. A file that has become wrong leaves the last right list in force.

    `trouble` says what is wrong with it then.
    """

    def __init__(self, path: Path) -> None:
        """Raises InputError where the file is wrong from the start."""
        self.trouble = ""
        self._path = path
        self._seen = _stamp(path)
        self._allowed = read_allowed(path)

    def name_of(self, public: str) -> str | None:
        """The name under which a key is let in; None: it is not."""
        stamp = _stamp(self._path)
        if stamp != self._seen:
            self._seen = stamp
            try:
                self._allowed, self.trouble = read_allowed(self._path), ""
            except InputError as error:
                self.trouble = str(error)
        return self._allowed.get(public)


def _is_key(text: str) -> bool:
    """Whether this is Z85 of 32 bytes: five characters are four bytes, and not every five are."""
    return KEY.fullmatch(text) is not None and all(
        sum(_Z85.index(char) * 85 ** (4 - place) for place, char in enumerate(text[at : at + 5])) < 1 << 32
        for at in range(0, len(text), 5)
    )


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)
