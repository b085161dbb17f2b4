"""The plain part of YAML: mappings, lists and scalars read as YAML 1.2's core schema does.

No aliases (a page of them can stand for gigabytes), no tags, no merge keys, no `yes`/`on` for true, no `1:30` for 90, no
dates: what looks like text is text.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from coral_core.errors import InputError

MAX_DEPTH: Final = 50
MAX_BYTES: Final = 10_000_000


class _PlainLoader(yaml.SafeLoader):
    """Resolves null, true/false, decimal integers and floats; all else is text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _PlainLoader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def compose_plain(text: str, *, where: str) -> tuple[yaml.MappingNode, dict[str, Any]]:
    """The document's node tree and its content; InputError with file and line for anything but a plain mapping."""
    if len(text) > MAX_BYTES:
        raise InputError(f"more than {MAX_BYTES:,} characters", where=where)
    try:
        _refuse_beyond_plain(text, where)
        node = yaml.compose(text, Loader=_PlainLoader)
        if not isinstance(node, yaml.MappingNode):
            raise InputError("expected a mapping of keys to values", where=f"{where}:1")
        return node, _content(node, where)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"not valid YAML: {error.problem}", where=f"{where}:{line}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"not valid YAML: {error}", where=where) from None


def _refuse_beyond_plain(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_PlainLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputError("aliases and anchors are not supported", where=f"{where}:{line}", fix="write it out")
        tag = getattr(event, "tag", None)
        if tag:
            raise InputError(f"tags such as {tag} are not supported", where=f"{where}:{line}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise InputError(f"nested deeper than {MAX_DEPTH} levels", where=f"{where}:{line}")


def _content(node: yaml.MappingNode, where: str) -> dict[str, Any]:
    for key, value in node.value:
        _check_keys(key, value, where)
    content: dict[str, Any] = _PlainLoader("").construct_document(node)
    return content


def _check_keys(key: yaml.Node, value: yaml.Node, where: str) -> None:
    """Keys are text: a list or mapping as a key has no meaning here."""
    if not isinstance(key, yaml.ScalarNode):
        raise InputError("a key must be text", where=f"{where}:{key.start_mark.line + 1}")
    for child in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        if isinstance(child, yaml.MappingNode):
            for inner_key, inner_value in child.value:
                _check_keys(inner_key, inner_value, where)
        elif isinstance(child, yaml.SequenceNode):
            _check_keys(key, child, where)
