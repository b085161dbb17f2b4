"""Supply per epoch: constant, traces, seeded random walks; nothing where nothing is sold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.catalog import load_catalog
from coral_core.config.availability import supply
from coral_core.config.resolve import allocation_problem, available_nodes, resolve_scenario
from coral_core.config.scenario import (
    Ample,
    AvailabilityTrace,
    Constant,
    EpochsSpec,
    RandomWalk,
    Scenario,
    load_scenario,
)
from coral_core.domain.allocation import TemplateColumns
from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError, InputError
from coral_core.units import GIB

CATALOG = load_catalog("paper-core")
CONFIGS = tuple(CATALOG.configs[name] for name in ("1xL4", "1xL40S", "4xL4"))
MEMORY = np.array([config.memory_bytes for config in CONFIGS])
REGIONS = ("r0", "r1")
SOLD = np.array([[True, True, True], [True, False, True]])


def nodes(spec, *, count=1, duration_s=60.0, sold=SOLD, ample_bytes=None):
    def memory():
        assert ample_bytes is not None, "asked for an ample plan that is not needed"
        return ample_bytes

    return supply(
        spec,
        regions=REGIONS,
        configs=CONFIGS,
        sold=sold,
        epochs=EpochsSpec(count=count, duration_s=duration_s),
        ample_memory_bytes=memory,
    )


def walk(**fields):
    return RandomWalk(kind="random_walk", **{"seed": 3, **fields})


def test_ample_and_constant_supply_are_the_same_in_every_epoch_and_none_where_not_sold():
    assert nodes(Ample(nodes=7), count=2).tolist() == [[[7, 7, 7], [7, 0, 7]]] * 2
    constant = Constant(kind="constant", nodes={"r1": {"1xL4": 2, "1xL40S": 9}})
    assert nodes(constant, count=2).tolist() == [[[0, 0, 0], [2, 0, 0]]] * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [({"r9": {"1xL4": 1}}, r"availability\.nodes\.r9"), ({"r0": {"2xL4": 1}}, r"nodes\.r0\.2xL4")],
)
def test_unknown_names_of_a_constant_supply_are_refused(given, words):
    with pytest.raises(InputError, match=words):
        nodes(Constant(kind="constant", nodes=given))


def trace(tmp_path, *lines):
    file = tmp_path / "supply.csv"
    file.write_text("\n".join(["start_s,region,config,nodes", *lines]) + "\n")
    return AvailabilityTrace(kind="trace", file=file)


def test_a_trace_holds_from_its_row_until_the_next_and_is_zero_before(tmp_path):
    spec = trace(tmp_path, "120,r0,1xL4,5", "60,r0,1xL4,3", "0,r1,4xL4,1", "61,r1,4xL4,0", "0,r1,1xL40S,8")
    found = nodes(spec, count=4)
    assert found[:, 0, 0].tolist() == [0, 3, 5, 5]
    assert found[:, 1, 2].tolist() == [1, 1, 0, 0]
    assert found[:, 1, 1].tolist() == [0] * 4  # not sold


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-1,r0,1xL4,1", "start_s"),
        ("nan,r0,1xL4,1", "start_s"),
        ("soon,r0,1xL4,1", "start_s"),
        ("0,r9,1xL4,1", "region"),
        ("0,r0,9xL4,1", "config"),
        ("0,r0,1xL4,-1", "nodes"),
        ("0,r0,1xL4,1.5", "nodes"),
        ("0,r0,1xL4,99999999", "at most"),
        ("0,r0,1xL4", "cells"),
    ],
)
def test_a_fault_in_a_trace_is_named_by_file_and_line(tmp_path, line, words):
    with pytest.raises(InputError, match=words) as caught:
        nodes(trace(tmp_path, "5,r0,1xL4,1", line))
    assert "supply.csv:3" in str(caught.value)


def test_two_rows_for_one_second_are_refused(tmp_path):
    with pytest.raises(InputError, match="two rows at 5 s"):
        nodes(trace(tmp_path, "5,r0,1xL4,1", "5.0,r0,1xL4,2"))


def test_a_missing_trace_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.csv"):
        nodes(AvailabilityTrace(kind="trace", file=tmp_path / "nowhere.csv"))


@given(
    seed=st.integers(0, 2**32),
    step=st.floats(0, 2),
    reversion=st.floats(0, 1),
    gib=st.floats(100, 1e5),
    count=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_a_walk_never_exceeds_its_size_in_the_mean_and_comes_within_a_node_of_it(seed, step, reversion, gib, count):
    found = nodes(walk(seed=seed, step_log=step, reversion_frac=reversion, memory_gib=gib), count=count)
    assert found.shape == (count, 2, 3)
    assert (found >= 0).all()
    assert not found[:, 1, 1].any()
    held = (found @ MEMORY).sum(axis=1)
    assert held.mean() <= gib * GIB * (1 + 1e-9)
    # what is left over in an epoch is less than the largest node for every pair that got none of it
    assert held.mean() >= gib * GIB - MEMORY.max() * 2


def test_the_same_seed_gives_the_same_supply_and_another_seed_another():
    first = nodes(walk(memory_gib=5000), count=5)
    assert (first == nodes(walk(memory_gib=5000), count=5)).all()
    assert (first != nodes(walk(seed=4, memory_gib=5000), count=5)).any()


def test_without_steps_memory_is_shared_by_weight():
    # five pairs are sold; eight times the memory of one L4 for each of them
    gib = 5 * 8 * CONFIGS[0].memory_bytes / GIB
    found = nodes(walk(step_log=0, memory_gib=gib), count=2)
    assert found.tolist() == [[[8, 4, 2], [8, 0, 2]]] * 2
    doubled = nodes(walk(step_log=0, memory_gib=1e5, gpu_weights={"L40S": 2}))
    memory = doubled[0] * MEMORY
    assert memory[0, 1] == pytest.approx(2 * memory[0, 0], rel=0.01)
    with pytest.raises(InputError, match="gpu_weights"):
        nodes(walk(memory_gib=1, gpu_weights={"H100": 2}))


def test_a_size_relative_to_an_ample_plan_is_that_multiple():
    relative = nodes(walk(memory_frac_of_ample=1.25), ample_bytes=4000 * GIB)
    assert (relative == nodes(walk(memory_gib=5000))).all()


@pytest.mark.parametrize("fields", [{}, {"memory_gib": 1.0, "memory_frac_of_ample": 1.0}])
def test_exactly_one_size_is_due(fields):
    with pytest.raises(ValueError, match="either memory_gib or"):
        walk(**fields)


@dataclass(frozen=True)
class Small:
    """A scenario of one model on one L4 node, and templates for it."""

    scenario: Scenario
    templates: TemplateColumns


@pytest.fixture
def small():
    data = load_scenario("tiny").model_dump()
    data.update(configs=["1xL4"], models=data["models"][:1], regions=["us-east-2"])
    templates = TemplateColumns(
        ids=("p", "d"),
        models=("phi-4",) * 2,
        phases=(Phase.PREFILL, Phase.DECODE),
        nodes=np.array([[2], [1]]),
        throughput=np.array([6000.0, 1100.0]),
    )
    return Small(scenario=Scenario.model_validate(data), templates=templates)


def resolved(small, **fields):
    return resolve_scenario(Scenario.model_validate({**small.scenario.model_dump(), **fields}))


def test_scarcity_is_scaled_to_what_the_ample_plan_holds(small):
    # ample: two prefill instances (11,547 of 12,000 tokens/s) and two decode instances (2,111 of 2,200): six nodes
    scarce = resolved(
        small, availability={"kind": "random_walk", "seed": 1, "memory_frac_of_ample": 0.5}, epochs={"count": 3}
    )
    found = available_nodes(scarce, small.templates)
    assert found.shape == (3, 1, 1)
    assert 2 <= found.mean() <= 3
    problem = allocation_problem(scarce, small.templates)
    assert problem.available.tolist() == found[0].tolist()


def test_a_supply_of_nothing_is_a_shortfall_not_an_error(small):
    empty = resolved(small, availability={"kind": "constant", "nodes": {}})
    assert allocation_problem(empty, small.templates).available.tolist() == [[0]]


def test_what_is_sold_nowhere_is_a_data_gap(small):
    own = {
        "gpu": "T4",
        "gpu_count": 1,
        "nic_gbit_per_s": 5,
        "price_usd_per_h": {"elsewhere": 1.0},
        "source": "test",
        "as_of": "2026-01-01",
    }
    unsold = resolved(small, configs=["mine"], own_configs={"mine": own})
    with pytest.raises(DataGapError, match="none of the configurations is sold"):
        allocation_problem(unsold, small.templates)


def test_an_own_configuration_is_one_of_the_scenario_and_priced(small):
    own = {
        "gpu": "T4",
        "gpu_count": 4,
        "nic_gbit_per_s": 10,
        "price_usd_per_h": {"us-east-2": 2.5},
        "source": "test",
        "as_of": "2026-01-01",
    }
    found = resolved(small, configs=["mine"], own_configs={"mine": own})
    assert found.configs[0].gpu_count == 4
    assert found.configs[0].nic_bytes_per_s == 1.25e9
    assert allocation_problem(found, small.templates).price_usd_per_h.tolist() == [[2.5]]
    with pytest.raises(InputError, match="already"):
        resolved(small, own_configs={"1xL4": own})
    with pytest.raises(InputError, match=r"own_configs\.mine\.gpu"):
        resolved(small, own_configs={"mine": {**own, "gpu": "T5"}})
