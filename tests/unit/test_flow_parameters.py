"""Parameters of the flows: names that Prefect may show."""

from __future__ import annotations

import pytest

pytest.importorskip("prefect", reason="the flows extra is not installed")

from pydantic import ValidationError

from flows.parameters import ActingParameters, BuildLibraryParameters, ReallocateParameters, TeardownParameters


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


def test_nothing_acts_unless_it_is_asked_to():
    params = ReallocateParameters()
    assert (params.mode, params.max_nodes, params.max_usd_per_h, params.provider) == ("plan", None, None, "")
    assert TeardownParameters().confirm == ""


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "act"},
        {"provider": "azure"},
        {"fleet": "Blue"},
        {"max_nodes": -1},
        {"max_usd_per_h": float("nan")},
        {"max_usd_per_h": float("inf")},
        {"approval_timeout_s": 0},
        {"plan_max_age_s": 0},
        {"acting": {"lease_s": 0}},
        {"acting": {"clock_skew_s": -1}},
        {"acting": {"poll_s": 1e9}},
        {"acting": {"lease": 5}},
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_form(given):
    with pytest.raises(ValidationError):
        ReallocateParameters(**given)


def test_the_form_of_acting_becomes_the_patience_of_a_run():
    patience = ActingParameters(lease_s=200, clock_skew_s=5, poll_s=2, deadline_s=60).patience
    assert (patience.lease.duration_s, patience.lease.skew_s, patience.poll_s, patience.deadline_s) == (200, 5, 2, 60)


def test_a_teardown_is_named_after_its_fleet(monkeypatch):
    assert TeardownParameters(fleet="blue").fleet_name == "blue"
    monkeypatch.setenv("CORAL_FLEET", "green")
    assert TeardownParameters().fleet_name == "green"


def test_the_form_puts_units_apart_from_words():
    schema = ReallocateParameters.model_json_schema()
    titles = {name: field.get("title") for name, field in schema["properties"].items()}
    assert (titles["max_usd_per_h"], titles["approval_timeout_s"]) == ("Max (USD/h)", "Approval timeout (seconds)")
    demand = schema["$defs"]["DemandSpec"]["properties"]
    assert (demand["up_s"]["title"], demand["when_unknown"]["title"]) == ("Up (seconds)", "When unknown")
    assert not [title for title in titles.values() if title and title.endswith((" s", " h"))]
