"""`coral plan one-more` on a plan whose supply binds, and on one whose supply does not."""

from __future__ import annotations

import json

import pytest

from coral_core.cli.entry import run
from tests.fakes.tiny_text import tiny_without_headroom


@pytest.fixture
def coral(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


def scenario(path, nodes):
    text = tiny_without_headroom().replace("n_max: 3", "n_max: 2").replace("name: tiny", "name: small")
    head, _, tail = text.partition("  - model: gpt-oss-20b")
    supply = f"availability: {{kind: constant, nodes: {json.dumps(nodes)}}}\n" if nodes else ""
    path.write_text(head + tail[tail.index("library:") :] + supply)
    return path


def test_one_more_of_what_is_short_saves_what_a_plan_with_it_costs_less(coral, tmp_path):
    scarce = scenario(tmp_path / "scarce.yaml", {"us-east-2": {"2xL40S": 1, "1xL4": 30, "1xA10G": 30}})
    plan = json.loads(coral("plan", "--scenario", scarce, "--json"))
    answers = json.loads(coral("plan", "one-more", "--json"))
    found = next(item for item in answers if (item["region"], item["config"]) == ("us-east-2", "2xL40S"))
    richer = scenario(tmp_path / "richer.yaml", {"us-east-2": {"2xL40S": 2, "1xL4": 30, "1xA10G": 30}})
    with_it = json.loads(coral("plan", "--scenario", richer, "--json", "--dry-run"))
    assert found["shortfall_less_frac"] >= 0
    saved = plan["objective_usd_per_h"] - with_it["objective_usd_per_h"]
    assert found["saved_usd_per_h"] == pytest.approx(saved, abs=1e-6)
    assert found["saved_usd_per_h_proven"] <= saved + 1e-6
    table = coral("plan", "one-more", "--most", "2")
    assert "One more node of (predicted)" in table
    assert "2xL40S" in table


def test_where_all_is_plenty_nothing_more_helps(coral, tmp_path):
    coral("plan", "--scenario", scenario(tmp_path / "ample.yaml", None))
    assert "saves nothing" in coral("plan", "one-more")
