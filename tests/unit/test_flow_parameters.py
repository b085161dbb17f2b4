"""Parameters of the flows: names that Prefect may show."""

from __future__ import annotations

import pytest

pytest.importorskip("prefect", reason="the flows extra is not installed")

from flows.parameters import BuildLibraryParameters, ReallocateParameters


@pytest.mark.parametrize("kind", [BuildLibraryParameters, ReallocateParameters])
@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        ("paper-core", "paper-core"),
        ("/a folder/of mine/v1.5.yaml", "v1.5"),
        ("mine.yml", "mine"),
    ],
)
def test_runs_are_named_without_paths(kind, scenario, name):
    assert kind(scenario=scenario).scenario_name == name


@pytest.mark.parametrize("kind", [BuildLibraryParameters, ReallocateParameters])
def test_the_form_begins_with_the_scenario(kind):
    assert next(iter(kind.model_json_schema()["properties"])) == "scenario"
