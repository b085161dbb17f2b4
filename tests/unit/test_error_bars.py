"""Error bars of plans: bounds of capacities, what they would mean, and what is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.config.scenario import ProfilesSpec
from coral_core.domain.allocation import AllocationResult, AllocationStatus, InstanceCount, Shortfall
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Phase, Slo
from coral_core.report.plan_report import error_bar_text
from tasks.error_bars import (
    cost_comparison,
    cost_parts,
    error_bar_notes,
    serves_alike,
    unprofiled_notes,
    with_error_bars,
)
from tasks.ledger import quantiles


def row(parts: list[tuple[float, float | None]], demand: float) -> dict[str, object]:
    capacity = sum(throughput for throughput, _ in parts)
    return {"model": "m", "phase": "decode", "demand": demand, "capacity": capacity, **with_error_bars(parts)}


def test_all_parts_are_off_at_once_and_unknown_ones_stand() -> None:
    bars = with_error_bars([(100.0, 0.25), (60.0, None), (40.0, 0.0)])
    assert bars["capacity_low"] == pytest.approx(75 + 60 + 40)
    assert bars["capacity_high"] == pytest.approx(125 + 60 + 40)
    assert bars["error_unknown_frac"] == pytest.approx(0.3)
    wide = with_error_bars([(100.0, 1.5)])
    assert (wide["capacity_low"], wide["capacity_high"]) == (0.0, pytest.approx(250))
    assert with_error_bars([(60.0, None)]) == {
        "capacity_low": None,
        "capacity_high": None,
        "error_unknown_frac": 1.0,
    }
    assert with_error_bars([]) == {"capacity_low": 0, "capacity_high": 0, "error_unknown_frac": 0.0}


def test_nine_of_ten_measured_throughputs_lie_between_the_bounds() -> None:
    """Predicted in 1 s each, measured between twice as fast and three times as slow."""
    measured_s = np.geomspace(0.5, 3.0, 101)
    known = quantiles((1.0 / measured_s - 1.0).tolist())
    bars = with_error_bars([(1.0, known["p90_abs_error_frac"])])
    inside = (1.0 / measured_s >= bars["capacity_low"]) & (1.0 / measured_s <= bars["capacity_high"])
    assert inside.mean() == pytest.approx(0.9, abs=0.02)


def test_notes_tell_what_the_slow_end_would_leave_unmet() -> None:
    tight, roomy, blind = row([(100.0, 0.25)], 100.0), row([(100.0, 0.25)], 75.0), row([(50.0, None)], 50.0)
    assert error_bar_notes([roomy]) == []
    [short] = error_bar_notes([tight, roomy])
    assert "would not meet m decode 25% of the demand" in short
    assert "`capacity.pessimistic: true`" in short
    [unknown] = error_bar_notes([blind])
    assert unknown == (
        "capacity whose error is not known, since nothing was measured on its GPUs or its profile states no variation: m decode 100%"
    )
    # What is short without error bars is said elsewhere.
    assert error_bar_notes([row([(90.0, 0.25)], 100.0)]) == []


def test_what_is_at_its_slow_end_already_is_not_slowed_again() -> None:
    bars = with_error_bars([(50.0, 0.25)], at_slow_end=60.0)
    assert bars == {"capacity_low": pytest.approx(97.5), "capacity_high": None, "error_unknown_frac": 0.0}
    careful = {"model": "m", "phase": "decode", "demand": 60.0, "capacity": 60.0}
    assert error_bar_notes([{**careful, **with_error_bars([], at_slow_end=60.0)}]) == []


def test_bars_are_shown_where_there_are_any() -> None:
    assert error_bar_text(row([(100.0, 0.25)], 1.0)) == "75 to 125"
    assert error_bar_text(row([(100.0, 1.25), (100.0, None)], 1.0)) == "100 to 325, 50% unknown"
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


def template(name: str, node: str, error_frac: float | None) -> ServingTemplate:
    return ServingTemplate(
        template_id=name,
        model="m",
        variant="bf16",
        phase=Phase.DECODE,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        placement=Placement(stages=(Stage(layers=4, nodes=(node,)),)),
        throughput_tokens_per_s=100.0,
        throughput_requests_per_s=None,
        method="test",
        source=CapacitySource.ESTIMATED,
        error_frac=error_frac,
    )


def answer(cost: float, churn: float, *items: tuple[str, int], lacks: float = 0.0) -> AllocationResult:
    return AllocationResult(
        status=AllocationStatus.OPTIMAL,
        cost_usd_per_h=cost,
        churn_usd_per_h=churn,
        bound_usd_per_h=cost + churn,
        instances=tuple(InstanceCount(template=name, region="r", count=count) for name, count in items),
        shortfall=(Shortfall(model="m", phase=Phase.DECODE, tokens_per_s=lacks, requests_per_s=None, frac=lacks),),
        method="test",
    )


TEMPLATES = {"a": template("a", "big", 0.25), "b": template("b", "small", 0.25), "c": template("c", "new", None)}
PRICES = {("a", "r"): 2.0, ("b", "r"): 1.0, ("c", "r"): 1.0}


def beside(ours: AllocationResult, theirs: AllocationResult, *, careful: bool = False) -> dict[str, object]:
    sides = [cost_parts(one, TEMPLATES, PRICES, careful=careful) for one in (ours, theirs)]
    return cost_comparison(sides[0], sides[1], same_demand=serves_alike(ours, theirs))


def test_a_plan_is_dearer_only_beyond_the_error_bars() -> None:
    ours, near, far = answer(10.0, 1.0, ("b", 10)), answer(12.0, 1.2, ("a", 6)), answer(20.0, 2.0, ("a", 10))
    assert beside(ours, near)["cost_verdict"] == "within error"
    found = beside(ours, far)
    assert found["cost_ratio"] == pytest.approx(2.0)  # with start-up
    assert found["cost_ratio_low"] == pytest.approx(2.0 - 0.25 * 3)
    assert found["cost_verdict"] == "dearer"
    assert beside(ours, answer(20.0, 2.0, ("b", 20)))["cost_ratio_low"] == pytest.approx(1.75)


def test_no_winner_is_called_where_an_error_is_not_known_or_less_is_served() -> None:
    ours = answer(10.0, 1.0, ("b", 10))
    unknown = beside(ours, answer(50.0, 5.0, ("c", 50)))
    assert unknown["cost_verdict"] == "error not known"
    assert unknown["cost_ratio_low"] is None
    foreign = beside(ours, answer(50.0, 5.0, ("a pool of another method", 1)))
    assert foreign["cost_verdict"] == "error not known"
    assert foreign["cost_ratio"] == pytest.approx(5.0)
    assert beside(ours, answer(2.0, 0.2, ("a", 1), lacks=0.4))["cost_verdict"] == "serves other demand"
    assert serves_alike(ours, replace(ours, cost_usd_per_h=0.0))


def test_plans_at_the_slow_end_are_compared_there() -> None:
    ours, near = answer(10.0, 1.0, ("b", 10)), answer(12.0, 1.2, ("a", 6))
    found = beside(ours, near, careful=True)
    assert found["cost_verdict"] == "dearer"
    assert found["cost_ratio_low"] == found["cost_ratio_high"] == pytest.approx(1.2)
