"""Confidence intervals: quantiles against the density itself, coverage by drawing, unknown stays unknown."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coral_core.report.intervals import interval, student_t975
from coral_core.report.published import PUBLISHED


def tail_frac(t: float, freedom: int) -> float:
    """P(T > t) by integrating the density; x = tan(u) maps the line to a finite range."""
    u = np.linspace(math.atan(t), math.pi / 2, 400_001)[:-1]
    x = np.tan(u)
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density = np.exp(scale - (freedom + 1) / 2 * np.log1p(x**2 / freedom)) * (1 + x**2)
    return float(np.trapezoid(density, u))


@pytest.mark.parametrize("freedom", [*range(1, 31), 31, 40, 100, 1000])
def test_a_fortieth_of_the_distribution_lies_beyond_the_quantile(freedom):
    assert tail_frac(student_t975(freedom), freedom) == pytest.approx(0.025, rel=2e-4)


def test_the_interval_of_known_values_is_worked_by_hand():
    found = interval([1.0, 2.0, 3.0])
    half = 4.3027 / math.sqrt(3)
    assert (found.mean, found.n) == (2.0, 3)
    assert (found.low, found.high) == (pytest.approx(2 - half), pytest.approx(2 + half))


def test_the_interval_holds_the_true_mean_nineteen_times_in_twenty():
    rng = np.random.default_rng(5)
    found = [interval(list(rng.normal(7.0, 2.0, 4))) for _ in range(4000)]
    assert np.mean([one.low <= 7.0 <= one.high for one in found]) == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_spread_and_an_unknown_one_no_mean():
    assert interval([4.0]).mean == 4.0
    assert interval([4.0]).low is None
    for values in ([], [1.0, None], [1.0, math.nan]):
        assert interval(values).mean is None
    with pytest.raises(ValueError, match="start at 1"):
        student_t975(0)


def test_published_ratios_are_of_scenarios_and_policies_that_exist():
    from coral_core.allocation.policies import HELIX, POLICIES
    from coral_core.config.scenario import scenario_names

    for scenario, policy in PUBLISHED:
        assert scenario in scenario_names()
        assert policy in {*POLICIES, HELIX}
