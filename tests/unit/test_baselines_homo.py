from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint, homogeneous
from coral_core.allocation.ilp import solve_allocation
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    AllocationStatus,
    DemandRow,
    Running,
    TemplateColumns,
)
from coral_core.domain.workload import Phase

D, P = Phase.DECODE, Phase.PREFILL


def problem(templates, available, price, demand, **fields):
    """`templates`: id -> (model, phase, nodes, throughput)."""
    values = list(templates.values())
    return AllocationProblem(
        regions=tuple(f"r{i}" for i in range(len(available))),
        configs=tuple(f"c{i}" for i in range(len(available[0]))),
        available=np.array(available),
        price_usd_per_h=np.array(price, dtype=float),
        templates=TemplateColumns(
            ids=tuple(templates),
            models=tuple(v[0] for v in values),
            phases=tuple(v[1] for v in values),
            nodes=np.array([v[2] for v in values]),
            throughput=np.array([v[3] for v in values], dtype=float),
        ),
        demand=demand,
        **fields,
    )


def held(result):
    return {(i.template, i.region): i.count for i in result.instances}


MIXED = problem(
    {"mix": ("m", D, [1, 1], 40.0), "a": ("m", D, [2, 0], 20.0), "b": ("m", D, [0, 1], 12.0)},
    [[4, 9], [2, 9]],
    [[1.0, 1.5], [0.9, 1.6]],
    (DemandRow(model="m", phase=D, tokens_per_s=50.0),),
)


def test_only_templates_of_one_configuration():
    assert homogeneous(MIXED).templates.ids == ("a", "b")
    assert held(solve_allocation(MIXED)) == {("mix", "r0"): 1, ("b", "r0"): 1}
    for baseline in (homo, homo_joint):
        assert all(i.template != "mix" for i in baseline(MIXED).instances)


def test_the_cheapest_region_first_then_the_next():
    # a: 0.09 USD/h per token/s in r1 (one fits), 0.1 in r0; the last 10 tokens/s are worth a b at 0.15, not an a at 0.2
    result = homo(MIXED)
    assert held(result) == {("a", "r1"): 1, ("a", "r0"): 1, ("b", "r0"): 1}
    assert (result.method, result.status, result.bound_usd_per_h) == ("homo", AllocationStatus.GAP, 0.0)
    assert result.cost_usd_per_h == pytest.approx(1.8 + 2.0 + 1.5)


def test_greed_is_not_joint():
    # greedy gives the scarce node to the first model, which had an alternative
    given = problem(
        {"m-a": ("m", D, [1, 0], 10.0), "m-b": ("m", D, [0, 1], 10.0), "n-a": ("n", D, [1, 0], 10.0)},
        [[1, 1]],
        [[1.0, 1.1]],
        tuple(DemandRow(model=m, phase=D, tokens_per_s=10.0) for m in ("m", "n")),
    )
    assert [x.frac for x in homo(given).shortfall] == [0.0, 1.0]
    joint = homo_joint(given)
    assert [x.frac for x in joint.shortfall] == [0.0, 0.0]
    assert (joint.method, joint.status) == ("homo_joint", AllocationStatus.OPTIMAL)


def test_what_runs_is_preferred_by_its_churn():
    given = replace(MIXED, running=(Running(template="b", region="r0", count=2),), churn_k=1.0)
    assert held(homo(given))["b", "r0"] >= 2


def test_floors_and_caps():
    row = replace(MIXED.demand[0], max_instances=2)
    capped = homo(replace(MIXED, demand=(row,)))
    assert sum(held(capped).values()) == 2
    assert capped.shortfall[0].frac == pytest.approx(0.2)
    floor = homo(replace(MIXED, demand=(replace(row, tokens_per_s=0.0, min_instances=2),)))
    assert held(floor) == {("b", "r0"): 2}
    nothing = replace(MIXED, available=np.zeros((2, 2), dtype=np.int64), demand=(replace(row, min_instances=2),))
    assert homo(nothing).floor_deficit == {0: 2}


def test_phases_that_share_a_region_share_its_nodes():
    given = problem(
        {"p": ("m", P, [1], 10.0), "d": ("m", D, [1], 10.0)},
        [[6], [2]],
        [[2.0], [1.0]],
        tuple(DemandRow(model="m", phase=phase, tokens_per_s=40.0) for phase in (P, D)),
        options=AllocationOptions(pd_same_region=True),
    )
    # r1 is cheaper and serves a quarter; r0 three quarters
    assert held(homo(given)) == {("p", "r1"): 1, ("d", "r1"): 1, ("p", "r0"): 3, ("d", "r0"): 3}
    scarce = homo(replace(given, available=np.array([[4], [1]])))
    assert [x.frac for x in scarce.shortfall] == [pytest.approx(0.5), pytest.approx(0.5)]
    assert held(scarce) == {("p", "r0"): 2, ("d", "r0"): 2}
    full = homo(replace(given, available=np.array([[0], [9]])))
    assert held(full) == {("p", "r1"): 4, ("d", "r1"): 4}
