"""Measured layer times: strict reading, capacities by hand and by brute force, the fixed pool of helix-64."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from coral_core.catalog import load_catalog, load_models
from coral_core.config.layer_times import load_layer_times, pool_problem
from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import Scenario, load_scenario
from coral_core.domain.model_math import kv_bytes_per_token_per_layer, weight_bytes_per_layer
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import DataGapError, InputError
from coral_core.perf import CapacityAssumptions
from coral_core.perf.layer_times import AS_MEASURED, capacity_table_from_times, pool_capacity, read_layer_times

HEADER = "model,node,phase,x,time_ms_per_layer,x_meaning"
ROWS = (
    "m,l4,prompt,500,10,tokens",
    "m,l4,prompt,2000,30,tokens",
    "m,l4,decode,2,1,requests",
    "m,l4,decode,10,2,requests",
    "other,l4,decode,10,2,requests",
)
SHAPE = load_models(None)["llama-3-70b"]
L4 = load_catalog("paper-core").configs["1xL4"]
LENGTHS = Lengths(mean_input_tokens=700, mean_output_tokens=200, source="test")
SLO = Slo(ttft_s=2.0, tpot_s=0.5)


def table(tmp_path, *rows, header=HEADER):
    file = tmp_path / "times.csv"
    file.write_text("\n".join([header, *(rows or ROWS)]) + "\n")
    return file


def test_times_are_read_between_points_and_hold_below_the_first(tmp_path):
    times = read_layer_times(table(tmp_path), "m")
    found = times.time_s("l4", Phase.PREFILL, np.array([100.0, 500, 1250, 2000]))
    assert found.tolist() == pytest.approx([0.01, 0.01, 0.02, 0.03])
    assert times.largest_batch("l4", Phase.DECODE) == 10
    with pytest.raises(DataGapError, match="no decode times of m on node 't4'"):
        times.largest_batch("t4", Phase.DECODE)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("m,l4,decode,3,1", "cells"),
        ("m,l4,train,3,1,requests", "phase"),
        ("m,l4,decode,0,1,requests", "x is '0'"),
        ("m,l4,decode,nan,1,requests", "x is 'nan'"),
        ("m,l4,decode,three,1,requests", "x is 'three'"),
        ("m,l4,decode,3,-1,requests", "time_ms_per_layer"),
        ("m,l4,decode,3,inf,requests", "time_ms_per_layer"),
        ("m,l4,decode,2.0,1,requests", "two rows"),
        ("other,l4,decode,3,0,requests", "time_ms_per_layer"),
    ],
)
def test_a_fault_is_named_by_file_and_line(tmp_path, row, words):
    with pytest.raises(InputError, match=words) as caught:
        read_layer_times(table(tmp_path, *ROWS, row), "m")
    assert "times.csv:7" in str(caught.value)


def test_other_tables_models_and_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="columns are a,b"):
        read_layer_times(table(tmp_path, header="a,b"), "m")
    with pytest.raises(InputError, match="other"):
        read_layer_times(table(tmp_path), "othr")
    with pytest.raises(InputError, match="cannot be read"):
        read_layer_times(tmp_path / "nowhere.csv", "m")


def capacity(tmp_path, phase, **fields):
    arguments = {
        "times": read_layer_times(table(tmp_path), "m"),
        "nodes": {"1xL4": "l4"},
        "shape": SHAPE,
        "variant": "bf16",
        "phase": phase,
        "slo": SLO,
        "lengths": LENGTHS,
        "configs": (L4,),
        "max_stages": 3,
    }
    return capacity_table_from_times(**{**arguments, **fields})


def expected(phase, s, j, assumptions):
    """By trying every batch at every rate that its limits allow, for j layers in one of s stages."""
    hidden_bytes = SHAPE.hidden * 2 * assumptions.hop_tensors
    nic = L4.nic_bytes_per_s * assumptions.nic_usable_frac
    usable = L4.memory_bytes * assumptions.usable_memory_frac - assumptions.workspace_bytes
    left = usable - j * weight_bytes_per_layer(SHAPE, "bf16")
    kv = kv_bytes_per_token_per_layer(SHAPE, "bf16") * j
    best = 0.0
    for n in range(1, 11):
        tokens = n * 700 if phase is Phase.PREFILL else n
        if tokens > (2000 if phase is Phase.PREFILL else 10):
            break
        curve = ([500, 2000], [0.01, 0.03]) if phase is Phase.PREFILL else ([2, 10], [0.001, 0.002])
        step = j * float(np.interp(tokens, *curve))
        hop = assumptions.hop_latency_s + tokens * hidden_bytes / nic if s > 1 else 0.0
        budget = SLO.ttft_s if phase is Phase.PREFILL else SLO.tpot_s
        if step + hop > budget / s:
            continue
        sent = (hidden_bytes if s > 1 else 0) + 700 * kv / (700 if phase is Phase.PREFILL else 200)
        rate = min(tokens / step, nic / sent)
        if phase is Phase.PREFILL:
            if 2 * n * 700 * kv <= left:
                best = max(best, rate)
            continue
        holds = left / (kv * 800)
        if holds >= n:
            best = max(best, min(rate, holds / (step + hop + budget * (s - 1) / s)))
    return best


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_capacity_is_the_best_batch_within_latency_memory_and_nic(tmp_path, phase):
    assumptions = CapacityAssumptions()
    found = capacity(tmp_path, phase)
    assert found.throughput.shape == (3, 1, 80)
    for s in (1, 2, 3):
        each = [expected(phase, s, j, assumptions) for j in range(1, 81)]
        # fewer layers may always stand in for more
        best = np.maximum.accumulate(each[::-1])[::-1]
        assert found.throughput[s - 1, 0] == pytest.approx(best, rel=1e-9)
        assert 0 < np.count_nonzero(best) < 80
    assert found.sources == (CapacitySource.INTERPOLATED,)
    used = {found.layouts[i] for i in found.layout[found.layout >= 0]}
    assert ((found.layout >= 0) == (found.throughput > 0)).all()
    assert used == {"tp1 pp1 dp1"}


def test_the_layout_inside_a_node_of_several_gpus_stays_unknown(tmp_path):
    found = capacity(tmp_path, Phase.DECODE, configs=(replace(L4, gpu_count=2),))
    assert {found.layouts[i] for i in found.layout[found.layout >= 0]} == {AS_MEASURED}


def test_headroom_scales_the_result_and_the_hash_knows_its_inputs(tmp_path):
    full = capacity(tmp_path, Phase.DECODE)
    frac = {**dict.fromkeys(Phase, 1.0), Phase.DECODE: 0.5}
    half = capacity(tmp_path, Phase.DECODE, assumptions=CapacityAssumptions(max_utilization_frac=frac))
    assert half.throughput == pytest.approx(full.throughput / 2)
    changed = [
        half,
        capacity(tmp_path, Phase.PREFILL),
        capacity(tmp_path, Phase.DECODE, slo=replace(SLO, tpot_s=0.4)),
        capacity(tmp_path, Phase.DECODE, lengths=replace(LENGTHS, mean_input_tokens=701)),
        capacity(tmp_path, Phase.DECODE, configs=(replace(L4, nic_bytes_per_s=1e9),)),
        capacity(tmp_path, Phase.DECODE, max_stages=2),
    ]
    slower = read_layer_times(table(tmp_path, *ROWS[:3], "m,l4,decode,10,2.1,requests"), "m")
    changed.append(capacity(tmp_path, Phase.DECODE, times=slower))
    assert len({full.inputs_hash, *(item.inputs_hash for item in changed)}) == len(changed) + 1
    assert capacity(tmp_path, Phase.DECODE, lengths=replace(LENGTHS, source="else")).inputs_hash == full.inputs_hash


def test_what_the_table_does_not_know_is_a_gap(tmp_path):
    with pytest.raises(DataGapError, match="not of both"):
        capacity(tmp_path, Phase.AGGREGATED)
    with pytest.raises(DataGapError, match="no layer times are named for 1xL4"):
        capacity(tmp_path, Phase.DECODE, nodes={})
    with pytest.raises(DataGapError, match="2000 measured"):
        capacity(tmp_path, Phase.PREFILL, lengths=replace(LENGTHS, mean_input_tokens=2001))
    with pytest.raises(InputError, match="slo"):
        capacity(tmp_path, Phase.DECODE, slo=replace(SLO, tpot_s=math.nan))


def test_pool_capacity_by_hand(tmp_path):
    arguments = {
        "times": read_layer_times(table(tmp_path), "m"),
        "node": "l4",
        "config": L4,
        "max_layers": 16,
        "shape": SHAPE,
        "variant": "bf16",
        "lengths": LENGTHS,
    }
    found = pool_capacity(**arguments)
    usable = L4.memory_bytes * 0.9 - 1.5 * 2**30
    prompt_s = 0.01 + (700 - 500) / 1500 * 0.02
    for k in range(1, 17):
        left = usable - k * weight_bytes_per_layer(SHAPE, "bf16")
        live = math.floor(left / (k * 800 * kv_bytes_per_token_per_layer(SHAPE, "bf16")))
        if live < 1:
            assert found[k - 1] == 0
            continue
        batch = min(max(live * k / 80, 1.0), 10.0)
        token_s = float(np.interp(batch, [2, 10], [0.001, 0.002])) / batch
        assert found[k - 1] == pytest.approx(1 / (k * (prompt_s + 200 * token_s)))
    assert found[15] == 0
    assert (pool_capacity(**arguments, kv_memory_frac=0.1)[:8] <= found[:8]).all()
    with pytest.raises(DataGapError, match="2000 measured"):
        pool_capacity(**{**arguments, "lengths": replace(LENGTHS, mean_input_tokens=2500)})


def test_the_table_of_helix_64_does_not_ship_and_the_error_says_what_to_set(monkeypatch, tmp_path):
    spec = load_scenario("helix-64").capacity.layer_times
    monkeypatch.delenv("CORAL_REFERENCE_DATA", raising=False)
    with pytest.raises(DataGapError, match="set CORAL_REFERENCE_DATA"):
        load_layer_times(spec)
    monkeypatch.setenv("CORAL_REFERENCE_DATA", str(tmp_path))
    with pytest.raises(DataGapError, match=r"there is no .*helix_layer_times\.csv"):
        load_layer_times(spec)
    absolute = spec.model_copy(update={"table": table(tmp_path), "model": "m"})
    monkeypatch.delenv("CORAL_REFERENCE_DATA")
    assert load_layer_times(absolute).model == "m"


@pytest.fixture
def small(tmp_path):
    """helix-64 with two of its node types and a table of our own."""
    file = table(tmp_path)
    data = load_scenario("helix-64").model_dump()
    times = {**data["capacity"]["layer_times"], "table": file, "model": "m"}
    times["nodes"] = {"1xL4": {"node": "l4", "max_layers": 7}}
    data.update(configs=["1xL4", "1xT4"], capacity={"layer_times": times})
    data["availability"] = {"kind": "constant", "nodes": {"us-east-2": {"1xL4": 3}}}
    return data


def resolved(data, **fields):
    return resolve_scenario(Scenario.model_validate({**data, **fields}))


def test_a_pool_has_a_node_for_each_that_the_region_holds(small):
    pool = pool_problem(resolved(small), region="us-east-2")
    assert [node.config for node in pool.nodes] == ["1xL4"] * 3
    assert len(pool.nodes[0].requests_per_s) == 7
    # 1 Gb/s carries 125 MB/s of hidden states, 16,384 bytes for each of a request's 995 tokens
    assert pool.link_requests_per_s[0, 1] == pytest.approx(125e6 / (16_384 * 995))
    spec = small["capacity"]["layer_times"]
    free = resolved(small, capacity={"layer_times": {**spec, "link_gbit_per_s": None}})
    assert np.isinf(pool_problem(free, region="us-east-2").link_requests_per_s).all()


def test_a_scenario_without_a_fixed_pool_has_no_policy_helix(small):
    for fields in ({"availability": {"kind": "ample"}}, {"capacity": {}}):
        with pytest.raises(InputError, match="no fixed pool"):
            scenario_policies(resolved(small, **fields))
    with pytest.raises(InputError, match="no fixed pool"):
        pool_problem(resolved(small), region="us-west-2")
    unnamed = {"kind": "constant", "nodes": {"us-east-2": {"1xT4": 1}}}
    with pytest.raises(InputError, match="no layer times are named for 1xT4"):
        pool_problem(resolved(small, availability=unnamed), region="us-east-2")
    policies = scenario_policies(resolved(small))
    assert tuple(policies) == load_scenario("helix-64").policies
    assert [policy.name for policy in policies.values()] == list(policies)
    assert list(scenario_policies(resolved(small), ["homo"])) == ["homo"]


@pytest.mark.reference
def test_helix_64_has_64_gpus_in_42_nodes_whose_times_are_the_published_ones(reference_data):
    scenario = resolve_scenario(load_scenario("helix-64"))
    pool = pool_problem(scenario, region="us-east-2")
    counts = Counter(node.config for node in pool.nodes)
    gpus = {config.name: config.gpu_count for config in scenario.configs}
    assert (len(pool.nodes), sum(counts[name] * gpus[name] for name in counts)) == (42, 64)
    assert sum(counts[name] * gpus[name] for name in ("1xT4", "2xT4", "4xT4")) == 38
    for node in pool.nodes:
        work = np.array(node.requests_per_s) * np.arange(1, len(node.requests_per_s) + 1)
        assert (np.array(node.requests_per_s) > 0).all()
        assert work.max() < 3 * work.min()
    times = load_layer_times(load_scenario("helix-64").capacity.layer_times)
    published_ms = {"a100": (8, 2.5), "v100": (19, 5.0), "l4": (38, 9.4), "t4": (59, 11.7), "t4x4": (28, 5.5)}
    for name, (prompt_ms, decode_ms) in published_ms.items():
        assert times.time_s(name, Phase.PREFILL, np.array([1000.0]))[0] * 1e3 == pytest.approx(prompt_ms)
        assert times.time_s(name, Phase.DECODE, np.array([100.0]))[0] * 1e3 == pytest.approx(decode_ms)


@pytest.mark.reference
def test_capacities_of_helix_64_fall_with_layers_and_stages_share_the_slo(reference_data):
    scenario = resolve_scenario(load_scenario("helix-64"))
    spec = scenario.scenario.capacity.layer_times
    for phase in (Phase.PREFILL, Phase.DECODE):
        found = capacity_table_from_times(
            times=load_layer_times(spec),
            nodes={name: node.node for name, node in spec.nodes.items()},
            shape=scenario.models[0].shape,
            variant=scenario.models[0].variant,
            phase=phase,
            slo=scenario.models[0].demand.slo,
            lengths=scenario.models[0].demand.lengths,
            configs=scenario.configs,
            max_stages=4,
        )
        assert (np.diff(found.throughput, axis=2) <= 0).all()
        assert (found.throughput[:, :, 0] > 0).all()
