"""Input that makes no sense is named, with its place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.sim.disruptions import random_failures, spot_loss
from coral_core.sim.inputs import (
    LifecycleEvent,
    LifecycleKind,
    NodeTiming,
    SimModel,
    SimNode,
    SimRequests,
    SimStage,
)
from coral_core.sim.run import simulate
from tests.fakes.sim_cases import instance, node, requests, simulation, stage

ONE = instance("i", stage(node(fixed_s=1.0)))
ASKED = requests((0.0, 1, 1), (1.0, 2, 3))


def with_timing(**fields) -> dict:
    return {"stages": (SimStage(layers=1, nodes=(SimNode(timing=NodeTiming(**fields)),)),)}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"model": "x"}, r"instances\[i\].*unknown model"),
        ({"stages": ()}, r"at least one stage"),
        ({"stages": (SimStage(layers=1, nodes=()),)}, r"at least one stage"),
        ({"weight": 0.0}, r"instances\[i\]\.weight"),
        ({"weight": math.nan}, r"instances\[i\]\.weight"),
        ({"max_batched_tokens": 0}, r"max_batched_tokens"),
        ({"max_running_requests": 0}, r"max_running_requests"),
        ({"micro_batches": 0}, r"micro_batches"),
        ({"hop_s": -1.0}, r"hop_s"),
        ({"boot_s": math.inf}, r"boot_s"),
        ({"stages": (stage(node(), layers=0),)}, r"stages\[0\]\.layers"),
        ({"stages": (stage(node(kv_blocks=0)),)}, r"stages\[0\]\.nodes\[0\]\.kv_blocks"),
        ({"stages": (stage(node(nic=0.0)),)}, r"nic_bytes_per_s"),
        ({"stages": (stage(node(weight=-1.0)),)}, r"nodes\[0\]\.weight"),
        ({"stages": (stage(replace(node(), max_batched_tokens=0)),)}, r"nodes\[0\]\.max_batched_tokens"),
        ({"stages": (stage(node()), stage(node())), "micro_batches": 5000}, r"micro_batches"),
        (with_timing(fixed_s=math.nan), r"timing\.fixed_s"),
        (with_timing(grid=(0.0,), token_s=(0.0,), row_s=(0.0,)), r"timing\.grid"),
        (with_timing(grid=(1.0, 0.0)), r"timing\.grid"),
        (with_timing(token_s=(0.0,)), r"timing\.token_s"),
        (with_timing(token_s=(-1.0, 0.0)), r"timing\.token_s"),
        (with_timing(row_s=(2.0, 1.0)), r"timing\.row_s: falls"),
        (with_timing(depth=0), r"timing\.depth"),
        ({"phase": Phase.PREFILL}, r"no decode instance of model m in region ''"),
    ],
)
def test_a_wrong_instance_is_named(change, place):
    with pytest.raises(InputError, match=place):
        simulate(simulation([replace(ONE, **change)], ASKED))


def test_kv_needs_a_decode_instance_of_the_same_region_unless_regions_may_differ():
    pair = [replace(ONE, phase=Phase.PREFILL, region="a"), replace(ONE, name="d", phase=Phase.DECODE, region="b")]
    with pytest.raises(InputError, match="in region 'a'"):
        simulate(simulation(pair, ASKED))
    outcome = simulate(simulation(pair, ASKED, pd_same_region=False))
    assert outcome.queues == ("m", "m decode")
    other = [replace(pair[0], variant="x"), replace(pair[1], region="a", variant="y")]
    with pytest.raises(InputError, match="no decode instance of model m x in region 'a'"):
        simulate(simulation(other, ASKED))
    deeper = replace(pair[1], stages=(stage(node(), layers=2),))
    with pytest.raises(InputError, match="has 1 layers, decode instance d another number"):
        simulate(simulation([pair[0], deeper], ASKED, pd_same_region=False))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"kv_bytes_per_token": math.nan}, r"models\[m\]\.kv_bytes_per_token"),
        ({"activation_bytes_per_token": -1.0}, "activation_bytes_per_token"),
        ({"window_frac": 1.5, "window_tokens": 4.0}, r"window_frac.*\[0, 1\]"),
        ({"window_frac": 0.5}, "no window_tokens"),
        ({"window_tokens": 0.0}, "window_tokens"),
        ({"max_wait_s": math.nan}, "max_wait_s"),
    ],
)
def test_a_wrong_model_is_named(change, place):
    with pytest.raises(InputError, match=place):
        simulate(simulation([ONE], ASKED, model=SimModel(name="m", **change)))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"arrival_s": np.array([0.0])}, "differ in shape"),
        ({"arrival_s": np.array([0.0, math.nan])}, r"requests\.arrival_s\[1\]"),
        ({"arrival_s": np.array([-1.0, 0.0])}, r"requests\.arrival_s\[0\]"),
        ({"arrival_s": np.array([1.0, 0.5])}, r"not in order of arrival"),
        ({"input_tokens": np.array([1, 0])}, r"requests\.input_tokens\[1\]"),
        ({"output_tokens": np.array([0, 1])}, r"requests\.output_tokens\[0\]"),
        ({"model": np.array([0, 1])}, r"requests\.model\[1\]"),
        ({"arrival_s": np.array([0.0, 2000.0])}, r"options\.end_s"),
    ],
)
def test_a_wrong_request_is_named(change, place):
    with pytest.raises(InputError, match=place):
        simulate(simulation([ONE], replace(ASKED, **change)))


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"end_s": 0.0}, r"options\.end_s"),
        ({"end_s": math.inf}, r"options\.end_s"),
        ({"epoch_starts_s": ()}, "epoch_starts_s"),
        ({"epoch_starts_s": (1.0,)}, "epoch_starts_s"),
        ({"epoch_starts_s": (0.0, 2.0, 2.0)}, "epoch_starts_s"),
        ({"epoch_starts_s": (0.0, 5000.0)}, "epoch_starts_s"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"max_retries": -1}, "max_retries"),
    ],
)
def test_a_wrong_option_is_named(options, place):
    with pytest.raises(InputError, match=place):
        simulate(simulation([ONE], ASKED, **options))


@pytest.mark.parametrize(
    ("event", "place"),
    [
        (LifecycleEvent(at_s=-1.0, kind=LifecycleKind.START, instance="i"), r"lifecycle\[0\]\.at_s"),
        (LifecycleEvent(at_s=1.0, kind=LifecycleKind.START, instance="x"), r"lifecycle\[0\]: unknown instance 'x'"),
        (LifecycleEvent(at_s=1.0, kind=LifecycleKind.DRAIN_ONE, template="x"), r"unknown template 'x in '"),
    ],
)
def test_a_wrong_event_is_named(event, place):
    with pytest.raises(InputError, match=place):
        simulate(simulation([ONE], ASKED, event))


def test_names_are_unique_and_models_are_due():
    with pytest.raises(InputError, match="instances: named twice: i"):
        simulate(simulation([ONE, ONE], ASKED))
    with pytest.raises(InputError, match="no model is given"):
        simulate(replace(simulation([ONE], ASKED), models=()))


def test_no_requests_and_no_instances_are_fine():
    nobody = replace(ASKED, **{name: getattr(ASKED, name)[:0] for name in SimRequests.__slots__})
    assert simulate(simulation([ONE], nobody)).fleet.paid_s.sum() == 1000.0
    unserved = simulate(simulation([], ASKED))
    assert unserved.requests.status.tolist() == [4, 4]
    assert np.isnan(unserved.requests.finish_s).all()


def test_streams_are_merged_in_order_of_arrival():
    merged = SimRequests.merged([(1, [0.0, 2.0], [1, 2], [3, 4]), (0, [1.0, 2.0], [5, 6], [7, 8])])
    assert merged.model.tolist() == [1, 0, 1, 0]
    assert merged.input_tokens.tolist() == [1, 5, 2, 6]
    assert merged.output_tokens.tolist() == [3, 7, 4, 8]
    with pytest.raises(InputError, match="no requests"):
        SimRequests.merged([])


def test_spot_losses_drain_on_notice():
    drain, fail = spot_loss("i", 300.0)
    assert (drain.at_s, drain.kind) == (180.0, LifecycleKind.DRAIN)
    assert (fail.at_s, fail.kind) == (300.0, LifecycleKind.FAIL)
    assert spot_loss("i", 60.0)[0].at_s == 0.0


def test_random_failures_are_seeded_poisson_and_repaired():
    names = [f"i{k}" for k in range(50)]
    events = random_failures(names, failures_per_h=2.0, repair_s=60.0, end_s=36_000.0, seed=1)
    assert events == random_failures(names, failures_per_h=2.0, repair_s=60.0, end_s=36_000.0, seed=1)
    assert events != random_failures(names, failures_per_h=2.0, repair_s=60.0, end_s=36_000.0, seed=2)
    times = [event.at_s for event in events]
    assert times == sorted(times)
    failures = sum(event.kind is LifecycleKind.FAIL for event in events)
    # 50 instances, 10 h, a cycle of 30 min up and 1 min down: 968 expected, standard deviation about 30.
    assert abs(failures - 50 * 36_000 / (1800 + 60)) < 120
    assert not random_failures(names, failures_per_h=0.0, repair_s=60.0, end_s=36_000.0, seed=1)
    for wrong in ({"failures_per_h": math.nan, "repair_s": 1.0}, {"failures_per_h": 1.0, "repair_s": -1.0}):
        with pytest.raises(InputError):
            random_failures(names, **wrong, end_s=1.0, seed=1)
