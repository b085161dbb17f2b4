"""Dominated templates from the command line: dropped and counted by default, kept on request, and no plan depends on them."""

from __future__ import annotations

import json

import pytest

from coral_core.cli.entry import run
from tests.fakes.tiny_text import tiny_without_headroom


@pytest.fixture
def coral(tmp_path, monkeypatch, capsys):
    """Run a command line in an empty folder; its JSON answer."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        assert run([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_the_option_keeps_what_is_dropped_and_the_plan_is_the_same(coral, tmp_path):
    # The published split leaves more templates that a smaller one beats.
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_without_headroom().replace("rho: 12}", "rho: 12, method: lattice}"), encoding="utf-8")
    pruned = coral("library", "build", "--scenario", path, "--executor", "inline")
    plan = coral("plan", "--scenario", path)
    everything = coral("library", "build", "--scenario", path, "--executor", "inline", "--keep-all")
    dropped = pruned["statistics"]["dominated"]
    assert dropped > 0
    assert (everything["rows"], everything["statistics"]["dominated"]) == (pruned["rows"] + dropped, 0)
    assert (pruned["parameters"]["keep_all"], everything["parameters"]["keep_all"]) == (False, True)
    again = coral("plan", "--scenario", path)
    assert again["objective_usd_per_h"] == pytest.approx(plan["objective_usd_per_h"], rel=1e-3)  # the plans' own gap

    (row,) = coral("library", "diff", "tiny", 1)[-1:]
    assert {"added", "removed", "changed", "unchanged"} <= row.keys()
    added = sum(item["added"] for item in coral("library", "diff", "tiny", 1))
    assert added == dropped


def test_the_scenario_may_ask_for_all(coral, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(tiny_without_headroom().replace("rho: 12}", "rho: 12, keep_all: true}"), encoding="utf-8")
    built = coral("library", "build", "--scenario", path, "--executor", "inline")
    assert built["parameters"]["keep_all"] is True
    assert built["statistics"]["dominated"] == 0
