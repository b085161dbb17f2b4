"""Error bars of plans: bounds of capacities, what they would mean, and what is not known."""

from __future__ import annotations

import pytest

from coral_core.config.scenario import ProfilesSpec
from coral_core.report.plan_report import error_bar_text
from tasks.error_bars import error_bar_notes, unprofiled_notes, with_error_bars


def row(parts: list[tuple[float, float | None]], demand: float) -> dict[str, object]:
    capacity = sum(throughput for throughput, _ in parts)
    return {"model": "m", "phase": "decode", "demand": demand, "capacity": capacity, **with_error_bars(parts)}


def test_all_parts_are_off_at_once_and_unknown_ones_stand() -> None:
    bars = with_error_bars([(100.0, 0.25), (60.0, None), (40.0, 0.0)])
    assert bars["capacity_low"] == pytest.approx(80 + 60 + 40)
    assert bars["capacity_high"] == pytest.approx(100 / 0.75 + 60 + 40)
    assert bars["error_unknown_frac"] == pytest.approx(0.3)
    assert with_error_bars([(100.0, 1.5)])["capacity_high"] is None
    assert with_error_bars([(60.0, None)]) == {
        "capacity_low": None,
        "capacity_high": None,
        "error_unknown_frac": 1.0,
    }
    assert with_error_bars([]) == {"capacity_low": 0, "capacity_high": 0, "error_unknown_frac": 0.0}


def test_notes_tell_what_the_slow_end_would_leave_unmet() -> None:
    tight, roomy, blind = row([(100.0, 0.25)], 100.0), row([(100.0, 0.25)], 80.0), row([(50.0, None)], 50.0)
    assert error_bar_notes([roomy]) == []
    [short] = error_bar_notes([tight, roomy])
    assert "would not meet m decode 20% of the demand" in short
    assert "`capacity.pessimistic: true`" in short
    [unknown] = error_bar_notes([blind])
    assert unknown == ("capacity whose error is not known, since nothing was measured on its GPUs: m decode 100%")
    # What is short without error bars is said elsewhere.
    assert error_bar_notes([row([(90.0, 0.25)], 100.0)]) == []


def test_what_is_at_its_slow_end_already_is_not_slowed_again() -> None:
    bars = with_error_bars([(50.0, 0.25)], at_slow_end=60.0)
    assert bars == {"capacity_low": pytest.approx(100), "capacity_high": None, "error_unknown_frac": 0.0}
    careful = {"model": "m", "phase": "decode", "demand": 60.0, "capacity": 60.0}
    assert error_bar_notes([{**careful, **with_error_bars([], at_slow_end=60.0)}]) == []


def test_bars_are_shown_where_there_are_any() -> None:
    assert error_bar_text(row([(100.0, 0.25)], 1.0)) == "80 to 133.3"
    assert error_bar_text(row([(100.0, 1.25), (100.0, None)], 1.0)) == "144.4 to ?, 50% unknown"
    assert error_bar_text(row([(100.0, None)], 1.0)) is None
    assert error_bar_text({"capacity": 5.0}) is None  # plans recorded before there were any
    assert error_bar_text(row([], 1.0)) is None


def test_a_plan_with_profiles_says_what_is_estimated_all_the_same() -> None:
    rows = [
        {"model": "a", "phase": "decode", "source": "interpolated"},
        {"model": "b", "phase": "prefill", "source": "estimated"},
    ]
    named = ProfilesSpec(engine="vllm-0.32.0-bf16")
    [note] = unprofiled_notes(rows, named)
    assert note.endswith("instances of b prefill")
    assert unprofiled_notes(rows[:1], named) == []
    assert unprofiled_notes(rows, None) == []
