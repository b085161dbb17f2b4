"""Strict YAML with line numbers: what a user wrote wrong is named by file and line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from coral_core.errors import InputError

KeyPath = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


def read_yaml_model(path: Path, model: type[M]) -> M:
    """The file's content as `model`; InputError names file, line and key path of the first fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the file: {error}", where=str(path)) from None
    return parse_yaml_model(text, model, where=str(path))


def parse_yaml_model(text: str, model: type[M], *, where: str) -> M:
    """`text` as `model`; see `read_yaml_model`."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"not valid YAML: {error.problem}", where=f"{where}:{line}") from None
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {error}", where=where) from None
    if not isinstance(node, yaml.MappingNode):
        raise InputError("expected a mapping of keys to values", where=f"{where}:1")
    lines: dict[KeyPath, int] = {}
    _walk(node, (), lines, where)
    data = yaml.SafeLoader("").construct_document(node)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _first_fault(error, lines, where) from None


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], where: str) -> None:
    """Record each key path's line; refuse duplicate keys, which YAML parsers silently overwrite."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise InputError(f"key `{key}` is given twice", where=f"{where}:{line}", fix="keep one of them")
            seen.add(key)
            lines[(*path, key)] = line
            _walk(value_node, (*path, key), lines, where)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _walk(item, (*path, index), lines, where)


def _first_fault(error: ValidationError, lines: Mapping[KeyPath, int], where: str) -> InputError:
    # A misspelt key shows up twice, as unknown and as missing: the first says more.
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    location = fault["loc"]
    known = next((location[:end] for end in range(len(location), 0, -1) if location[:end] in lines), ())
    place = f"{where}:{lines[known]}" if known else where
    more = f"; {len(faults) - 1} more" if len(faults) > 1 else ""
    return InputError(f"`{key_path(location)}`: {_reason(fault)}{more}", where=place)


def _reason(fault: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    if fault["type"] == "extra_forbidden":
        return "unknown key; check its spelling"
    if fault["type"] == "missing":
        return "this key is required"
    message = str(fault["msg"]).removeprefix("Value error, ")
    value = fault.get("input")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"{message}, got {value!r}"
    return message


def key_path(location: Sequence[str | int]) -> str:
    """`models[0].slo.ttft_s` from pydantic's location tuple."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
