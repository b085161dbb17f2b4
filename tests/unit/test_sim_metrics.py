"""Goodput, attainment and percentiles against numbers worked out by hand; conservation errors on tampered worlds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError
from coral_core.sim import columns as c
from coral_core.sim import loop
from coral_core.sim.inputs import LifecycleEvent, LifecycleKind, SimModel
from coral_core.sim.instances import set_state
from coral_core.sim.metrics import Latencies, load, measure, tpot_s, ttft_s, within_slo
from coral_core.sim.outcome import ConservationError, check_conservation
from coral_core.sim.pack import pack
from coral_core.sim.run import simulate
from tests.fakes.sim_cases import instance, node, requests, simulation, stage

ONE = instance("i", stage(node(fixed_s=1.0)), max_running_requests=1)
# 1 to 3 s, waits until 4 and ends at 4, waits until 5 and is there until 14.
ASKED = requests((0.0, 1, 3), (0.5, 1, 1), (1.0, 1, 10))


def run(slo=None, **more):
    given = simulation([ONE], ASKED, end_s=20.0, **more)
    return given.requests, simulate(given)


def test_latencies_of_each_request():
    asked, outcome = run()
    assert ttft_s(asked, outcome).tolist() == [1.0, 3.5, 4.0]
    assert tpot_s(asked, outcome)[[0, 2]].tolist() == [1.0, 1.0]
    assert math.isnan(tpot_s(asked, outcome)[1])


@pytest.mark.parametrize(
    ("slo", "within"),
    [
        (Slo(ttft_s=4.0, tpot_s=1.0), [True, True, True]),
        (Slo(ttft_s=3.9, tpot_s=1.0), [True, True, False]),
        (Slo(ttft_s=4.0, tpot_s=0.9), [False, True, False]),
        (Slo(ttft_s=0.1, tpot_s=9.0), [False, False, False]),
    ],
)
def test_both_bounds_decide_and_a_single_token_has_only_the_first(slo, within):
    asked, outcome = run()
    assert within_slo(asked, outcome, [slo]).tolist() == within


def test_goodput_counts_tokens_within_the_slo_over_the_window_of_arrivals():
    asked, outcome = run()
    slos = {"m": Slo(ttft_s=3.9, tpot_s=1.0)}
    found = measure(asked, outcome, slos, to_s=10.0)["m"]
    assert found.goodput_tokens_per_s == pytest.approx((3 + 1) / 10)
    assert found.throughput_tokens_per_s == pytest.approx(14 / 10)
    assert found.offered_tokens_per_s == pytest.approx(14 / 10)
    assert (found.offered_requests, found.done_requests, found.within_slo_requests) == (3, 3, 2)
    assert found.attainment_frac == pytest.approx(2 / 3)
    assert found.ttft.mean_s == pytest.approx((1 + 3.5 + 4) / 3)
    assert found.ttft.percentile_s[50.0] == pytest.approx(3.5)
    assert found.tpot.requests == 2
    later = measure(asked, outcome, slos, from_s=0.5, to_s=1.0)
    assert later["m"] == replace(later["*"], model="m")
    assert later["m"].offered_requests == 1
    assert later["m"].goodput_tokens_per_s == pytest.approx(2.0)


def test_hand_over_counts_unless_told_otherwise():
    pair = [
        instance("p", stage(node(fixed_s=1.0, nic=1000.0)), phase=Phase.PREFILL),
        instance("d", stage(node(fixed_s=1.0, nic=1000.0)), phase=Phase.DECODE),
    ]
    given = simulation(pair, requests((0.0, 100, 3)), model=SimModel(name="m", kv_bytes_per_token=40.0), end_s=20.0)
    outcome = simulate(given)
    # First token at 1, 4,000 bytes until 5, two tokens until 7.
    assert tpot_s(given.requests, outcome).tolist() == [3.0]
    assert tpot_s(given.requests, outcome, handover=False).tolist() == [1.0]
    slos = {"m": Slo(ttft_s=1.0, tpot_s=1.0)}
    assert measure(given.requests, outcome, slos)["m"].attainment_frac == 0.0
    assert measure(given.requests, outcome, slos, handover=False)["m"].attainment_frac == 1.0


def test_what_is_rejected_lost_or_unfinished_is_offered_but_not_within():
    # One runs until 2; one waits; 1 request/s and a bound of 1 s: the third may wait too, the fourth is turned away at
    # 0.3. The second is lost at 3.5 after its first token, the third waits for the restart at 4 and is done at 6. While
    # nothing serves, at 3.7, requests are turned away too. The last one is not done by 20.
    asked = requests((0.0, 1, 2), (0.1, 1, 2), (0.2, 1, 2), (0.3, 1, 2), (3.7, 1, 1), (6.0, 1, 90))
    fail = LifecycleEvent(at_s=3.5, kind=LifecycleKind.FAIL, instance="i")
    start = LifecycleEvent(at_s=4.0, kind=LifecycleKind.START, instance="i")
    given = simulation([ONE], asked, fail, start, model=SimModel(name="m", max_wait_s=1.0), end_s=20.0)
    found = measure(asked, simulate(given), {"m": Slo(ttft_s=9.0, tpot_s=9.0)})["m"]
    assert (found.offered_requests, found.done_requests, found.failed_requests) == (6, 2, 1)
    assert (found.rejected_requests, found.unfinished_requests) == (2, 1)
    assert found.attainment_frac == pytest.approx(2 / 6)


def test_no_requests_are_no_numbers():
    asked, outcome = run()
    none = measure(asked, outcome, {"m": Slo(ttft_s=1.0, tpot_s=1.0)}, from_s=15.0)["m"]
    assert none.offered_requests == 0
    assert math.isnan(none.attainment_frac)
    assert math.isnan(none.ttft.mean_s)
    assert Latencies.of(np.array([np.nan])).requests == 0
    with pytest.raises(InputError, match="is empty"):
        measure(asked, outcome, {"m": Slo(ttft_s=1.0, tpot_s=1.0)}, from_s=20.0)


def test_load_per_epoch():
    given = simulation([ONE], ASKED, end_s=20.0, epoch_starts_s=(0.0, 4.0, 16.0))
    found = load(simulate(given))
    assert found.busy_frac[:, 0].tolist() == pytest.approx([1.0, 10 / 12, 0.0])
    # Second waits 0.5 to 3, third 1 to 4.
    assert found.mean_waiting_requests[:, 0].tolist() == pytest.approx([(2.5 + 3) / 4, 0.0, 0.0])
    assert found.max_waiting_requests[:, 0].tolist() == [2.0, 0.0, 0.0]
    idle = load(simulate(simulation([instance("off", *ONE.stages, ready_at_start=False)], ASKED)))
    assert np.isnan(idle.busy_frac).all()


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda w: w.req.__setitem__((0, c.R_GENERATED), 2), "tokens of requests that are done"),
        (lambda w: w.counter.__setitem__(c.C_EMITTED, 99), "tokens emitted"),
        (lambda w: w.counter.__setitem__(c.C_ARRIVED, 2), "requests that arrived"),
        (lambda w: w.node.__setitem__((0, c.N_FREE), w.node[0, c.N_FREE] - 1), "KV blocks"),
        (lambda w: w.inst.__setitem__((0, c.I_OUTSTANDING), 1), "outstanding"),
        (lambda w: w.req.__setitem__((1, c.R_STATE), c.WAITING), "stand in no queue"),
        (lambda w: w.inst_stat.__setitem__((0, 0, c.B_EMITTED), 1.0), "tokens by instance"),
        (lambda w: w.req.__setitem__((0, c.R_COUNTED), 1), "requests that wait"),
        (lambda w: w.lists.__setitem__((0, 0), 1), "stands in two queues"),
    ],
)
def test_a_world_that_does_not_add_up_is_refused(tamper, message):
    packed = pack(simulation([ONE], ASKED, end_s=20.0))
    set_state(packed.world, 0, c.READY)
    loop.begin(packed.world)
    assert loop.run(packed.world, 20.0) == c.RAN_OUT
    check_conservation(packed)
    tamper(packed.world)
    with pytest.raises(ConservationError, match=message):
        check_conservation(packed)
