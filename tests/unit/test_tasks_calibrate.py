"""Calibration finds what trying every point of the grid finds, and says where the goal is out of reach."""

from __future__ import annotations

import json

import pytest

from coral_core.cli.entry import run
from coral_core.config.policies import scenario_policies
from coral_core.errors import InputError
from tasks import calibrate as module
from tasks.calibrate import Trial, calibrate
from tests.fakes.evaluation_cases import micro, resolved, source_of

GRID = (0.2, 0.4, 0.6, 0.8, 1.0)


def prepared(folder, *changes):
    scenario = resolved(folder, *changes)
    return source_of(scenario), scenario_policies(scenario)["coral"]


def pretended(monkeypatch, good):
    """Trials whose goodput is `good(prefill, decode)`, without simulating."""

    def trial(source, policy, seeds, utilization):
        named = {phase.value: value for phase, value in utilization.items()}
        share = {"m": good(**named)}
        return Trial(
            utilization=named,
            cost_usd_per_h=1.0,
            planned_full=True,
            goodput_frac=share,
            without_handover_goodput_frac={"m": 1.0},
            latencies_s={},
        )

    monkeypatch.setattr(module, "_trial", trial)


@pytest.mark.parametrize("prefill_limit", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("decode_limit", [0.2, 0.4, 1.0])
def test_phases_that_do_not_meet_are_found_each_for_itself(tmp_path, monkeypatch, prefill_limit, decode_limit):
    pretended(monkeypatch, lambda prefill, decode: float(prefill <= prefill_limit and decode <= decode_limit))
    found = calibrate(*prepared(tmp_path), [0], grid=GRID)
    assert found.found == {"prefill": prefill_limit, "decode": decode_limit} == found.alone
    assert len(found.trials) <= 2 + 2 * 3


def test_phases_that_disturb_each_other_are_lowered_together_the_higher_first(tmp_path, monkeypatch):
    pretended(monkeypatch, lambda prefill, decode: float(prefill + decode <= 1.21 and prefill <= 0.8))
    found = calibrate(*prepared(tmp_path), [0], grid=GRID)
    assert found.alone == {"prefill": 0.8, "decode": 1.0}
    assert found.found == {"prefill": 0.6, "decode": 0.6}


def test_a_goal_out_of_reach_is_said_with_what_was_reached(tmp_path, monkeypatch):
    pretended(monkeypatch, lambda prefill, decode: 0.5)
    found = calibrate(*prepared(tmp_path), [0], grid=GRID)
    assert found.found is None
    assert found.alone == {"prefill": None, "decode": None}
    assert [trial.goodput_frac for trial in found.trials] == [{"m": 0.5}]
    assert calibrate(*prepared(tmp_path), [0], grid=GRID, handover=False).found == {"prefill": 1.0, "decode": 1.0}
    assert calibrate(*prepared(tmp_path), [0], grid=GRID, target_frac=0.5).found == {"prefill": 1.0, "decode": 1.0}


def test_what_is_found_holds_in_the_simulator(tmp_path):
    grid = (0.3, 0.65, 1.0)
    source, policy = prepared(tmp_path, ("requests_per_s: 4", "requests_per_s: 12"))
    found = calibrate(source, policy, [0], grid=grid, target_frac=0.9, handover=False)
    assert found.found is not None
    best = next(trial for trial in found.trials if trial.utilization == found.found)
    assert best.planned_full
    assert best.without_handover_goodput_frac["phi-4"] >= 0.9
    assert best.latencies_s["phi-4"]["ttft_bound"] == 1.2
    assert json.loads(json.dumps(found.document))["kind"] == "simulated"
    assert source.resolved.scenario.epochs.count == 2  # the caller's own is left as it was


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": ()}, "not within"),
        ({"grid": (0.5, 1.2)}, "not within"),
        ({"grid": (0.0, 0.5)}, "not within"),
        ({"target_frac": 0.0}, "not in"),
    ],
)
def test_an_unusable_grid_or_target_is_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        calibrate(*prepared(tmp_path), [0], **options)


@pytest.mark.parametrize("is_json", [True, False])
def test_the_command_says_what_to_put_into_the_scenario(tmp_path, monkeypatch, capsys, is_json):
    monkeypatch.chdir(tmp_path)
    pretended(monkeypatch, lambda prefill, decode: float(decode <= 0.7))
    path = micro(tmp_path)
    code = run(["calibrate", str(path), "--seeds", "0", *(["--json"] if is_json else [])])
    out = capsys.readouterr().out
    assert code == 0
    if is_json:
        assert json.loads(out)["found"] == {"prefill": 1.0, "decode": 0.7}
    else:
        assert "capacity: {max_utilization_frac: {prefill: 1, decode: 0.7}}" in out
    pretended(monkeypatch, lambda prefill, decode: 0.1)
    assert run(["calibrate", str(path), *(["--json"] if is_json else [])]) == 3
    out = capsys.readouterr().out
    assert json.loads(out)["found"] is None if is_json else "not met at any fraction tried" in out
