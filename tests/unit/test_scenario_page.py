"""docs/scenarios.md has a row for every key of the schema, with its type and default, and its examples are valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coral_core.config.scenario import Scenario, load_scenario
from coral_core.workload import workload_names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scenarios.md").read_text(encoding="utf-8")
SCHEMA = Scenario.model_json_schema()
KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def rows() -> list[str]:
    """The first three cells of each row that is due: key, type, default."""
    return list(_rows(SCHEMA, "", ""))


def _rows(schema: dict[str, Any], path: str, kind: str) -> Iterator[str]:
    for name, field in schema["properties"].items():
        key = f"{path}{name}"
        if name == "kind":
            continue
        default = "**required**" if name in schema.get("required", ()) else _default(field)
        yield f"| `{key}`{f' ({kind})' if kind else ''} | {_type(field)} | {default} |"
        yield from _below(field, key, kind)


def _below(field: dict[str, Any], key: str, kind: str) -> Iterator[str]:
    for member in _alternatives(field):
        if "items" in member:
            yield from _below(member["items"], f"{key}[]", kind)
        elif "additionalProperties" in member and isinstance(member["additionalProperties"], dict):
            yield from _below(member["additionalProperties"], f"{key}.*", kind)
        elif "properties" in member:
            yield from _rows(member, f"{key}.", member["properties"].get("kind", {}).get("const", kind))


def _alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in field:
        return [SCHEMA["$defs"][field["$ref"].rpartition("/")[2]]]
    either = field.get("anyOf", field.get("oneOf"))
    if either:
        return [found for item in either for found in _alternatives(item) if found.get("type") != "null"]
    return [field]


def _type(field: dict[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_one_type(member) for member in _alternatives(field)))


def _one_type(member: dict[str, Any]) -> str:
    if "enum" in member:
        return ", ".join(f"`{value}`" for value in member["enum"])
    if "items" in member:
        return f"list of {_type(member['items'])}"
    if member.get("type") == "object":
        inner = member.get("additionalProperties")
        return f"name: {_type(inner)}" if isinstance(inner, dict) else "keys below"
    if member.get("format") in ("path", "date"):
        return str(member["format"])
    bounds = [
        f"{sign} {member[bound]:g}" for bound, sign in BOUNDS.items() if bound in member and member[bound] < 2**60
    ]
    return " ".join([KINDS[member["type"]], ", ".join(bounds)]).strip()


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value in (None, "", {}) or isinstance(value, dict):
        return "-"
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix('...' + chr(10)).strip()}`"


def test_every_key_has_its_row():
    missing = [row for row in rows() if not re.search(rf"^{re.escape(row)} \S", PAGE, re.MULTILINE)]
    assert not missing, "docs/scenarios.md lacks these rows (each with its meaning in a fourth cell):\n" + "\n".join(
        missing
    )


def test_no_row_names_a_key_that_is_not_there():
    due = {row.split("|")[1].strip() for row in rows()}
    named = {
        line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") >= 5
    }
    assert named <= due


def test_every_kind_of_availability_has_an_example():
    kinds = {member["properties"]["kind"]["const"] for member in _alternatives(SCHEMA["properties"]["availability"])}
    shown = {example.get("availability", {}).get("kind") for example in examples()}
    assert kinds <= shown


def test_named_lengths_are_those_there_are():
    for name in workload_names():
        assert f"`{name}`" in PAGE


def examples() -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


@pytest.mark.parametrize("example", examples(), ids="+".join)
def test_every_example_is_valid_in_a_scenario(example):
    tiny = load_scenario("tiny").model_dump(mode="json", exclude_unset=True)
    Scenario.model_validate({**tiny, **example})
