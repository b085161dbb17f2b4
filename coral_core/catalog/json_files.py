"""JSON files of models, read strictly: every fault is an InputError that names the file, and the line where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from coral_core.errors import InputError

MOST_BYTES: Final = 10_000_000
"""Thousands of times what a model's file holds; a larger one is another file (weights, a tokenizer)."""

MOST_DIGITS: Final = 400


def read_json(path: Path) -> tuple[str, Any]:
    """The text of the file and the document in it.

    InputError for a file that cannot be read, is larger than MOST_BYTES, is not UTF-8 or not JSON, and for a key that
    an object holds twice. Of an integer beyond MOST_DIGITS the first digits are kept: no float reaches it, so
    that whoever reads the field refuses it, and names its key.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            fix = "hand in a model's config.json"
            raise InputError(f"is larger than {MOST_BYTES // 1_000_000} MB", where=str(path), fix=fix)
        text = content.decode("utf-8")
        return text, json.loads(text, object_pairs_hook=_no_repeats, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg}", where=f"{path}:{error.lineno}") from None
    except _RepeatedKeyError as error:
        raise InputError(f"key {error.args[0]!r} is there twice", where=str(path), fix="keep one of them") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path)) from error


class _RepeatedKeyError(Exception):
    """Inside the parser, which knows no file."""


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKeyError(key)
        found[key] = value
    return found


def _whole(digits: str) -> int:
    return int(digits[:MOST_DIGITS])
