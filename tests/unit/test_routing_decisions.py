"""Routing and admission decisions, by hand-worked sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coral_core.errors import InputError, ServingError
from coral_core.routing.admission import admits, expected_wait_s, max_handover_s, max_wait_s, may_retry, retry_after_s
from coral_core.routing.least_work import pick_least_work
from coral_core.routing.round_robin import Rotation, pick_weighted
from coral_core.routing.scale_down import least_loaded


def picks(rotation: Rotation, count: int) -> str:
    return "".join(rotation.pick() for _ in range(count))


def test_turns_are_spread_as_evenly_as_weights_allow():
    # 5:1:1, worked by hand: the light ones are not served back to back.
    assert picks(Rotation.of({"a": 5, "b": 1, "c": 1}), 14) == "aabacaaaabacaa"


def test_closed_members_get_nothing_and_the_rest_share_theirs():
    rotation = Rotation.of({"a": 2, "b": 1, "c": 1})
    rotation.set_open("a", is_open=False)
    assert picks(rotation, 4) == "bcbc"
    rotation.set_open("a", is_open=True)
    assert picks(rotation, 4).count("a") == 2


def test_a_retry_goes_to_another_member():
    rotation = Rotation.of({"a": 1000, "b": 1})
    assert rotation.pick() == "a"
    assert rotation.pick(excluding=["a"]) == "b"


def test_nobody_open_is_an_error_that_says_so():
    rotation = Rotation.of({"a": 1})
    with pytest.raises(ServingError, match="no instance accepts"):
        rotation.pick(excluding=["a"])
    rotation.set_open("a", is_open=False)
    with pytest.raises(ServingError):
        rotation.pick()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_must_be_positive_and_finite(weight):
    with pytest.raises(InputError, match=r"rotation\[a\]"):
        Rotation.of({"a": weight})


def test_an_unknown_member_is_named():
    with pytest.raises(InputError, match="'x'"):
        Rotation.of({"a": 1.0}).set_open("x", is_open=True)


def test_no_member_is_minus_one_and_costs_no_credit():
    credit = np.zeros(2)
    assert pick_weighted(credit, np.array([1.0, 0.0]), np.array([0.0, 1.0])) == -1
    assert (credit == 0).all()


def test_waiting_longer_than_the_slo_allows_is_refused():
    bound_s = max_wait_s(1.2, 0.2)
    assert bound_s == pytest.approx(1.0)
    assert admits(10, 10.0, bound_s)
    assert not admits(11, 10.0, bound_s)
    assert retry_after_s(15, 10.0, bound_s, unknown_s=5.0) == pytest.approx(0.5)
    assert max_wait_s(1.0, 2.0) == 0.0
    assert admits(0, 1.0, 0.0), "an empty queue always takes one"


def test_nothing_serving_admits_only_the_patient():
    assert expected_wait_s(0, 0.0) == math.inf
    assert not admits(0, 0.0, 10.0)
    assert admits(7, 0.0, math.inf)
    assert retry_after_s(3, 0.0, 1.0, unknown_s=30.0) == 30.0


@pytest.mark.parametrize(
    ("sent_bytes", "retries", "allowed"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)]
)
def test_one_retry_before_the_first_byte(sent_bytes, retries, allowed):
    assert may_retry(sent_bytes, retries, 1) is allowed


def test_the_least_loaded_per_weight_is_drained():
    outstanding, weight = np.array([10, 6, 6, 0]), np.array([10.0, 2.0, 6.0, 1.0])
    assert least_loaded(outstanding, weight, np.array([1, 1, 1, 0])) == 0, "ties go to the first"
    assert least_loaded(outstanding, weight, np.array([0, 1, 1, 0])) == 2
    assert least_loaded(outstanding, weight, np.array([1, 1, 1, 1])) == 3
    assert least_loaded(outstanding, weight, np.zeros(4, dtype=np.int64)) == -1


def test_handover_may_take_what_a_mean_answer_has_to_spare():
    assert max_handover_s(0.1, 0.8, 51.0) == pytest.approx(1.0)
    assert max_handover_s(0.1, 1.0, 51.0) == pytest.approx(0.1)
    assert max_handover_s(0.1, 0.5, 1.0) == pytest.approx(0.1)


def test_least_work_sends_a_request_where_it_is_done_first():
    work, weight = np.array([0.0, 0.0, 0.0]), np.array([1.0, 3.0, 0.0])
    everyone = np.ones(3)
    assert pick_least_work(work, weight, everyone, 90.0) == 1
    work[1] = 200.0
    # 90 / 1 before (200 + 90) / 3; a shorter one still waits less for the fast member than it takes at the slow one.
    assert pick_least_work(work, weight, everyone, 90.0) == 0
    work[0] = 50.0
    assert pick_least_work(work, weight, everyone, 90.0) == 1
    assert pick_least_work(work, weight, np.array([1.0, 0.0, 1.0]), 90.0) == 0
    assert pick_least_work(work, weight, np.zeros(3), 90.0) == -1
    assert pick_least_work(np.zeros(2), np.ones(2), np.ones(2), 1.0) == 0  # the first of equals
