"""Scenario files: what users write wrong is named by file, line and key."""

from __future__ import annotations

import pytest

from coral_core.config.scenario import Scenario, load_scenario, scenario_names, scenario_text
from coral_core.domain.workload import Phase
from coral_core.errors import InputError


@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_loads_and_carries_its_file_name(name):
    assert load_scenario(name).name == name


def test_a_copy_of_a_shipped_scenario_loads_from_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(scenario_text("tiny"))
    assert load_scenario(str(path)) == load_scenario("tiny")


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("tpot_s: 0.06", "tpot_s: -1", 12, "models[0].slo.tpot_s"),
        ("tpot_s: 0.06", "tpot_s: .nan", 12, "models[0].slo.tpot_s"),
        ("tpot_s: 0.06", "tpot_s: 60ms", 12, "models[0].slo.tpot_s"),
        ("tpot_s: 0.06", "tpot_ms: 60", 12, "unknown key"),
        ("requests_per_s: 10", "requests_per_s: ten", 10, "models[0].requests_per_s"),
        ("library: {n_max: 3", "library: {n_max: 0", 21, "library.n_max"),
        ("regions: [us-east-2, ap-northeast-2]", "regions: [us-east-2, us-east-2]", None, "given twice"),
        ("regions: [us-east-2, ap-northeast-2]", "regions: []", 7, "regions"),
        ("name: tiny", "name: tiny\nname: other", 4, "given twice"),
        ("name: tiny", "name: [", None, "not valid YAML"),
        ("models:", "models: 3\nother:", None, "other"),
    ],
)
def test_a_fault_is_named_by_file_line_and_key(tmp_path, old, new, line, words):
    path = tmp_path / "bad.yaml"
    path.write_text(scenario_text("tiny").replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_scenario(str(path))
    text = str(caught.value)
    assert str(path) in text
    assert words in text
    if line is not None:
        assert f"{path}:{line}:" in text


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words", "\x00"])
def test_what_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(InputError):
        load_scenario(str(path))


def test_unknown_names_suggest_the_near_one():
    with pytest.raises(InputError, match="paper-core"):
        load_scenario("papr-core")


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml"):
        load_scenario(str(tmp_path / "nowhere.yaml"))


def test_prefill_without_decode_is_refused():
    data = load_scenario("tiny").model_dump()
    data["models"][0]["phases"] = ["prefill"]
    with pytest.raises(ValueError, match="come together"):
        Scenario.model_validate(data)


def test_limits_of_a_phase_that_is_not_served_are_refused():
    data = load_scenario("tiny").model_dump()
    data["models"][0]["limits"] = {Phase.AGGREGATED: {"min_instances": 1}}
    with pytest.raises(ValueError, match="not served in"):
        Scenario.model_validate(data)


def test_a_cap_below_its_floor_is_refused():
    data = load_scenario("tiny").model_dump()
    data["models"][0]["limits"] = {Phase.DECODE: {"min_instances": 3, "max_instances": 2}}
    with pytest.raises(ValueError, match="below min_instances"):
        Scenario.model_validate(data)


def test_churn_is_start_up_over_interval():
    spec = load_scenario("tiny").allocation
    assert spec.churn_k == spec.startup_s / spec.interval_s
