"""Instances that come and go, in cases worked out on paper: boot, drain, failure, retries, what is paid for."""

from __future__ import annotations

import pytest

from coral_core.domain.workload import Phase
from coral_core.sim.inputs import LifecycleEvent, LifecycleKind, SimModel
from coral_core.sim.outcome import RequestStatus
from coral_core.sim.run import simulate
from tests.fakes.sim_cases import disaggregated, first_and_finish, instance, node, requests, simulation, stage

DONE, FAILED = RequestStatus.DONE, RequestStatus.FAILED
KV_MODEL = SimModel(name="m", kv_bytes_per_token=10.0)


def event(at_s, kind, name="i", **more):
    return LifecycleEvent(at_s=at_s, kind=LifecycleKind(kind), instance=name, **more)


def test_booting_is_paid_for_and_serves_nothing():
    one = instance("i", stage(node(fixed_s=1.0)), boot_s=5.0, ready_at_start=False)
    given = simulation([one], requests((0.0, 1, 1)), event(2.0, "start"), end_s=20.0, epoch_starts_s=(0.0, 6.0))
    outcome = simulate(given)
    assert first_and_finish(outcome) == [(8.0, 8.0)]
    assert outcome.fleet.paid_s[:, 0].tolist() == [4.0, 14.0]
    assert outcome.fleet.up_s[:, 0].tolist() == [0.0, 13.0]
    assert outcome.fleet.busy_s[:, 0].tolist() == [0.0, 1.0]
    assert outcome.fleet.waiting_request_s[:, 0].tolist() == [6.0, 1.0]


def test_a_draining_instance_finishes_takes_nothing_new_and_stops():
    pair = [instance("i", stage(node(fixed_s=1.0))), instance("j", stage(node(fixed_s=1.0)))]
    asked = requests((0.0, 1, 5), (1.5, 1, 1), (1.6, 1, 1))
    outcome = simulate(simulation(pair, asked, event(1.0, "drain"), end_s=10.0))
    assert outcome.requests.instance.tolist() == [0, 1, 1]
    assert outcome.fleet.paid_s[0].tolist() == [5.0, 10.0]


def test_draining_undone_and_boots_given_up():
    one = instance("i", stage(node(fixed_s=1.0)), boot_s=2.0)
    other = instance("j", stage(node(fixed_s=1.0)), boot_s=2.0, ready_at_start=False)
    events = [event(0.5, "drain"), event(0.7, "start"), event(0.0, "start", "j"), event(1.0, "drain", "j")]
    outcome = simulate(simulation([one, other], requests((0.0, 1, 3), (2.5, 1, 1)), *events, end_s=10.0))
    assert outcome.requests.status.tolist() == [DONE, DONE]
    assert outcome.requests.instance.tolist() == [0, 0]
    assert outcome.fleet.paid_s[0].tolist() == [10.0, 1.0]


def test_of_a_template_the_least_loaded_instance_is_drained():
    trio = [instance(name, stage(node(fixed_s=1.0)), region="r") for name in "ijk"]
    asked = requests((0.0, 1, 9), (0.1, 1, 9), (0.2, 1, 2), (5.0, 1, 1), (5.1, 1, 1), (5.2, 1, 1))
    drain = event(4.0, "drain_one", "", template="t", region="r")
    outcome = simulate(simulation(trio, asked, drain, end_s=50.0))
    assert outcome.fleet.paid_s[0].tolist() == [50.0, 50.0, 4.0]
    assert 2 not in outcome.requests.instance[3:].tolist()


def test_draining_more_than_there_are_changes_nothing():
    one = instance("i", stage(node(fixed_s=1.0)))
    events = [event(t, "drain_one", "", template="t") for t in (1.0, 2.0)] + [event(3.0, "drain"), event(4.0, "fail")]
    outcome = simulate(simulation([one], requests((0.0, 1, 1)), *events, end_s=10.0))
    assert outcome.fleet.paid_s.sum() == 1.0


def test_a_lost_request_is_tried_once_more_if_nothing_was_sent():
    trio = [instance(name, stage(node(fixed_s=2.0))) for name in "ijk"]
    asked = requests((0.0, 1, 1), (0.1, 1, 3), (0.2, 1, 3))
    outcome = simulate(simulation(trio, asked, event(1.0, "fail"), event(3.0, "fail", "j")))
    # The first is lost at 1 with nothing sent; its turn is j's, which is busy until 2.1 and gone at 3: lost twice.
    # The second had its first token at 2.1: not tried again. The third is not touched.
    assert outcome.requests.retries.tolist() == [1, 0, 0]
    assert outcome.requests.status.tolist() == [FAILED, FAILED, DONE]
    assert outcome.requests.finish_s.tolist() == pytest.approx([3.0, 3.0, 6.2])
    assert outcome.fleet.lost_requests[0].tolist() == [0.0, 2.0, 0.0]


def test_a_failed_instance_comes_back_empty():
    one = instance("i", stage(node(fixed_s=1.0)), boot_s=1.0)
    outcome = simulate(simulation([one], requests((0.0, 1, 5), (2.0, 1, 2)), event(1.5, "fail"), event(2.5, "start")))
    assert outcome.requests.status.tolist() == [FAILED, DONE]
    assert outcome.requests.finish_s.tolist() == pytest.approx([1.5, 5.5])
    assert outcome.fleet.busy_s.sum() == pytest.approx(1.5 + 2.0)


def test_retried_requests_keep_their_order_and_go_before_those_that_never_started():
    one = instance("i", stage(node(fixed_s=1.0)), max_running_requests=1, max_outstanding_requests=2)
    asked = requests((0.0, 1, 1), (0.1, 1, 1), (0.2, 1, 1), (0.7, 1, 1))
    outcome = simulate(simulation([one], asked, event(0.5, "fail"), event(2.0, "start")))
    assert outcome.requests.first_token_s.tolist() == pytest.approx([3.0, 4.0, 5.0, 6.0])
    assert outcome.requests.retries.tolist() == [1, 1, 0, 0]


def test_what_a_lost_instance_had_under_way_does_not_end_what_its_successor_does():
    one = instance("i", stage(node(fixed_s=5.0)), boot_s=0.5)
    outcome = simulate(simulation([one], requests((0.0, 1, 1)), event(1.0, "fail"), event(1.5, "start")))
    assert first_and_finish(outcome) == [(7.0, 7.0)]


def test_a_request_lost_while_it_waits_waits_no_longer():
    one = instance("i", stage(node(fixed_s=9.0)), max_running_requests=1)
    asked = requests((0.0, 1, 1), (0.0, 1, 1))
    outcome = simulate(simulation([one], asked, event(2.0, "fail"), max_retries=0, end_s=10.0))
    assert outcome.requests.status.tolist() == [FAILED, FAILED]
    assert outcome.fleet.waiting_request_s.sum() == pytest.approx(2.0)


def test_what_still_boots_is_given_up_first():
    pair = [instance("i", stage(node())), instance("j", stage(node()), ready_at_start=False, boot_s=5.0)]
    events = [event(0.0, "start", "j"), event(1.0, "drain_one", "", template="t")]
    outcome = simulate(simulation(pair, requests((9.0, 1, 1)), *events, end_s=10.0))
    assert outcome.fleet.paid_s[0].tolist() == [10.0, 1.0]


@pytest.mark.parametrize("name", ["p", "d"])
def test_losing_either_side_of_a_transfer_loses_the_request(name):
    outcome = simulate(
        simulation(disaggregated(), requests((0.0, 100, 3)), event(3.0, "fail", name), model=KV_MODEL, end_s=10.0)
    )
    # First token at 2.0, KV under way until 4.0.
    assert outcome.requests.status.tolist() == [FAILED]
    assert outcome.requests.finish_s.tolist() == [3.0]


def test_a_prefill_instance_holds_kv_until_a_decode_instance_takes_it():
    pair = disaggregated(max_running_requests=4)
    pair[1] = instance("d", *pair[1].stages, phase=Phase.DECODE, ready_at_start=False, boot_s=5.0)
    given = simulation(pair, requests((0.0, 100, 2)), event(3.0, "start", "d"), model=KV_MODEL, end_s=50.0)
    outcome = simulate(given)
    # First token at 2.0; decode ready at 8.0; KV until 10.0, one decode until 11.01. 100 and 101 tokens are 7 blocks.
    assert outcome.requests.decode_s.tolist() == pytest.approx([10.0])
    assert outcome.fleet.kv_block_s[0].tolist() == pytest.approx([7 * 10.0, 7 * 3.01])
