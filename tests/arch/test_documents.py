"""The examples in docs/formats.md are run as a reader would run them; deployments name flows that exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def example(kind: str, group: str) -> object:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    [block] = re.findall(rf"<!-- {kind}: {group} -->\n```json\n(.*?)```", text, re.DOTALL)
    return json.loads(block)


@pytest.mark.parametrize(
    ("group", "name"), [("placement", "placement"), ("allocation", "allocation"), ("allocation", "guarantees")]
)
def test_the_documented_answer_is_what_the_command_gives(group, name, tmp_path, capsys):
    from coral_core.cli.entry import run

    problem = tmp_path / "problem.json"
    problem.write_text(json.dumps(example("problem", name)), encoding="utf-8")
    assert run([group, "solve", str(problem), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == example("answer", name).keys()
    assert unordered(answer) == unordered(example("answer", name))


def unordered(answer: dict) -> dict:
    """The answer with its lists sorted and its figures rounded to what the page shows."""
    return {
        key: sorted(map(json.dumps, value)) if isinstance(value, list) else rounded(value)
        for key, value in json.loads(json.dumps(answer, sort_keys=True)).items()
    }


def rounded(value: object) -> object:
    return round(value, 4) + 0.0 if isinstance(value, float) else value


def test_deployments_name_flows_that_exist():
    deployments = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    names = {"build-library", "reallocate", "evaluate", "profile-gpus", "teardown"}
    assert {deployment["name"] for deployment in deployments} == names
    for deployment in deployments:
        file, function = deployment["entrypoint"].split(":")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
