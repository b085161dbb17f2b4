from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_core.allocation.explain import explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.why_not import why_not
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    InstanceCount,
    Running,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, SolverError
from coral_core.solver.program import SolveResult, SolveStatus


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


D = Phase.DECODE
# 10 tokens/s for 1 USD/h on c0, for 3 USD/h on c1; c0 is scarce
SCARCE = problem(
    {
        "cheap": ("m", D, [1, 0], 10.0),
        "dear": ("m", D, [0, 1], 10.0),
        "waste": ("m", D, [1, 1], 9.0),
        "giant": ("m", D, [9, 0], 95.0),
        "idle": ("x", D, [1, 0], 10.0),
    },
    [[3, 9]],
    [[1.0, 3.0]],
    (DemandRow(model="m", phase=D, tokens_per_s=50.0),),
)


def test_scarcity_has_its_price():
    result = solve_allocation(SCARCE)
    explanation = explain_allocation(SCARCE, result)
    limits = {x.name: x for x in explanation.limits}
    scarce, ample = limits["r0", "c0"], limits["r0", "c1"]
    # one more node of c0 would replace one of c1
    assert (scarce.used, scarce.limit, scarce.binding) == (3, 3, True)
    assert scarce.shadow_usd_per_h == pytest.approx(2.0)
    assert (ample.used, ample.binding, ample.shadow_usd_per_h) == (2, False, 0.0)
    assert explanation.binding == (scarce,)
    (marginal,) = explanation.marginal
    assert marginal.usd_per_h_per_unit == pytest.approx(0.3)  # the next token/s comes from c1
    assert marginal.unit == "token/s"
    assert explanation.relaxed_objective_usd_per_h == pytest.approx(9.0)


def test_what_a_node_and_a_token_are_worth_matches_solving_again():
    base = explain_allocation(SCARCE, solve_allocation(SCARCE))
    more = replace(SCARCE, available=np.array([[4, 9]]))
    worth = (
        base.relaxed_objective_usd_per_h - explain_allocation(more, solve_allocation(more)).relaxed_objective_usd_per_h
    )
    assert worth == pytest.approx(base.binding[0].shadow_usd_per_h)
    up = replace(SCARCE, demand=(replace(SCARCE.demand[0], tokens_per_s=51.0),))
    step = explain_allocation(up, solve_allocation(up)).relaxed_objective_usd_per_h - base.relaxed_objective_usd_per_h
    assert step == pytest.approx(base.marginal[0].usd_per_h_per_unit, abs=1e-6)


def test_floors_and_caps_have_prices():
    capped = replace(SCARCE, demand=(replace(SCARCE.demand[0], tokens_per_s=20.0, min_instances=3, max_instances=4),))
    explanation = explain_allocation(capped, solve_allocation(capped))
    floor, cap = (next(x for x in explanation.limits if x.family == f) for f in ("floor", "cap"))
    assert (floor.name, floor.used, floor.limit, floor.binding) == (("m", "decode"), 3, 3, True)
    assert floor.shadow_usd_per_h == pytest.approx(1.0)
    assert (cap.used, cap.limit, cap.binding) == (3, 4, False)


def test_a_shortage_is_marked():
    short = replace(SCARCE, available=np.array([[3, 0]]))
    explanation = explain_allocation(short, solve_allocation(short))
    assert explanation.marginal[0].missing_frac == pytest.approx(0.4)
    assert explanation.binding[0].name == ("r0", "c0")


def test_why_not_each_template():
    result = solve_allocation(SCARCE)
    facts = {t: why_not(SCARCE, result, t) for t in SCARCE.templates.ids}
    assert facts["cheap"].chosen_count == {"r0": 3}
    assert facts["cheap"].reasons == ("it is in the plan: 3 in r0",)
    assert facts["dear"].chosen_count == {"r0": 2}
    assert facts["dear"].cheaper_chosen == "cheap"
    assert facts["dear"].usd_per_h_per_unit == pytest.approx(0.3)
    assert facts["dear"].cheaper_usd_per_h_per_unit == pytest.approx(0.1)
    waste = facts["waste"]  # dropped in reduction, yet explained
    assert result.statistics["columns_undominated"] < result.statistics["columns_available"]
    assert waste.dominated_by == "cheap"
    # 1 + 3 to rent, 2 for the scarce node, less 9 tokens/s at 0.3
    assert waste.reduced_cost_usd_per_h == {"r0": pytest.approx(4 + 2 - 2.7)}
    assert any("would add 3.3 USD/h" in reason for reason in waste.reasons)
    giant = facts["giant"]
    assert giant.unavailable == {"r0": ("c0",)}
    assert giant.reduced_cost_usd_per_h == {}
    assert giant.usd_per_h_per_unit is None
    assert any("too few c0" in reason for reason in giant.reasons)
    assert facts["idle"].reasons == ("no demand row asks for its model and phase",)


def test_why_not_where_only_whole_numbers_decide():
    # 100 tokens/s at 0.1 USD/h each, or 30 at 0.13: at a demand of 40, two small ones cost 8 and the large one 10
    lumpy = problem(
        {"large": ("m", D, [10], 100.0), "small": ("m", D, [4], 30.0)},
        [[40]],
        [[1.0]],
        (DemandRow(model="m", phase=D, tokens_per_s=40.0),),
    )
    facts = why_not(lumpy, solve_allocation(lumpy), "large")
    assert facts.reduced_cost_usd_per_h == {"r0": pytest.approx(0.0)}
    assert facts.reasons == ("in r0 prices do not speak against it: whole instances of others fit the demand better",)


def test_running_ones_are_priced_without_churn():
    given = replace(SCARCE, running=(Running(template="waste", region="r0", count=1),), churn_k=0.5)
    result = solve_allocation(given)
    assert all(i.template != "waste" for i in result.instances)
    new = why_not(replace(given, running=()), result, "waste").reduced_cost_usd_per_h["r0"]
    assert why_not(given, result, "waste").reduced_cost_usd_per_h["r0"] == pytest.approx(new - 0.5 * 4.0)


def test_same_region_prices():
    given = problem(
        {"p": ("m", Phase.PREFILL, [1], 10.0), "d": ("m", D, [1], 5.0), "a": ("m", Phase.AGGREGATED, [4], 1.0)},
        [[9], [9]],
        [[1.0], [2.0]],
        (
            DemandRow(model="m", phase=Phase.PREFILL, tokens_per_s=20.0, requests_per_s=2.0),
            DemandRow(model="m", phase=D, tokens_per_s=20.0, requests_per_s=2.0),
        ),
        options=AllocationOptions(pd_same_region=True),
    )
    explanation = explain_allocation(given, solve_allocation(given))
    assert [x.usd_per_h_per_unit for x in explanation.marginal] == [pytest.approx(0.1), pytest.approx(0.2)]
    nowhere = replace(given, available=np.array([[1], [0]]))
    marginal = explain_allocation(nowhere, solve_allocation(nowhere)).marginal
    assert [x.missing_frac for x in marginal] == [1.0, 1.0]
    assert all(math.isfinite(x.usd_per_h_per_unit) for x in marginal)


def test_a_demand_of_nothing_has_no_marginal_cost():
    given = replace(SCARCE, demand=(replace(SCARCE.demand[0], tokens_per_s=0.0),))
    assert explain_allocation(given, solve_allocation(given)).marginal[0].usd_per_h_per_unit == 0.0


def test_what_cannot_be_explained_says_so():
    result = solve_allocation(SCARCE)
    with pytest.raises(InputError, match="unknown template 'zzz'"):
        why_not(SCARCE, result, "zzz")
    foreign = replace(result, instances=(InstanceCount(template="zzz", region="r0", count=1),))
    with pytest.raises(InputError, match="does not know"):
        explain_allocation(SCARCE, foreign)

    class Silent:
        name = "silent"

        def accepts(self, program):
            return True

        def solve(self, program, options):
            return SolveResult(status=SolveStatus.UNKNOWN, x=None, objective=None, bound=None, solve_s=0, solver="s")

    with pytest.raises(SolverError, match="no prices"):
        explain_allocation(SCARCE, result, solver=Silent())
