"""Plans of successive epochs become one fleet: what stays, what boots, what drains and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.errors import InputError
from coral_core.sim.inputs import LifecycleKind
from coral_core.sim.timeline import held_nodes, timeline
from tests.fakes.sim_cases import instance, node, stage

NODES = {"a": np.array([1, 0]), "b": np.array([0, 2]), "other": np.array([1, 0])}
REGIONS = ("r0", "r1")


def instance_of(template, region):
    one = instance(template, stage(node()))
    return replace(one, template=template, region=region, model="m" if template != "other" else "n")


def made(*plans, supply=None, boot_s=10.0):
    held = np.full((len(plans), 2, 2), 9) if supply is None else np.array(supply)
    return timeline(plans, instance_of, supply=held, nodes=NODES, regions=REGIONS, epoch_s=60.0, boot_s=boot_s)


def events(line):
    return [(event.at_s, event.kind, event.instance or f"{event.template}@{event.region}") for event in line.lifecycle]


def test_the_first_fleet_is_ready_and_what_stays_is_left_alone():
    line = made({("a", "r0"): 2}, {("a", "r0"): 2})
    assert [(one.name, one.ready_at_start, one.region) for one in line.instances] == [
        ("a@r0#0", True, "r0"),
        ("a@r0#1", True, "r0"),
    ]
    assert line.lifecycle == ()


def test_the_old_serves_until_the_new_is_ready():
    line = made({("a", "r0"): 2}, {("a", "r0"): 1, ("b", "r1"): 1})
    assert [one.ready_at_start for one in line.instances] == [True, True, False]
    assert line.instances[2].boot_s == 10.0
    assert events(line) == [
        (60.0, LifecycleKind.START, "b@r1#0"),
        (70.0, LifecycleKind.DRAIN_ONE, "a@r0"),
    ]


def test_the_old_goes_at_once_without_a_successor_of_its_model_or_without_supply_for_both():
    fewer = made({("a", "r0"): 2}, {("a", "r0"): 1, ("other", "r0"): 1})
    assert (60.0, LifecycleKind.DRAIN_ONE, "a@r0") in events(fewer)
    no_room = made({("a", "r0"): 1}, {("b", "r0"): 1}, supply=[[[1, 0], [0, 0]], [[0, 2], [0, 0]]])
    assert (60.0, LifecycleKind.DRAIN_ONE, "a@r0") in events(no_room)


def test_a_boot_longer_than_an_epoch_keeps_the_old_no_longer_than_the_epoch():
    line = made({("a", "r0"): 1}, {("b", "r0"): 1}, {("b", "r0"): 1}, boot_s=600.0)
    assert (120.0, LifecycleKind.DRAIN_ONE, "a@r0") in events(line)


def test_what_comes_back_is_a_new_instance():
    line = made({("a", "r0"): 1}, {}, {("a", "r0"): 1})
    assert [one.name for one in line.instances] == ["a@r0#0", "a@r0#1"]


def test_a_supply_per_plan_is_needed():
    with pytest.raises(InputError, match="2 plans, supply of 1 epochs"):
        made({}, {}, supply=[[[0, 0], [0, 0]]])


KEYS = st.tuples(st.sampled_from(["a", "b", "other"]), st.sampled_from(REGIONS))
PLANS = st.lists(st.dictionaries(KEYS, st.integers(1, 3), max_size=4), min_size=1, max_size=4)


@settings(max_examples=100)
@given(PLANS, st.integers(0, 12), st.floats(0, 100))
def test_started_less_drained_is_what_the_last_plan_holds(plans, spare, boot_s):
    supply = [held_nodes(plan, NODES, REGIONS, shape=(2, 2)) + spare for plan in plans]
    line = made(*plans, supply=supply, boot_s=boot_s)
    left = Counter((one.template, one.region) for one in line.instances)
    for event in line.lifecycle:
        if event.kind is LifecycleKind.DRAIN_ONE:
            left[event.template, event.region] -= 1
    assert +left == Counter(plans[-1])
    assert min(left.values(), default=0) >= 0
    started = {event.instance for event in line.lifecycle if event.kind is LifecycleKind.START}
    assert started == {one.name for one in line.instances if not one.ready_at_start}
    assert all(60.0 <= event.at_s <= 60.0 * len(plans) for event in line.lifecycle)
