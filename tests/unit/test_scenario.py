"""Scenario files: what users write wrong is named by file, line and key."""

from __future__ import annotations

from typing import get_args

import pytest

from coral_core.allocation.policies import POLICIES
from coral_core.config.headroom import headroom_note, headroom_rows
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import (
    CapacitySpec,
    HeadroomSpec,
    PolicyName,
    Scenario,
    load_scenario,
    scenario_names,
    scenario_text,
)
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


def test_the_named_policies_are_those_of_the_registry():
    assert set(get_args(PolicyName)) == {*POLICIES, "helix"}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("policies", ["coral", "coral"], "policy 'coral' is given twice"),
        ("policies", ["corall"], "policies"),
        ("seeds", [1, 1], "seed '1' is given twice"),
        ("seeds", [-1], "seeds"),
        ("epochs", {"count": 0}, "count"),
        ("workload", {"burstiness": float("nan")}, "burstiness"),
        ("availability", {"kind": "random_walk", "seed": 1, "memory_gib": 0}, "memory_gib"),
    ],
)
def test_settings_of_an_evaluation_are_checked(key, value, words):
    data = {**load_scenario("tiny").model_dump(), key: value}
    with pytest.raises(ValueError, match=words):
        Scenario.model_validate(data)


def test_a_supply_trace_is_relative_to_the_scenario_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(scenario_text("tiny") + "availability: {kind: trace, file: supply.csv}\n")
    assert load_scenario(str(path)).availability.file == tmp_path / "supply.csv"


SKEWED = {
    "large-heavy-core": ("paper-core", {"qwen3-32b"}),
    "small-heavy-core": ("paper-core", {"phi-4"}),
    "large-heavy-extended": ("paper-extended", {"gpt-oss-120b", "qwen3-235b"}),
    "small-heavy-extended": ("paper-extended", {"phi-4", "gpt-oss-20b"}),
}


@pytest.mark.parametrize("name", sorted(SKEWED))
def test_a_skewed_scenario_moves_rates_only_and_gives_80_percent_to_a_third_of_the_models(name):
    base, heavy = SKEWED[name]
    skewed, plain = load_scenario(name), load_scenario(base)
    total = sum(model.requests_per_s for model in plain.models)
    assert sum(model.requests_per_s for model in skewed.models) == pytest.approx(total)
    assert sum(model.requests_per_s for model in skewed.models if model.model in heavy) == pytest.approx(0.8 * total)
    assert len(heavy) * 3 == len(plain.models)
    for own, other in zip(skewed.models, plain.models, strict=True):
        assert own.model_copy(update={"requests_per_s": other.requests_per_s}) == other
    assert (skewed.library_name, skewed.regions, skewed.catalog) == (base, plain.regions, plain.catalog)


@pytest.mark.parametrize(("name", "needed", "more"), [("paper-core", 2.0, 1.25), ("paper-extended", 2.25, 1.75)])
def test_a_scarce_scenario_has_the_published_margin_over_what_its_mix_needs(name, needed, more):
    scarce, ample = load_scenario(f"{name}-scarce"), load_scenario(name)
    assert scarce.availability.memory_frac_of_ample == pytest.approx(needed * more, rel=0.02)
    assert (scarce.models, scarce.regions, scarce.catalog) == (ample.models, ample.regions, ample.catalog)
    assert scarce.capacity.headroom.keys() == ample.capacity.headroom.keys()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("requests_per_s: 10", "requests_per_s: true", "requests_per_s"),
        ("requests_per_s: 10", "requests_per_s: yes", "requests_per_s"),
        ("requests_per_s: 10", "requests_per_s: 1:30", "requests_per_s"),
        ("requests_per_s: 10", 'requests_per_s: "10"', "requests_per_s"),
        ("n_max: 3", "n_max: 3.0", "n_max"),
        ("n_max: 3", "n_max: true", "n_max"),
        ("description:", "description: !foo x\nother:", "tags"),
        ("description:", "? [a, b]\n: 1\ndescription:", "key must be text"),
        ("description:", "<<: 3\ndescription:", "unknown key"),
        ("catalog: paper-core", "catalog: &x [*x]", "aliases"),
        ("catalog: paper-core", "catalog: " + "[" * 3000, "nested"),
        ("requests_per_s: 10", "requests_per_s: !!int abc", "tags"),
        ("requests_per_s: 10", "requests_per_s: .inf", "requests_per_s"),
    ],
)
def test_only_plain_yaml_and_plain_numbers_are_taken(tmp_path, old, new, words):
    path = tmp_path / "odd.yaml"
    path.write_text(scenario_text("tiny").replace(old, new, 1))
    with pytest.raises(InputError, match=words):
        load_scenario(str(path))


def test_numbers_may_be_written_with_an_exponent(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(scenario_text("tiny").replace("requests_per_s: 10", "requests_per_s: 1e1", 1))
    assert load_scenario(str(path)).models[0].requests_per_s == 10


def test_what_looks_like_a_date_is_text(tmp_path):
    path = tmp_path / "mine.yaml"
    text = "\n".join(
        "description: 2026-13-45" if line.startswith("description:") else line
        for line in scenario_text("tiny").splitlines()
    )
    path.write_text(text)
    assert load_scenario(str(path)).description == "2026-13-45"


def test_headroom_is_by_model_before_it_is_by_phase():
    capacity = CapacitySpec.model_validate(
        {
            "slo_frac": {"decode": 0.8},
            "max_utilization_frac": {"decode": 0.9, "prefill": 0.7},
            "headroom": {"phi-4": {"slo_frac": {"decode": 0.5}, "max_utilization_frac": {"decode": 0.6}}},
        }
    )
    shares = [
        (capacity.slo_frac_of(model, phase), capacity.max_utilization_frac_of(model, phase))
        for model in ("phi-4", "qwen3-32b")
        for phase in Phase
        if phase is not Phase.AGGREGATED
    ]
    assert shares == [(1.0, 0.7), (0.5, 0.6), (1.0, 0.7), (0.8, 0.9)]


def test_headroom_of_a_model_that_nobody_knows_is_refused():
    tiny = load_scenario("tiny")
    capacity = tiny.capacity.model_copy(update={"headroom": {"phi4": HeadroomSpec(slo_frac={Phase.DECODE: 0.5})}})
    with pytest.raises(InputError, match=r"capacity.headroom.phi4: unknown model .*phi4.*did you mean phi-4"):
        resolve_scenario(tiny.model_copy(update={"capacity": capacity}))


def test_every_plan_says_what_headroom_it_keeps_and_where_from():
    tiny = resolve_scenario(load_scenario("tiny"))
    rows = headroom_rows(tiny, {Phase.DECODE: 0.25})
    assert {(row["model"], row["phase"]) for row in rows} == {
        (model.shape.name, phase) for model in tiny.models for phase in ("prefill", "decode")
    }
    assert {row["max_utilization_frac"] for row in rows if row["phase"] == "decode"} == {0.25}
    assert {row["source"] for row in rows if row["phase"] == "decode"} == {"given for this run"}
    assert all("coral calibrate tiny" in row["source"] for row in rows if row["phase"] == "prefill")
    assert "phi-4 prefill 0.264 of what 0.2 of the bound allows" in headroom_note(rows)
    bare = resolve_scenario(load_scenario("tiny").model_copy(update={"capacity": CapacitySpec()}))
    assert "without headroom" in headroom_note(headroom_rows(bare))
