"""Baselines are not made to look worse than they are."""

from __future__ import annotations

import json

import pytest

from coral_core.cli.entry import run
from coral_core.config.scenario import scenario_text


def test_a_model_that_asks_for_next_to_nothing_does_not_make_cauchy_dear(tmp_path, monkeypatch, capsys):
    """Its objective counts each model by its tokens: beside a small one, what the others cost was within the gap."""
    monkeypatch.chdir(tmp_path)
    text = (
        scenario_text("tiny").replace("requests_per_s: 10", "requests_per_s: 0.001", 1).replace("n_max: 3", "n_max: 2")
    )
    path = tmp_path / "little.yaml"
    path.write_text(text)
    assert run(["plan", "--scenario", str(path), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    baselines, comparisons = found["baselines"], found["comparisons"]
    assert baselines["cauchy"]["objective_usd_per_h"] <= 1.2 * baselines["homo"]["objective_usd_per_h"]
    # No error of an L40S is known, so that nobody is called the winner where it is used.
    for name, beside in comparisons.items():
        ratio = baselines[name]["objective_usd_per_h"] / found["objective_usd_per_h"]
        assert beside["cost_ratio"] == pytest.approx(ratio)
        assert beside["cost_verdict"] in ("error not known", "same")
    assert set(comparisons) == set(baselines)
