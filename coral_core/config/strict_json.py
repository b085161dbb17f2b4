"""JSON as people write it, read strictly: no duplicate keys, no NaN, errors that name the place."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from pydantic import ValidationError

from coral_core.errors import InputError

STDIN: Final = Path("-")


def read_text(path: Path) -> str:
    """The file's text; `-` is standard input. Raises InputError where it cannot be read or is not UTF-8."""
    try:
        return (sys.stdin.buffer.read() if path == STDIN else path.read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", where=place_of(path)) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=place_of(path)) from None


def place_of(path: Path) -> str:
    """How errors name the file."""
    return "standard input" if path == STDIN else str(path)


def parse_json(text: str, *, where: str) -> object:
    """The document in `text`. Raises InputError at `where:line:column`, or at the key path of a duplicate key."""
    try:
        document: object = json.loads(text, object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg}", where=f"{where}:{error.lineno}:{error.colno}") from None
    except RecursionError:
        raise InputError("nested too deeply", where=where) from None
    except ValueError as error:  # a constant refused, or an integer of thousands of digits
        raise InputError(f"not JSON: {error}", where=where) from None
    for path in _duplicates(document, ""):
        raise InputError("the key appears twice", where=f"{where}: {path}")
    return document


def first_error(error: ValidationError) -> tuple[str, str]:
    """The first complaint of pydantic as (key path, what is wrong and what was there)."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    given = first["input"]
    shown = f", not {reprlib.repr(given)}" if isinstance(given, (str, int, float, bool)) else ""
    message = first["msg"][:1].lower() + first["msg"][1:]
    return path.lstrip("."), f"{message}{shown}"


class _Object(dict[str, object]):
    """An object that remembers a key it was given twice."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.duplicate = next((key for key, _ in pairs if key in seen or seen.add(key)), None)  # type: ignore[func-returns-value]  # set.add returns None, which is the point


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _duplicates(node: object, path: str) -> Iterator[str]:
    if isinstance(node, _Object) and node.duplicate is not None:
        yield f"{path}.{node.duplicate}".lstrip(".")
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _duplicates(value, f"{path}.{key}".lstrip("."))
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from _duplicates(value, f"{path}[{index}]")
