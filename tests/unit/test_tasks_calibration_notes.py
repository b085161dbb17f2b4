"""Calibration says where chance decides: few requests in an epoch, and traces, which no seed changes."""

from __future__ import annotations

import pytest

from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import Scenario
from tasks.calibration_notes import calibration_notes

ROWS = "".join(f"{second},500,100\n" for second in range(20))


def noted(tmp_path, *, lengths, rate, duration_s, seeds=(101, 102)):
    (tmp_path / "own.csv").write_text("arrival_s,input_tokens,output_tokens\n" + ROWS)
    model = {"model": "phi-4", "requests_per_s": rate, "lengths": lengths, "slo": {"ttft_s": 1.2, "tpot_s": 0.06}}
    scenario = {
        "name": "noted",
        "catalog": "paper-core",
        "regions": ["us-east-2"],
        "models": [model],
        "epochs": {"duration_s": duration_s},
    }
    return calibration_notes(resolve_scenario(Scenario.model_validate(scenario)), seeds)


@pytest.mark.parametrize(("rate", "few"), [(0, False), (1, True), (9.9, True), (10, False)])
def test_few_requests_are_said_with_their_number(tmp_path, rate, few):
    notes = noted(tmp_path, lengths="azure-conv", rate=rate, duration_s=100)
    assert len(notes) == few
    assert all(f"about {rate * 100:g} requests" in note and "phi-4" in note for note in notes)


@pytest.mark.parametrize(("rate", "seeds", "said"), [(10, (1, 2, 3), True), (10, (1,), False), (0, (1, 2, 3), False)])
def test_seeds_that_change_nothing_are_said(tmp_path, rate, seeds, said):
    lengths = {"trace": str(tmp_path / "own.csv")}
    notes = noted(tmp_path, lengths=lengths, rate=rate, duration_s=1000, seeds=seeds)
    assert notes == (("phi-4: its trace is replayed, so that all 3 seeds try the same requests",) if said else ())
