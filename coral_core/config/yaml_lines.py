"""Strict YAML with line numbers: what a user wrote wrong is named by file and line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeGuard, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from coral_core.config.plain_yaml import compose_plain
from coral_core.errors import InputError

KeyPath = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

_TAG_FAULTS: Final = {"union_tag_invalid", "union_tag_not_found"}


def read_yaml_model(path: Path, model: type[M]) -> M:
    """The file's content as `model`; InputError names file, line and key path of the first fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("there is no such file", where=str(path), fix="give the path of one that exists") from None
    except OSError as error:
        raise InputError(f"cannot read the file: {error.strerror or error}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the file: {error}", where=str(path), fix="write it in UTF-8") from None
    return parse_yaml_model(text, model, where=str(path))


def parse_yaml_model(text: str, model: type[M], *, where: str) -> M:
    """`text` as `model`; see `read_yaml_model`."""
    node, data = compose_plain(text, where=where)
    lines: dict[KeyPath, int] = {}
    _walk(node, (), lines, where)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _first_fault(error, model, lines, where) from None


def key_line(text: str, key: str, *, where: str) -> int | None:
    """The line of a key path (`models[0].slo`) in `text`, of what holds it where it is not written; else None."""
    lines: dict[KeyPath, int] = {}
    _walk(compose_plain(text, where=where)[0], (), lines, where)
    holders = [path for path in lines if f"{key}.".startswith((f"{key_path(path)}.", f"{key_path(path)}["))]
    return lines[max(holders, key=len)] if holders else None


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


def _first_fault(
    error: ValidationError, model: type[BaseModel], lines: Mapping[KeyPath, int], where: str
) -> InputError:
    # A misspelt key shows up twice, as unknown and as missing: the first says more.
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault: Any = faults[0]
    location, level, inner = _followed(model, fault["loc"])
    if fault["type"] in _TAG_FAULTS:
        location = (*location, fault["ctx"]["discriminator"].strip("'"))
    known = next((location[:end] for end in range(len(location), 0, -1) if location[:end] in lines), ())
    place = f"{where}:{lines[known]}" if known else where
    more = f"; {len(faults) - 1} more" if len(faults) > 1 else ""
    of_key = f"`{key_path(location)}`: " if location else ""  # a fault between keys has no place of its own
    return InputError(f"{of_key}{_reason(fault, level, inner)}{more}", where=place)


def _reason(fault: Any, level: Sequence[object], inner: Sequence[object]) -> str:  # noqa: ANN401 - ErrorDetails
    if fault["type"] == "extra_forbidden":
        keys = [key for member in level if _is_model(member) for key in member.model_fields]
        near = get_close_matches(str(fault["loc"][-1]), keys, n=1)
        return f"unknown key{f', did you mean `{near[0]}`?' if near else ''} (allowed here: {', '.join(keys)})"
    if fault["type"] == "missing":
        return "this key is required"
    if fault["type"] in _TAG_FAULTS:
        allowed = ", ".join(tag for member in inner for tag in _tags(member))
        given = fault["ctx"].get("tag")
        return f"this key is required: one of {allowed}" if given is None else f"{given!r} is none of {allowed}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    value = fault.get("input")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"{message}, got {value!r}"
    return message


def _followed(model: type[BaseModel], location: KeyPath) -> tuple[KeyPath, list[object], list[object]]:
    """Pydantic's location without its names for members of unions; the types that hold its last key, and those in it."""
    path: list[str | int] = []
    level: list[object] = [model]
    inner: list[object] = [model]
    for part in location:
        named = [member for member in inner if len(inner) > 1 and part in (_name(member), *_tags(member))]
        if named:
            inner = named
            continue
        path.append(part)
        level, inner = inner, [found for member in inner for found in _inside(member, part)]
    return tuple(path), level, inner


def _inside(annotation: object, part: str | int) -> list[object]:
    """What may stand at a key or index of a type, members of unions apart."""
    if _is_model(annotation):
        field = annotation.model_fields.get(str(part))
        return [] if field is None else _members(field.annotation)
    arguments = get_args(annotation)
    return _members(arguments[-1 if get_origin(annotation) is dict else 0]) if arguments else []


def _members(annotation: object) -> list[object]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for argument in get_args(annotation) for member in _members(argument)]
    return [annotation]


def _name(annotation: object) -> str:
    return getattr(annotation, "__name__", "")


def _tags(annotation: object) -> list[str]:
    """The values of a model's `kind`, by which members of a union are told apart."""
    field = annotation.model_fields.get("kind") if _is_model(annotation) else None
    return [] if field is None else list(get_args(field.annotation))


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def key_path(location: Sequence[str | int]) -> str:
    """`models[0].slo.ttft_s` from pydantic's location tuple."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
