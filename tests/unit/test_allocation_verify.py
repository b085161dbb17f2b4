from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.verify import PlanViolationError, verify_allocation
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    AllocationStatus,
    DemandRow,
    InstanceCount,
    Running,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, SolverError

PROBLEM = AllocationProblem(
    regions=("r0", "r1"),
    configs=("c0", "c1"),
    available=np.array([[6, 2], [3, 0]]),
    price_usd_per_h=np.array([[1.0, 2.0], [1.5, math.nan]]),
    templates=TemplateColumns(
        ids=("p", "d", "g"),
        models=("m", "m", "n"),
        phases=(Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED),
        nodes=np.array([[1, 0], [2, 0], [0, 1]]),
        throughput=np.array([50.0, 100.0, 3.0]),
    ),
    demand=(
        DemandRow(model="m", phase=Phase.PREFILL, tokens_per_s=100.0, requests_per_s=1.0),
        DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=300.0, requests_per_s=1.0, max_instances=3),
        DemandRow(model="n", phase=Phase.AGGREGATED, tokens_per_s=None, requests_per_s=12.0, min_instances=1),
    ),
    running=(Running(template="p", region="r0", count=1),),
    churn_k=0.5,
    options=AllocationOptions(pd_same_region=True),
)
PLAN = solve_allocation(PROBLEM)


def instances(**counts):
    return tuple(InstanceCount(template=k[0], region=k[1:], count=n) for k, n in counts.items())


def test_the_plan_itself_holds():
    verify_allocation(PROBLEM, PLAN)
    # r0 serves two thirds of m (4 nodes decode, 2 prefill); r1 has 3 nodes: one decode, one prefill: the last third
    held = {(i.template, i.region): i.count for i in PLAN.instances}
    assert held == {("p", "r0"): 2, ("d", "r0"): 2, ("p", "r1"): 1, ("d", "r1"): 1, ("g", "r0"): 2}
    assert [x.frac for x in PLAN.shortfall] == [0.0, 0.0, 0.5]
    assert PLAN.cost_usd_per_h == pytest.approx(2 + 4 + 1.5 + 3 + 4)
    assert PLAN.churn_usd_per_h == pytest.approx(0.5 * (1 + 4 + 1.5 + 3 + 4))


def changed(**fields):
    return replace(PLAN, **fields)


def with_shortfall(index, **fields):
    rows = list(PLAN.shortfall)
    rows[index] = replace(rows[index], **fields)
    return changed(shortfall=tuple(rows))


@pytest.mark.parametrize(
    ("result", "place"),
    [
        (changed(instances=instances(xr0=1)), "instances[0]"),
        (changed(instances=instances(pr7=1)), "instances[0]"),
        (changed(instances=instances(pr0=0)), "instances[0]"),
        (changed(instances=instances(pr0=1) * 2), "instances[1]"),
        (changed(instances=instances(pr0=7)), "regions.r0.c0"),
        (changed(instances=instances(gr1=1)), "regions.r1.c1"),
        (changed(instances=instances(dr0=3, dr1=1)), "demand[1]: 4 instances"),
        (changed(instances=instances(pr0=2, dr0=2, pr1=1, dr1=1)), "floor_deficit[2]"),
        (changed(floor_deficit={2: 1}), "floor_deficit[2]"),
        (changed(floor_deficit={9: 1}), "floor_deficit[9]"),
        (changed(shortfall=PLAN.shortfall[:2]), "shortfall"),
        (changed(shortfall=PLAN.shortfall[::-1]), "shortfall[0]"),
        (with_shortfall(2, frac=0.0), "shortfall[2]"),
        (with_shortfall(0, frac=math.nan), "shortfall[0]"),
        (with_shortfall(2, requests_per_s=1.0), "shortfall[2]"),
        (with_shortfall(2, tokens_per_s=1.0), "shortfall[2]"),
        (changed(cost_usd_per_h=PLAN.cost_usd_per_h - 0.01), "cost_usd_per_h"),
        (changed(churn_usd_per_h=0.0), "churn_usd_per_h"),
        (changed(bound_usd_per_h=PLAN.objective_usd_per_h * 1.01), "bound_usd_per_h"),
        (changed(bound_usd_per_h=-1.0), "bound_usd_per_h"),
        (changed(bound_usd_per_h=math.nan), "bound_usd_per_h"),
        (changed(bound_usd_per_h=0.0), "status"),
    ],
)
def test_every_violation_is_found(result, place):
    with pytest.raises(PlanViolationError) as caught:
        verify_allocation(PROBLEM, result)
    assert str(caught.value).startswith(place)
    assert isinstance(caught.value, SolverError)


def test_prefill_and_decode_in_different_regions_serve_nobody():
    apart = replace(PLAN, instances=instances(pr1=2, dr0=3, gr0=2), status=AllocationStatus.GAP, bound_usd_per_h=0.0)
    with pytest.raises(PlanViolationError, match=r"shortfall\[0\].*1.0 found"):
        verify_allocation(PROBLEM, apart)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"regions": ("r0", "r0")}, "regions[1]"),
        ({"configs": ("c0", "c0")}, "configs[1]"),
        ({"available": np.zeros((1, 2), dtype=np.int64)}, "available"),
        ({"available": np.array([[6, 2], [3, 1]])}, "regions.r1.c1.price_usd_per_h"),
        ({"available": np.array([[6, 2], [-3, 0]])}, "regions.r1.c0.available"),
        ({"price_usd_per_h": np.array([[1.0, math.inf], [1.5, math.nan]])}, "regions.r0.c1.price_usd_per_h"),
        ({"templates": replace(PROBLEM.templates, throughput=np.array([1.0, math.nan, 1.0]))}, "templates[1].throughput"),
        ({"templates": replace(PROBLEM.templates, throughput=np.array([1.0]))}, "templates"),
        ({"templates": replace(PROBLEM.templates, nodes=-PROBLEM.templates.nodes)}, "templates[0].nodes"),
        ({"templates": replace(PROBLEM.templates, ids=("p", "d", "p"))}, "templates[2]"),
        ({"churn_k": math.nan}, "churn_k"),
        ({"options": AllocationOptions(time_limit_s=math.nan)}, "options.time_limit_s"),
        ({"options": AllocationOptions(gap_frac=-1.0)}, "options.gap_frac"),
        ({"options": AllocationOptions(solver="best")}, "options.solver"),
    ],
)  # fmt: skip
def test_a_problem_without_a_clear_meaning_is_refused(fields, place):
    with pytest.raises(InputError) as caught:
        solve_allocation(replace(PROBLEM, **fields))
    assert str(caught.value).startswith(place)
