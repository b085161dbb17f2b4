"""`coral demand`: a trace becomes measured demand, and is forecast."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from coral_core.cli.entry import run


@pytest.fixture
def trace(tmp_path):
    """Two requests/s for ten minutes, of 100 and 20 tokens."""
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.5},100,20" for i in range(1201)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("CORAL_STORE", (tmp_path / "store").as_uri())
    monkeypatch.chdir(tmp_path)


def shown(capsys, *options):
    assert run(["demand", "show", "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "predicted"
    return {row["model"]: row for row in document["models"]}


@pytest.mark.parametrize("method", ["last", "ewma", "seasonal"])
def test_a_trace_is_recorded_once_and_forecast(trace, capsys, method):
    start = (datetime.now(UTC) - timedelta(minutes=11)).isoformat()
    for _ in range(2):
        assert run(["demand", "import", str(trace), "--model", "phi-4", "--start", start]) == 0
        assert "10 measurements of phi-4 until" in capsys.readouterr().out
    rows = shown(capsys, "--method", method)
    assert rows["phi-4"]["forecast_requests_per_s"] == pytest.approx(2.0)
    assert rows["phi-4"]["method"] == ("ewma" if method == "seasonal" else method)
    assert rows["qwen3-32b"]["forecast_requests_per_s"] is None
    assert "never recorded" in rows["qwen3-32b"]["unknown_because"]


def test_people_read_what_is_unknown_and_why(trace, capsys):
    assert run(["demand", "show"]) == 0
    out = capsys.readouterr()
    assert "unknown" in out.out
    assert "phi-4: its demand was never recorded" in out.out + out.err


@pytest.mark.parametrize(
    ("start", "told"),
    [("yesterday", "--start: Invalid isoformat string"), ("2026-01-01T00:00:00", "has no time zone (write 2026")],
)
def test_a_start_that_is_no_moment_is_refused(trace, capsys, start, told):
    assert run(["demand", "import", str(trace), "--model", "phi-4", "--start", start]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("every", ["0", "1e-6", "nan", "3601"])
def test_a_stretch_is_a_second_at_least_and_an_hour_at_most(trace, capsys, every):
    """A millionth of a second would be 600 million measurements, and no end of waiting."""
    options = ["--model", "phi-4", "--start", "2026-11-29T10:00:00Z", "--every-s", every]
    assert run(["demand", "import", str(trace), *options]) == 2
    assert "--every-s" in capsys.readouterr().err
