"""One way to write JSON, so that equal content has equal bytes and equal hashes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np

from coral_core.errors import InputError, StoreError


def canonical_json(value: object) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces and floats exact; equal content gives equal bytes.

    Takes dataclasses, mappings with text keys, sequences, numpy numbers and arrays, enums, dates and paths. Raises
    InputError, naming the key path, for NaN, infinity and anything else.
    """
    plain = plain_value(value)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(data: bytes) -> str:
    """SHA-256 in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def parsed_object(data: bytes, *, where: str, fix: str = "the object is damaged or foreign") -> dict[str, Any]:
    """The JSON object in `data`. Raises StoreError at `where`, with this fix, for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"not valid JSON: {error}", where=where, fix=fix) from error
    if not isinstance(value, dict):
        raise StoreError("not a JSON object", where=where, fix=fix)
    return value


def plain_value(value: object, path: str = "") -> object:
    """`value` in terms of what JSON has, keys in their order; raises as `canonical_json` does."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {
            _key(key, path): plain_value(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return _plain_scalar(value, path or "value")


def _plain_scalar(value: object, where: str) -> object:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    if value is not None and not isinstance(value, str | bool | int | float):
        raise InputError(f"a {type(value).__name__} cannot be stored", where=where)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{value} cannot be stored", where=where, fix="leave unknown figures out or null")
    return value


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise InputError(f"key {key!r} is not text", where=path or "value")
    return str(key.value) if isinstance(key, Enum) else key
