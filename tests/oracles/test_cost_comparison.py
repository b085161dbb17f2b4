"""Costs of two plans within the error bars of their capacities: against all corners of the errors, tried one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coral_core.allocation.cost_comparison import CostPart, CostVerdict, compare_costs

KINDS = (("m", "bf16", "decode", "1xL4"), ("m", "bf16", "decode", "1xH100"), ("n", "bf16", "prefill", "1xL4"))


def part(what, cost, error):
    return CostPart(what=what if isinstance(what, tuple) else (what,), cost_usd_per_h=cost, error_frac=error)


def compared(ours, theirs, *, same_demand=True):
    return compare_costs([part(*one) for one in ours], [part(*one) for one in theirs], same_demand=same_demand)


def test_a_difference_larger_than_the_bars_has_a_winner_and_a_smaller_one_has_none():
    dearer = compared([("a", 10.0, 0.1)], [("b", 14.0, 0.1)])
    assert dearer.verdict is CostVerdict.DEARER
    assert dearer.ratio == pytest.approx(1.4)
    assert (dearer.ratio_low, dearer.ratio_high) == pytest.approx((1.4 - 0.24, 1.4 + 0.24))
    assert compared([("b", 14.0, 0.1)], [("a", 10.0, 0.1)]).verdict is CostVerdict.CHEAPER
    assert compared([("a", 10.0, 0.2)], [("b", 14.0, 0.2)]).verdict is CostVerdict.WITHIN_ERROR


def test_what_both_plans_spend_on_the_same_is_off_by_the_same():
    """Twice as many of the same nodes is dearer however wrong their capacity is; other nodes for the same money may not be."""
    assert compared([("a", 10.0, 0.9)], [("a", 20.0, 0.9)]).verdict is CostVerdict.DEARER
    assert compared([("a", 10.0, 0.9)], [("b", 20.0, 0.9)]).verdict is CostVerdict.WITHIN_ERROR
    same = compared([("a", 4.0, 0.9), ("a", 6.0, 0.9)], [("a", 10.0, 0.9)])
    assert same.verdict is CostVerdict.SAME
    assert (same.ratio_low, same.ratio_high) == (1.0, 1.0)


def test_an_unknown_error_is_not_none_and_not_zero():
    found = compared([("a", 10.0, 0.01)], [("b", 1000.0, None)])
    assert found.verdict is CostVerdict.ERROR_UNKNOWN
    assert (found.ratio, found.ratio_low, found.ratio_high) == (100.0, None, None)
    shared = compared([("a", 10.0, None), ("b", 1.0, 0.1)], [("a", 10.0, None), ("b", 2.0, 0.1)])
    assert shared.verdict is CostVerdict.DEARER
    assert compared([("a", 1.0, 0.1), ("a", 1.0, None)], [("a", 5.0, 0.1)]).verdict is CostVerdict.ERROR_UNKNOWN


def test_plans_that_serve_other_demand_and_empty_plans_are_not_ranked():
    other = compared([("a", 1.0, 0.1)], [("b", 9.0, 0.1)], same_demand=False)
    assert (other.verdict, other.ratio_low, other.ratio_high) == (CostVerdict.OTHER_DEMAND, None, None)
    empty = compared([], [("b", 9.0, 0.1)])
    assert (empty.ratio, empty.ratio_low) == (None, None)
    assert compared([], []).verdict is CostVerdict.SAME


costs = st.lists(st.floats(0.0, 100.0), min_size=3, max_size=3)
errors = st.lists(st.floats(0.0, 2.0), min_size=3, max_size=3)


@settings(max_examples=200, deadline=None)
@given(ours=costs, theirs=costs, bars=errors)
def test_a_winner_stays_one_at_every_corner_of_the_errors(ours, theirs, bars):
    found = compared(zip(KINDS, ours, bars, strict=True), zip(KINDS, theirs, bars, strict=True))
    differences = [
        sum((b - a) * (1 + sign * e) for a, b, e, sign in zip(ours, theirs, bars, signs, strict=True))
        for signs in itertools.product((-1, 1), repeat=3)
    ]
    assume(min(abs(difference) for difference in differences) > 1e-6)
    if min(differences) > 0:
        assert found.verdict is CostVerdict.DEARER
    elif max(differences) < 0:
        assert found.verdict is CostVerdict.CHEAPER
    else:
        assert found.verdict is CostVerdict.WITHIN_ERROR
    if found.ratio_low is not None:
        assert found.ratio_low == pytest.approx(1 + min(differences) / sum(ours), rel=1e-6, abs=1e-6)
        assert found.ratio_high == pytest.approx(1 + max(differences) / sum(ours), rel=1e-6, abs=1e-6)
