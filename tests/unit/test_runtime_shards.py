"""Placements made for a runtime: it runs every one of them, and none that it runs is better."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from artifacts.library import open_library
from artifacts.store import open_store
from artifacts.templates import row_to_template
from coral_core.catalog.hardware import load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.launch import Runtime
from coral_core.domain.templates import template_id
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.engine.runnable import ModelFacts, runs_on
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.budgets import budget_table
from coral_core.perf.capacity import capacity_table
from coral_core.perf.search import ANY_LAYOUT, Layout, LayoutLimits
from tasks.executor import InlineExecutor
from tasks.library import BuildSpec, ModelBuild, build_library, plan_shards
from tasks.runtimes import made_for_runtimes, scope_of

CONFIGS = load_catalog("paper-extended").configs
CHOSEN = tuple(CONFIGS[name] for name in ("1xL4", "2xL4", "2xL40S", "4xL40S"))
DENSE = replace(package_models()["phi-4"], layers=12)
EXPERTS = replace(package_models()["gpt-oss-20b"], layers=8, sliding_window=None)
LENGTHS = Lengths(mean_input_tokens=800.0, mean_output_tokens=200.0, source="test")
SLO = Slo(ttft_s=1.5, tpot_s=0.06)


def spec(**changes):
    models = tuple(
        ModelBuild(shape=shape, variant=variant, phases=tuple(Phase), slo=SLO, lengths=LENGTHS)
        for shape, variant in ((DENSE, "bf16"), (EXPERTS, "mxfp4"))
    )
    given = {"library": "l", "configs": CHOSEN, "models": models, "n_max": 2, "rho": 1000.0, "keep_all": True}
    return BuildSpec(**{**given, "runtimes": tuple(Runtime), **changes})


@pytest.fixture(scope="module")
def rows():
    store = open_store("memory://runtime-shards")
    manifest = build_library(spec(), store, InlineExecutor())
    return open_library(store, "l", manifest.version).read()


@pytest.fixture(scope="module")
def scope(rows):
    return scope_of(rows, {shape.name: ModelFacts.of(shape) for shape in (DENSE, EXPERTS)}, None)


def test_a_runtime_runs_what_was_made_for_it(rows, scope):
    made = rows["method"].to_pylist()
    for runtime in Runtime:
        mine = np.array([method.startswith(runtime.value) for method in made])
        assert mine.sum() > 5
        assert runs_on(scope.found, runtime)[mine].all()
    assert made_for_runtimes(rows).to_pylist() == [method != "lattice-free" for method in made]
    assert len(set(rows["template_id"].to_pylist())) == rows.num_rows


def test_ids_say_what_a_template_was_made_for(rows):
    for row in rows.to_pylist():
        one = row_to_template(row)
        made_for = "" if one.method == "lattice-free" else one.method
        assert one.template_id == template_id(
            model=one.model,
            variant=one.variant,
            phase=one.phase,
            slo=one.slo,
            placement=one.placement,
            made_for=made_for,
        )


def per_layout(shape, variant, phase, config):
    """T^ of every layout that the node can have, (S, L) each."""
    n = config.gpu_count
    found = {}
    for tp, pp in itertools.product(range(1, n + 1), repeat=2):
        if n % (tp * pp) == 0:
            dp = n // tp // pp
            limits = LayoutLimits(tp=tp, max_pp=pp, max_dp=dp)
            table = capacity_table(
                shape=shape,
                variant=variant,
                phase=phase,
                slo=SLO,
                lengths=LENGTHS,
                configs=[config],
                max_stages=2,
                limits=limits,
            )
            assert not table.throughput.any() or table.layouts == (str(Layout(tp=tp, pp=pp, dp=dp)),)
            found[tp, pp, dp] = table.throughput[:, 0]
    return found


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(("shape", "variant"), [(DENSE, "bf16"), (EXPERTS, "mxfp4")])
def test_no_layout_that_vllm_runs_is_better(rows, scope, shape, variant, phase):
    tables = {config.name: per_layout(shape, variant, phase, config) for config in CHOSEN}
    replicas = 1 if shape.moe else 64
    expected = {}
    for config in CHOSEN:
        alone = [
            table[0, -1]
            for (_, pp, dp), table in tables[config.name].items()
            if dp <= replicas and (pp == 1 or phase is Phase.AGGREGATED)
        ]
        expected[config.name,] = max(alone)
    if phase is Phase.AGGREGATED:
        for one, other in itertools.combinations_with_replacement(sorted(tables), 2):
            both = [key for key in tables[one] if key in tables[other] and key[2] == 1]
            same = CONFIGS[one].gpu_count == CONFIGS[other].gpu_count
            chains = [
                min(tables[one][key][1, j - 1], tables[other][key][1, shape.layers - j - 1])
                for key in both
                for j in range(key[1], shape.layers - key[1] + 1)
            ]
            expected[one, other] = max(chains, default=0.0) if same else 0.0
    found = dict.fromkeys(expected, 0.0)
    for row, runs in zip(rows.to_pylist(), runs_on(scope.found, Runtime.VLLM), strict=True):
        if runs and (row["model"], row["phase"]) == (shape.name, phase.value):
            nodes = tuple(sorted(node for stage in row["stage_nodes"] for node in stage))
            given = row["throughput_requests_per_s"] or row["throughput_tokens_per_s"]
            if row["method"] != "lattice-free":  # free shares of the SLO may do better where they happen to be runnable
                found[nodes] = max(found[nodes], given)
    assert found == pytest.approx(expected, rel=1e-9)


def test_without_runtimes_a_library_is_what_it_was():
    plain = plan_shards(spec(runtimes=()))
    assert [shard.key for shard in plain] == [shard.key for shard in plan_shards(spec())[: len(plain)]]
    assert {shard.made_for for shard in plain} == {""}


def test_a_node_without_a_layout_that_counts_has_no_capacity():
    question = {
        "shape": DENSE,
        "variant": "bf16",
        "phase": Phase.DECODE,
        "slo": SLO,
        "lengths": LENGTHS,
        "configs": CHOSEN,
    }
    limits = LayoutLimits(tp=2)
    table = capacity_table(max_stages=2, limits=limits, **question)
    assert not table.throughput[:, 0].any()
    assert table.throughput[0, 1:].any(axis=1).all()
    budgets = budget_table(limits=limits, grid=6, **question)
    assert not budgets.throughput[:, 0].any()
    assert (budgets.layout[:, 0] == -1).all()
    assert table.inputs_hash != capacity_table(max_stages=2, **question).inputs_hash
    assert (
        capacity_table(max_stages=2, limits=ANY_LAYOUT, **question).inputs_hash
        == capacity_table(max_stages=2, assumptions=CapacityAssumptions(), **question).inputs_hash
    )
