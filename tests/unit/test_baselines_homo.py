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
    Exclusion,
    Preference,
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


SPOT = problem(
    {"a": ("m", D, [1, 0], 10.0), "s": ("m", D, [0, 1], 10.0)},
    [[9, 9], [9, 9]],
    [[1.0, 0.4], [1.2, 0.5]],
    (DemandRow(model="m", phase=D, tokens_per_s=40.0),),
    spot_configs=("c1",),
)


def asked(**fields):
    return replace(SPOT, demand=(replace(SPOT.demand[0], **fields),))


def test_only_the_on_demand_share_is_kept_off_spot_nodes():
    assert held(homo(SPOT)) == {("s", "r0"): 4}
    assert held(homo(asked(on_demand_frac=0.5))) == {("a", "r0"): 2, ("s", "r0"): 2}
    assert held(homo(asked(on_demand_frac=1.0))) == {("a", "r0"): 4}


def test_spot_nodes_are_left_alone_where_two_markets_round_up_to_more():
    # one instance on demand serves all there is; beside it, what is left of the demand is worth no spot instance
    given = replace(SPOT, templates=replace(SPOT.templates, throughput=np.array([40.0, 20.0])))
    given = replace(given, demand=(replace(given.demand[0], on_demand_frac=0.5),))
    whole = problem(
        {"small": ("m", D, [1, 0], 20.0), "large": ("m", D, [3, 0], 40.0), "s": ("m", D, [0, 1], 20.0)},
        [[9, 9]],
        [[1.0, 2.5]],
        (DemandRow(model="m", phase=D, tokens_per_s=40.0, on_demand_frac=0.5),),
        spot_configs=("c1",),
    )
    assert held(homo(given)) == {("a", "r0"): 1}
    assert held(homo(whole)) == {("small", "r0"): 2}


def test_a_region_gets_its_share_and_the_rest_goes_where_it_is_cheap():
    assert held(homo(asked(region_fracs=(("r1", 0.5),)))) == {("s", "r0"): 2, ("s", "r1"): 2}


def test_a_spare_is_no_larger_than_what_may_fail():
    assert held(homo(asked(spare_instances=1))) == {("s", "r0"): 5}
    both = homo(asked(spare_instances=1, region_fracs=(("r1", 0.5),)))
    # either loss must leave r1 its half and all of it the whole
    assert held(both) == {("s", "r0"): 2, ("s", "r1"): 3}
    nothing_left = replace(asked(spare_instances=1), available=np.array([[0, 4], [0, 0]]))
    lacking = homo(nothing_left).shortfall[0]
    assert lacking.spare_frac == pytest.approx(lacking.frac)
    assert lacking.frac > 0


def test_exclusions_preferences_and_the_budget_are_kept():
    excluded = replace(SPOT, exclusions=(Exclusion(config="c1", region="r0"),))
    assert held(homo(excluded)) == {("s", "r1"): 4}
    preferred = replace(SPOT, preferences=(Preference(region="r1", price_factor=0.5),))
    result = homo(preferred)
    assert held(result) == {("s", "r1"): 4}
    assert (result.cost_usd_per_h, result.preference_usd_per_h) == (pytest.approx(2.0), pytest.approx(-1.0))
    poor = homo(replace(SPOT, options=AllocationOptions(budget_usd_per_h=1.3)))
    assert held(poor) == {("s", "r0"): 3}
    assert poor.shortfall[0].frac == pytest.approx(0.25)
    assert homo(replace(SPOT, options=AllocationOptions(budget_usd_per_h=0.0))).instances == ()


def test_a_budget_that_binds_in_the_middle_of_a_pair_leaves_no_half_pair():
    given = replace(
        problem(
            {"p": ("m", P, [1], 10.0), "d": ("m", D, [1], 10.0)},
            [[99]],
            [[1.0]],
            tuple(DemandRow(model="m", phase=phase, tokens_per_s=40.0) for phase in (P, D)),
        ),
        options=AllocationOptions(pd_same_region=True, budget_usd_per_h=5.0),
    )
    assert held(homo(given)) == {("p", "r0"): 2, ("d", "r0"): 2}


def test_variants_are_not_mixed_within_a_pair():
    # the cheapest prefill is bf16, the cheapest decode fp8: together they serve nobody
    given = problem(
        {
            "p16": ("m", P, [1], 40.0),
            "d16": ("m", D, [1], 10.0),
            "p8": ("m", P, [1], 20.0),
            "d8": ("m", D, [1], 40.0),
        },
        [[99]],
        [[1.0]],
        tuple(DemandRow(model="m", phase=phase, tokens_per_s=40.0) for phase in (P, D)),
        options=AllocationOptions(pd_same_region=True),
    )
    variants = ("bf16", "bf16", "fp8", "fp8")
    given = replace(given, templates=replace(given.templates, variants=variants))
    assert held(homo(given)) == {("p8", "r0"): 2, ("d8", "r0"): 1}
    assert homogeneous(given).templates.variants == variants
