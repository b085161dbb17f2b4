"""The simulator's bench measures what it says: the requests asked for, on the fleet asked for, repeatably."""

from __future__ import annotations

import json

import pytest

from coral_core.cli.entry import run
from coral_core.errors import InputError
from tasks.bench_simulate import MODELS, bench_simulate, requests_for

MINUTES = 0.02


def test_the_command_reports_time_and_what_was_simulated(capsys):
    assert run(["bench", "simulate", "--minutes", str(MINUTES), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    run_of = report["paper_extended"]
    assert run_of["requests"] == len(requests_for(MINUTES, 25.0, seed=0))
    assert run_of["events"] > run_of["requests"]
    assert run_of["cpu_s"] > 0
    assert set(run_of["simulated_attainment_frac"]) == {one.model for one in MODELS} | {"*"}
    assert report["first_call"]["cpu_s"] > 0
    assert "growth_with_load" not in report
    assert run(["bench", "simulate", "--minutes", str(MINUTES)]) == 0
    assert "requests/s per model" in capsys.readouterr().out
    assert bench_simulate(MINUTES, growth=False)["paper_extended"]["digest"] == run_of["digest"]


def test_requests_come_at_the_rate_asked_for():
    requests = requests_for(2.0, 25.0, seed=1)
    assert len(requests) / (120 * len(MODELS)) == pytest.approx(25.0, rel=0.05)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(minutes):
    with pytest.raises(InputError, match="positive number of minutes"):
        bench_simulate(minutes, growth=False)
