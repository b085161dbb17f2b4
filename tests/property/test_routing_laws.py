"""Laws of smooth weighted round robin, and that compiled decisions are the plain ones."""

from __future__ import annotations

import math

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.extending import register_jitable

from coral_core.routing import admission, round_robin, scale_down

weights = st.lists(st.integers(1, 50), min_size=1, max_size=8)

for _function in (
    round_robin.pick_weighted,
    scale_down.least_loaded,
    admission.expected_wait_s,
    admission.admits,
    admission.retry_after_s,
    admission.may_retry,
    admission.max_wait_s,
):
    register_jitable(_function)


@numba.njit
def compiled_turns(credit, weight, is_open, count):
    turns = np.empty(count, dtype=np.int64)
    for k in range(count):
        turns[k] = round_robin.pick_weighted(credit, weight, is_open)
    return turns


@numba.njit
def compiled_decisions(waiting, rate, bound, retries):
    return (
        admission.admits(waiting, rate, bound),
        admission.retry_after_s(waiting, rate, bound, 9.0),
        admission.may_retry(waiting, retries, 1),
        admission.max_wait_s(bound, rate),
    )


@numba.njit
def compiled_least_loaded(outstanding, weight, is_candidate):
    return scale_down.least_loaded(outstanding, weight, is_candidate)


@given(weights)
def test_a_full_round_serves_each_exactly_by_its_weight(members):
    weight = np.array(members, dtype=np.float64)
    credit, is_open = np.zeros(len(members)), np.ones(len(members))
    turns = [round_robin.pick_weighted(credit, weight, is_open) for _ in range(sum(members))]
    assert np.bincount(turns, minlength=len(members)).tolist() == members
    assert (credit == 0).all()


@given(weights, st.integers(1, 300))
def test_nobody_is_ever_a_whole_turn_ahead_of_their_share(members, count):
    weight = np.array(members, dtype=np.float64)
    credit, is_open = np.zeros(len(members)), np.ones(len(members))
    served = np.zeros(len(members))
    for k in range(1, count + 1):
        served[round_robin.pick_weighted(credit, weight, is_open)] += 1
        assert (served - k * weight / weight.sum() < 1 + 1e-9).all()
        assert abs(credit.sum()) < 1e-6


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), min_size=1, max_size=6), st.integers(1, 60))
@settings(max_examples=60)
def test_compiled_turns_are_the_plain_ones(members, count):
    weight = np.array([value for value, _ in members])
    is_open = np.array([float(value) for _, value in members])
    plain_credit, compiled_credit = np.zeros(len(members)), np.zeros(len(members))
    plain = [round_robin.pick_weighted(plain_credit, weight, is_open) for _ in range(count)]
    assert compiled_turns(compiled_credit, weight, is_open, count).tolist() == plain
    assert plain_credit.tolist() == compiled_credit.tolist()
    assert all(k == -1 or (is_open[k] and weight[k] > 0) for k in plain)


@given(st.integers(0, 50), st.floats(0, 20), st.one_of(st.floats(0, 5), st.just(math.inf)), st.integers(0, 2))
@settings(max_examples=60)
def test_compiled_decisions_are_the_plain_ones(waiting, rate, bound, retries):
    plain = (
        admission.admits(waiting, rate, bound),
        admission.retry_after_s(waiting, rate, bound, 9.0),
        admission.may_retry(waiting, retries, 1),
        admission.max_wait_s(bound, rate),
    )
    assert compiled_decisions(waiting, rate, bound, retries) == plain


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans()), min_size=1, max_size=7))
@settings(max_examples=60)
def test_the_drained_one_has_the_least_load(members):
    outstanding = np.array([n for n, _, _ in members])
    weight = np.array([float(w) for _, w, _ in members])
    is_candidate = np.array([int(flag) for *_, flag in members])
    chosen = scale_down.least_loaded(outstanding, weight, is_candidate)
    assert chosen == compiled_least_loaded(outstanding, weight, is_candidate)
    loads = [n / w for n, w, flag in members if flag]
    assert (chosen == -1) == (not loads)
    if loads:
        assert is_candidate[chosen]
        assert outstanding[chosen] / weight[chosen] == min(loads)
