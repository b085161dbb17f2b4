"""Faults in YAML name file, line, key, and what is allowed there."""

from __future__ import annotations

import pytest

from coral_core.config.scenario import Scenario, scenario_text
from coral_core.config.yaml_lines import key_path, parse_yaml_model, read_yaml_model
from coral_core.errors import InputError


def fault(old: str, new: str) -> str:
    text = scenario_text("tiny")
    assert old in text
    with pytest.raises(InputError) as caught:
        parse_yaml_model(text.replace(old, new, 1), Scenario, where="f.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "begin", "words"),
    [
        (
            "tpot_s: 0.06",
            "tpot_ms: 60",
            "f.yaml:12: `models[0].slo.tpot_ms`: unknown key, did you mean `tpot_s`? (allowed here: ttft_s, tpot_s)",
            "",
        ),
        (
            "{n_max: 3, rho: 12}",
            "{nmax: 3}",
            "f.yaml:21: `library.nmax`: unknown key, did you mean `n_max`?",
            "keep_all",
        ),
        ("models:", "modles: []\nmodels:", "f.yaml:8: `modles`: unknown key, did you mean `models`?", "availability"),
        (
            "lengths: azure-conv",
            "lengths: {mean_input: 5}",
            "f.yaml:11: `models[0].lengths.mean_input`: unknown key, did you mean `mean_input_tokens`?",
            "mean_output_tokens, source",
        ),
        (
            "lengths: azure-conv",
            "lengths: {trace: a.csv, fromat: azure}",
            "f.yaml:11: `models[0].lengths.",
            "unknown key",
        ),
        (
            "library:",
            "availability: {kind: endless}\nlibrary:",
            "f.yaml:21: `availability.kind`: 'endless' is none of ample, constant, trace, random_walk",
            "",
        ),
        (
            "library:",
            "availability: {nodes: {}}\nlibrary:",
            "f.yaml:21: `availability.kind`: this key is required: one of ample, constant, trace, random_walk",
            "",
        ),
        (
            "library:",
            "availability: {kind: constant, node: {}}\nlibrary:",
            "f.yaml:21: `availability.node`: unknown key, did you mean `nodes`? (allowed here: kind, nodes)",
            "",
        ),
        (
            "library:",
            "own_configs: {a: {gpu: L4, gpus: 2}}\nlibrary:",
            "f.yaml:21: `own_configs.a.gpus`: unknown key, did you mean `gpu`?",
            "price_usd_per_h",
        ),
        (
            "requests_per_s: 10\n",
            "requests_per_s: 10\n    limits: {decode: {zzz: 1}}\n",
            "f.yaml:11: `models[0].limits.decode.zzz`: unknown key (allowed here: min_instances, max_instances)",
            "",
        ),
        (
            "requests_per_s: 10\n",
            "requests_per_s: 10\n    limits: {decode: {min_instances: x}}\n",
            "f.yaml:11: `models[0].limits.decode.min_instances`: ",
            "got 'x'",
        ),
    ],
)
def test_a_fault_names_its_line_its_key_and_what_is_allowed(old, new, begin, words):
    text = fault(old, new)
    assert text.startswith(begin)
    assert words in text


def test_a_key_path_reads_as_in_the_file():
    assert key_path(("models", 0, "slo", "ttft_s")) == "models[0].slo.ttft_s"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, content, said in (
        (tmp_path / "none.yaml", None, "none.yaml: there is no such file (give the path of one that exists)"),
        (tmp_path / "latin.yaml", "ü".encode("latin-1"), "(write it in UTF-8)"),
        (tmp_path, None, "cannot read the file: Is a directory"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            read_yaml_model(path, Scenario)
        assert said in str(caught.value)
