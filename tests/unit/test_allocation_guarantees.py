"""Spares, per-region demand and preferences, and how explain prices every limit, on plans one can check by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.allocation.explain import explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.one_more import one_more_node
from coral_core.allocation.verify import PlanViolationError, verify_allocation
from coral_core.allocation.why_not import why_not
from coral_core.config.allocation_file import allocation_result_to_json, read_allocation_file
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    Exclusion,
    Preference,
    Running,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.errors import InputError

OPTIONS = AllocationOptions(solver="highs", gap_frac=1e-9)


def decode_problem(*, row=None, **changes):
    """100 tokens/s in two regions, west a quarter dearer: `big` gives 100 for 8 USD/h, `small` 50 for 5."""
    demand = DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=100.0)
    problem = AllocationProblem(
        regions=("east", "west"),
        configs=("large", "little"),
        available=np.array([[9, 9], [9, 9]]),
        price_usd_per_h=np.array([[8.0, 5.0], [10.0, 6.25]]),
        templates=TemplateColumns(
            ids=("big", "small"),
            models=("m", "m"),
            phases=(Phase.DECODE,) * 2,
            nodes=np.eye(2, dtype=np.int64),
            throughput=np.array([100.0, 50.0]),
        ),
        demand=(replace(demand, **(row or {})),),
        options=OPTIONS,
    )
    return replace(problem, **changes)


def counts(result):
    return {(item.template, item.region): item.count for item in result.instances}


def limit_of(problem, family, result=None):
    explanation = explain_allocation(problem, result or solve_allocation(problem))
    (limit,) = [limit for limit in explanation.limits if limit.family == family]
    return limit


def test_a_spare_covers_the_loss_of_any_instance():
    assert counts(solve_allocation(decode_problem())) == {("big", "east"): 1}
    problem = decode_problem(row={"spare_instances": 1})
    result = solve_allocation(problem)
    assert counts(result) == {("small", "east"): 3}  # 15 USD/h; two of the big ones would cost 16
    assert result.full
    limit = limit_of(problem, "redundancy", result)
    assert (limit.name, limit.used, limit.limit, limit.binding) == (("m", "decode"), 1.0, 1.0, True)
    # in fractions of instances 100 tokens/s of the small ones cost 10 USD/h
    assert limit.shadow_usd_per_h == pytest.approx(10.0)
    (marginal,) = explain_allocation(problem, result).marginal
    assert marginal.usd_per_h_per_unit == pytest.approx(0.1)


def test_the_largest_of_the_instances_counts():
    problem = decode_problem(row={"spare_instances": 1}, available=np.array([[9, 2], [0, 0]]))
    result = solve_allocation(problem)
    assert counts(result) == {("big", "east"): 2}  # one big and two small leave 100 too, for 18
    limit = limit_of(problem, "redundancy", result)
    assert limit.used == 1.0
    assert limit.binding


def test_serving_comes_before_a_spare_and_says_what_is_missing():
    problem = decode_problem(row={"spare_instances": 1, "weight": 2.0}, available=np.array([[1, 1], [0, 0]]))
    result = solve_allocation(problem)
    assert counts(result) == {("big", "east"): 1, ("small", "east"): 1}
    (short,) = result.shortfall
    # all is served; half of it would not be after the loss of the big one, which counts a tenth
    assert short.spare_frac == pytest.approx(0.05)
    assert short.frac == pytest.approx(0.05)
    assert not result.full
    assert allocation_result_to_json(result)["shortfall"][0]["spare_frac"] == pytest.approx(0.05)
    limit = limit_of(problem, "redundancy", result)
    assert limit.used == pytest.approx(0.5)
    assert limit.binding


def test_one_instance_is_better_than_none_where_no_spare_is_to_be_had():
    problem = decode_problem(row={"spare_instances": 1}, available=np.array([[1, 0], [0, 0]]))
    result = solve_allocation(problem)
    assert counts(result) == {("big", "east"): 1}
    assert result.shortfall[0].frac == pytest.approx(0.1)


def pair_problem(**row):
    """Prefill and decode of 100 tokens/s each; aggregated ones do 50 of both for less than the two."""
    return AllocationProblem(
        regions=("east", "west"),
        configs=("p", "d", "a"),
        available=np.full((2, 3), 9),
        price_usd_per_h=np.array([[4.0, 3.0, 5.0], [5.0, 2.0, 6.0]]),
        templates=TemplateColumns(
            ids=("prefill", "decode", "both"),
            models=("m",) * 3,
            phases=(Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED),
            nodes=np.eye(3, dtype=np.int64),
            throughput=np.array([100.0, 100.0, 0.5]),
        ),
        demand=tuple(
            DemandRow(model="m", phase=phase, tokens_per_s=100.0, requests_per_s=1.0, **row)
            for phase in (Phase.PREFILL, Phase.DECODE)
        ),
        options=replace(OPTIONS, pd_same_region=True),
    )


def test_an_aggregated_instance_is_lost_by_both_phases():
    result = solve_allocation(pair_problem(spare_instances=1))
    # two more of each phase cost 14 in either region; beside one pair, two aggregated ones are 17: 3 of them 15
    assert result.cost_usd_per_h == 14.0
    assert {template for template, _ in counts(result)} == {"prefill", "decode"}
    aggregated = replace(pair_problem(spare_instances=1), exclusions=(Exclusion(config="p"),))
    assert counts(solve_allocation(aggregated)) == {("both", "east"): 3}


def test_a_pair_that_may_not_be_split_is_a_limit():
    problem = replace(pair_problem(), exclusions=(Exclusion(config="a"),))
    result = solve_allocation(problem)
    assert result.cost_usd_per_h == 7.0
    limit = limit_of(problem, "pd_same_region", result)
    assert (limit.name, limit.used, limit.limit) == (("m", "prefill+decode"), 1.0, 1.0)
    assert limit.binding
    assert limit.shadow_usd_per_h > 0.5  # prefill east and decode west would cost 6
    same = replace(problem, price_usd_per_h=np.array([[4.0, 3.0, 5.0], [4.0, 3.0, 6.0]]))
    assert limit_of(same, "pd_same_region").shadow_usd_per_h == pytest.approx(0.0, abs=1e-9)


def test_regions_get_their_own_demand_and_lose_no_more():
    problem = decode_problem(row={"region_fracs": (("west", 0.5),)})
    assert counts(solve_allocation(problem)) == {("big", "west"): 1}  # 10; a small one in each costs 11.25
    both = decode_problem(row={"region_fracs": (("west", 0.5), ("east", 0.1))})
    result = solve_allocation(both)
    assert counts(result) == {("small", "east"): 1, ("small", "west"): 1}
    limits = {x.name[1]: x for x in explain_allocation(both, result).limits if x.family == "region_demand"}
    assert limits["decode in west"].shadow_usd_per_h == pytest.approx(2.0)  # 10 against 8 USD/h for 100 tokens/s
    assert (limits["decode in east"].used, limits["decode in east"].binding) == (0.5, False)
    (marginal,) = explain_allocation(both, result).marginal
    assert marginal.usd_per_h_per_unit == pytest.approx((0.5 * 8 + 0.5 * 10) / 100)


def test_a_region_that_cannot_be_served_is_the_only_shortfall():
    problem = decode_problem(row={"region_fracs": (("west", 0.3),)}, available=np.array([[9, 9], [0, 0]]))
    result = solve_allocation(problem)
    assert result.shortfall[0].frac == pytest.approx(0.3)
    assert counts(result) == {("big", "east"): 1}
    limit = limit_of(problem, "region_demand", result)
    assert (limit.name, limit.used, limit.limit) == (("m", "decode in west"), 0.0, pytest.approx(0.3))
    assert limit.binding


def test_preferences_change_the_choice_and_not_the_bill():
    problem = decode_problem(preferences=(Preference(config="large", region="east", price_factor=2.0),))
    result = solve_allocation(problem)
    assert counts(result) in ({("small", "east"): 2}, {("big", "west"): 1})  # 10 either way, the big one counts 16
    assert (result.cost_usd_per_h, result.preference_usd_per_h) == (10.0, 0.0)
    sought = decode_problem(preferences=(Preference(model="m", config="little", price_factor=0.5),), churn_k=0.1)
    result = solve_allocation(sought)
    assert counts(result) == {("small", "east"): 2}
    assert (result.cost_usd_per_h, result.preference_usd_per_h) == (10.0, -5.0)
    assert result.churn_usd_per_h == pytest.approx(1.0)  # real money
    assert result.objective_usd_per_h == pytest.approx(6.0)
    assert result.bound_usd_per_h == pytest.approx(6.0)
    assert allocation_result_to_json(result)["preference_usd_per_h"] == -5.0
    facts = why_not(sought, result, "big")
    assert facts.cheaper_chosen == "small"
    assert facts.cheaper_usd_per_h_per_unit == pytest.approx(0.05)


def test_a_budget_is_in_real_money():
    sought = (Preference(config="little", price_factor=0.5),)
    problem = decode_problem(preferences=sought, options=replace(OPTIONS, budget_usd_per_h=9.0))
    result = solve_allocation(problem)
    assert counts(result) == {("big", "east"): 1}
    assert limit_of(problem, "budget", result).used == 8.0


def test_several_preferences_multiply():
    both = (Preference(region="west", price_factor=0.5), Preference(config="large", price_factor=0.5))
    result = solve_allocation(decode_problem(preferences=both))
    assert counts(result) == {("big", "west"): 1}
    assert result.preference_usd_per_h == pytest.approx(2.5 - 10.0)


def test_an_exclusion_says_what_it_costs():
    problem = decode_problem(exclusions=(Exclusion(model="m", config="large", region="east"),))
    result = solve_allocation(problem)
    limit = limit_of(problem, "exclusion", result)
    assert limit.name == ("exclusions[0]", "model m, config large, region east")
    assert (limit.binding, limit.shadow_usd_per_h) == (True, pytest.approx(2.0))
    idle = decode_problem(exclusions=(Exclusion(config="large", region="west"),))
    assert not limit_of(idle, "exclusion").binding


def test_what_two_exclusions_forbid_neither_alone_would_save():
    items = (Exclusion(config="large"), Exclusion(model="m", config="large", region="east"))
    problem = decode_problem(exclusions=items, churn_k=0.5, running=(Running(template="big", region="east", count=1),))
    limits = [x for x in explain_allocation(problem, solve_allocation(problem)).limits if x.family == "exclusion"]
    assert [limit.shadow_usd_per_h for limit in limits] == [0.0, 0.0]
    assert why_not(problem, solve_allocation(problem), "big").reduced_cost_usd_per_h == {}


def test_one_more_node_counts_the_spare():
    problem = decode_problem(row={"spare_instances": 1}, available=np.array([[1, 2], [0, 0]]))
    saved = {(x.region, x.config): x for x in one_more_node(problem, solve_allocation(problem))}
    assert saved["east", "little"].saved_usd_per_h == pytest.approx(3.0)  # three small ones for a big and two


REDUNDANT = decode_problem(row={"spare_instances": 1})
REGIONAL = decode_problem(row={"region_fracs": (("west", 0.5),)})
SOUGHT = decode_problem(preferences=(Preference(config="little", price_factor=0.5),))


@pytest.mark.parametrize(
    ("problem", "place"),
    [
        (REDUNDANT, "shortfall[0]"),
        (REGIONAL, "shortfall[0]"),
        (SOUGHT, "preference_usd_per_h"),
    ],
)
def test_a_plan_without_the_family_is_refused(problem, place):
    plain = solve_allocation(decode_problem())
    verify_allocation(problem, solve_allocation(problem))
    if problem is SOUGHT:
        plain = replace(solve_allocation(problem), preference_usd_per_h=0.0)
    with pytest.raises(PlanViolationError) as caught:
        verify_allocation(problem, plain)
    assert str(caught.value).startswith(place)


def test_a_hidden_lack_of_redundancy_is_refused():
    problem = decode_problem(row={"spare_instances": 1}, available=np.array([[1, 0], [0, 0]]))
    result = solve_allocation(problem)
    short = replace(result.shortfall[0], spare_frac=0.0)
    with pytest.raises(PlanViolationError, match="missing redundancy 0"):
        verify_allocation(problem, replace(result, shortfall=(short,)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"spare_instances": 2}, "2 is neither 0 nor 1"),
        ({"region_fracs": (("north", 0.5),)}, "unknown region 'north'"),
        ({"region_fracs": (("west", 1.5),)}, "1.5 is not in"),
        ({"region_fracs": (("west", float("nan")),)}, "nan is not in"),
        ({"region_fracs": (("west", 0.7), ("east", 0.7))}, "add up to more than 1"),
        ({"region_fracs": (("west", 0.1), ("west", 0.2))}, "'west' appears twice"),
    ],
)
def test_guarantees_without_a_meaning_are_refused(row, message):
    with pytest.raises(InputError, match=message):
        solve_allocation(decode_problem(row=row))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Preference(price_factor=2.0), "prefers nothing"),
        (Preference(model="m", price_factor=0.0), "not a finite number > 0"),
        (Preference(model="m", price_factor=float("inf")), "not a finite number > 0"),
        (Preference(config="x", price_factor=2.0), "unknown config 'x'"),
    ],
)
def test_preferences_without_a_meaning_are_refused(item, message):
    with pytest.raises(InputError, match=message):
        solve_allocation(decode_problem(preferences=(item,)))


def test_both_phases_together_ask_for_no_more_than_everything():
    problem = pair_problem()
    first, second = problem.demand
    rows = (replace(first, region_fracs=(("east", 0.6),)), replace(second, region_fracs=(("west", 0.6),)))
    with pytest.raises(InputError, match="other phase of 'm'"):
        solve_allocation(replace(problem, demand=rows))
    apart = replace(problem, demand=rows, options=OPTIONS)
    assert solve_allocation(apart).full


FILE = """{"regions": {"r": {"c": {"available": 4, "price_usd_per_h": 1}}},
    "templates": [{"id": "t", "model": "m", "phase": "decode", "nodes": {"c": 1}, "throughput_tokens_per_s": 9}],
    "demand": [{"model": "m", "phase": "decode", "tokens_per_s": 9, "spare_instances": 1, "region_fracs": {"r": 0.5}}],
    "preferences": [{"config": "c", "price_factor": 1.5}]}"""


def test_the_file_states_guarantees_and_preferences(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(FILE)
    (problem,), _ = read_allocation_file(path)
    assert problem.demand[0].spare_instances == 1
    assert problem.demand[0].region_fracs == (("r", 0.5),)
    assert problem.preferences == (Preference(config="c", price_factor=1.5),)
    assert counts(solve_allocation(problem)) == {("t", "r"): 2}


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"spare_instances": 1', '"spare_instances": 3', "demand[0].spare_instances"),
        ('{"r": 0.5}', '{"r": 1.5}', "demand[0].region_fracs.r"),
        ('{"r": 0.5}', '{"x": 0.5}', "demand[0].region_fracs.x"),
        ('"price_factor": 1.5', '"price_factor": 0', "preferences[0].price_factor"),
        (', "price_factor": 1.5', "", "preferences[0].price_factor"),
        ('"config": "c", "price', '"gpu": "c", "price', "preferences[0].gpu"),
    ],
)
def test_mistakes_in_the_file_are_placed(old, new, place, tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(InputError) as caught:
        read_allocation_file(path)
    assert place in str(caught.value)


def test_the_table_tells_a_missing_spare_from_unserved_demand(tmp_path, capsys):
    from coral_core.cli.entry import run

    path = tmp_path / "problem.json"
    path.write_text(FILE.replace('"available": 4', '"available": 1').replace('{"r": 0.5}', "{}"))
    assert run(["allocation", "solve", str(path)]) == 0
    assert "would miss 100.00% of its demand after the loss" in capsys.readouterr().err
    assert run(["allocation", "solve", str(path), "--require-full"]) == 3


@pytest.mark.parametrize("row", [{"spare_instances": 1}, {"region_fracs": (("west", 0.4),)}, {}])
def test_the_next_token_costs_what_the_relaxation_pays_for_it(row):
    """By a finite difference at the same plan, whose instances leave room for the step."""
    problem = pair_problem(**row)
    problem = replace(problem, templates=replace(problem.templates, throughput=np.array([112.0, 130.0, 0.6])))
    result = solve_allocation(problem)
    base = explain_allocation(problem, result)
    for i, cost in enumerate(base.marginal):
        step = 0.01
        more = tuple(
            replace(other, tokens_per_s=other.tokens_per_s + step * (k == i)) for k, other in enumerate(problem.demand)
        )
        after = explain_allocation(replace(problem, demand=more), result)
        found = (after.relaxed_objective_usd_per_h - base.relaxed_objective_usd_per_h) / step
        assert cost.usd_per_h_per_unit == pytest.approx(found, rel=0.02, abs=1e-6)
