"""Shares of unlike nodes: what each gives alone at the stage's layers and time, so that together they give the template's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from artifacts.library import open_library
from artifacts.store import open_store
from artifacts.templates import row_to_template
from coral_core.catalog.hardware import load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.launch import Runtime
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import DataGapError
from tasks.executor import InlineExecutor
from tasks.library import BuildSpec, ModelBuild, build_library
from tasks.node_throughputs import node_throughputs
from tests.fakes.launch_cases import template

CATALOG = load_catalog("paper-extended").configs
MODEL = ModelBuild(
    shape=replace(package_models()["phi-4"], layers=10),
    variant="bf16",
    phases=(Phase.DECODE,),
    slo=Slo(ttft_s=1.5, tpot_s=0.06),
    lengths=Lengths(mean_input_tokens=800.0, mean_output_tokens=200.0, source="test"),
)


def spec(method):
    return BuildSpec(
        library=method,
        configs=tuple(CATALOG[name] for name in ("1xL4", "2xL40S", "1xA10G")),
        models=(MODEL,),
        n_max=3,
        rho=1000.0,
        method=method,
        keep_all=True,
        runtimes=(Runtime.CORAL,),
    )


@pytest.mark.parametrize("method", ["lattice", "lattice-free"])
def test_the_slowest_stages_shares_add_up_to_the_templates_throughput(method):
    store = open_store(f"memory://shares-{method}")
    manifest = build_library(spec(method), store, InlineExecutor())
    made = open_library(store, method, manifest.version).read(methods=["coral"])
    unlike = alike = 0
    for row in made.to_pylist():
        one = row_to_template(row)
        shares = node_throughputs(one, spec(method), MODEL)
        if shares is None:
            assert all(len(stage.nodes) == 1 for stage in one.placement.stages)
            continue
        unlike += any(len(set(stage.nodes)) > 1 for stage in one.placement.stages)
        alike += all(len(set(stage.nodes)) == 1 for stage in one.placement.stages)
        each = iter(shares)
        sums = [sum(next(each) for _ in stage.nodes) for stage in one.placement.stages]
        assert min(sums) == pytest.approx(one.throughput, rel=1e-9)
    assert unlike > 3
    assert alike > 3


def test_a_node_without_capacity_is_not_given_a_share():
    one = replace(template(Phase.DECODE, [(10, ["1xL4", "2xL40S"])]), model="phi-4")
    tight = replace(MODEL, slo=Slo(ttft_s=1.5, tpot_s=1e-6))
    with pytest.raises(DataGapError, match="no capacity"):
        node_throughputs(one, spec("lattice"), tight)
    twins = replace(one, placement=template(Phase.DECODE, [(10, ["1xL4", "1xL4"])]).placement)
    assert node_throughputs(twins, spec("lattice"), tight) is None, "alike nodes can share without"
    with pytest.raises(DataGapError, match="has no 4xL4"):
        node_throughputs(
            replace(one, placement=template(Phase.DECODE, [(10, ["1xL4", "4xL4"])]).placement), spec("lattice"), MODEL
        )
