"""Exclusions, budget, variants and what one more node saves, on plans one can check by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.allocation.explain import explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.one_more import one_more_node
from coral_core.allocation.verify import PlanViolationError, verify_allocation
from coral_core.allocation.why_not import why_not
from coral_core.config.allocation_file import read_allocation_file
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    Exclusion,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.errors import InputError


def decode_problem(**changes):
    """60 tokens/s from nodes of 10 tokens/s at 1 USD/h (4 of them) or of 20 at 4 (plenty)."""
    problem = AllocationProblem(
        regions=("east",),
        configs=("cheap", "dear"),
        available=np.array([[4, 9]]),
        price_usd_per_h=np.array([[1.0, 4.0]]),
        templates=TemplateColumns(
            ids=("c", "d"),
            models=("m", "m"),
            phases=(Phase.DECODE,) * 2,
            nodes=np.eye(2, dtype=np.int64),
            throughput=np.array([10.0, 20.0]),
        ),
        demand=(DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=60.0),),
        options=AllocationOptions(solver="highs"),
    )
    return replace(problem, **changes)


def counts(result):
    return {item.template: item.count for item in result.instances}


def test_an_excluded_configuration_is_not_used_and_says_so():
    free = solve_allocation(decode_problem())
    assert counts(free) == {"c": 4, "d": 1}
    problem = decode_problem(exclusions=(Exclusion(model="m", config="cheap"),))
    result = solve_allocation(problem)
    assert counts(result) == {"d": 3}
    facts = why_not(problem, result, "c")
    assert facts.unavailable == {"east": ("excluded",)}
    assert "east excludes it" in facts.reasons
    with pytest.raises(PlanViolationError, match="is excluded"):
        verify_allocation(problem, free)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Exclusion(), "excludes everything"),
        (Exclusion(model="x"), "unknown model 'x'"),
        (Exclusion(config="x"), "unknown config 'x'"),
        (Exclusion(region="x"), "unknown region 'x'"),
    ],
)
def test_exclusions_name_what_is_known(item, message):
    with pytest.raises(InputError, match=message):
        solve_allocation(decode_problem(exclusions=(item,)))


def test_a_budget_is_kept_and_binds():
    free = solve_allocation(decode_problem())
    problem = decode_problem(options=AllocationOptions(solver="highs", budget_usd_per_h=5.0))
    result = solve_allocation(problem)
    assert counts(result) == {"c": 4}  # 5 USD/h would also pay for one of each, which serves less
    assert result.shortfall[0].frac == pytest.approx(1 / 3)
    assert result.cost_usd_per_h <= 5.0
    with pytest.raises(PlanViolationError, match="the budget is 5"):
        verify_allocation(problem, free)
    limits = {limit.family: limit for limit in explain_allocation(problem, result).limits}
    assert (limits["budget"].used, limits["budget"].limit) == (4.0, 5.0)


def test_a_budget_beyond_the_need_changes_nothing():
    problem = decode_problem(options=AllocationOptions(solver="highs", budget_usd_per_h=8.0))
    assert counts(solve_allocation(problem)) == counts(solve_allocation(decode_problem()))


@pytest.mark.parametrize("budget", [-1.0, float("nan")])
def test_a_budget_is_an_amount(budget):
    with pytest.raises(InputError, match="not a finite number"):
        solve_allocation(decode_problem(options=AllocationOptions(budget_usd_per_h=budget)))


def test_one_more_node_is_solved_for():
    problem = decode_problem(available=np.array([[5, 9]]))
    result = solve_allocation(problem)
    assert result.objective_usd_per_h == 8.0  # four and one; six of the cheap would do
    explanation = explain_allocation(problem, result)
    (answer,) = one_more_node(problem, result, explanation=explanation)
    assert (answer.region, answer.config) == ("east", "cheap")
    assert answer.saved_usd_per_h == pytest.approx(2.0)
    assert answer.saved_usd_per_h_proven == pytest.approx(2.0)
    assert answer.shortfall_less_frac == 0.0


def test_one_more_node_may_serve_more_instead():
    problem = decode_problem(available=np.array([[4, 0]]))
    answer = one_more_node(problem, solve_allocation(problem))
    first = answer[0]
    assert first.config == "dear"
    assert first.shortfall_less_frac == pytest.approx(1 / 3)
    assert first.saved_usd_per_h == pytest.approx(-4.0)
    assert first.saved_usd_per_h_proven == 0.0


def test_nothing_scarce_nothing_saved():
    problem = decode_problem(available=np.array([[40, 40]]))
    assert one_more_node(problem, solve_allocation(problem)) == ()


def variants_problem(*, pd_same_region, names):
    """Prefill is cheap in fp8, decode in bf16: mixing is cheapest, and allowed only where pairs are not formed."""
    return AllocationProblem(
        regions=("east",),
        configs=("one", "two"),
        available=np.array([[9, 9]]),
        price_usd_per_h=np.array([[1.0, 3.0]]),
        templates=TemplateColumns(
            ids=("p8", "p16", "d8", "d16"),
            models=("m",) * 4,
            phases=(Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE),
            nodes=np.array([[1, 0], [0, 1], [0, 1], [1, 0]]),
            throughput=np.array([10.0, 10.0, 20.0, 10.0]),
            variants=names,
        ),
        demand=(
            DemandRow(model="m", phase=Phase.PREFILL, tokens_per_s=20.0),
            DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=20.0),
        ),
        options=AllocationOptions(pd_same_region=pd_same_region, solver="highs"),
    )


NAMES = ("fp8", "bf16", "fp8", "bf16")


def test_variants_compete_and_pairs_do_not_mix_them():
    mixed = solve_allocation(variants_problem(pd_same_region=False, names=NAMES))
    assert counts(mixed) == {"p8": 2, "d16": 2}
    problem = variants_problem(pd_same_region=True, names=NAMES)
    paired = solve_allocation(problem)
    assert counts(paired) == {"p8": 2, "d8": 1}
    with pytest.raises(PlanViolationError, match="fraction"):
        verify_allocation(problem, mixed)
    assert counts(solve_allocation(variants_problem(pd_same_region=True, names=None))) == {"p8": 2, "d16": 2}


def test_every_template_has_a_variant_or_none_has():
    with pytest.raises(InputError, match="3 variants of 4 templates"):
        solve_allocation(variants_problem(pd_same_region=True, names=NAMES[:3]))


def test_the_file_states_the_families(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(
        """{"regions": {"r": {"c": {"available": 2, "price_usd_per_h": 1}}},
        "templates": [
          {"id": "t", "model": "m", "phase": "decode", "variant": "fp8", "nodes": {"c": 1}, "throughput_tokens_per_s": 9},
          {"id": "u", "model": "m", "phase": "decode", "nodes": {"c": 1}, "throughput_tokens_per_s": 9}],
        "demand": [{"model": "m", "phase": "decode", "tokens_per_s": 9}],
        "exclusions": [{"model": "m", "region": "r"}], "options": {"budget_usd_per_h": 3}}"""
    )
    (problem,), _ = read_allocation_file(path)
    assert problem.exclusions == (Exclusion(model="m", region="r"),)
    assert problem.options.budget_usd_per_h == 3.0
    assert problem.templates.variants == ("fp8", "")
    assert solve_allocation(problem).shortfall[0].frac == 1.0


def test_an_on_demand_floor_is_covered_without_spot_nodes_and_binds():
    floor = replace(decode_problem().demand[0], on_demand_frac=0.5)
    problem = decode_problem(demand=(floor,), spot_configs=("cheap",))
    result = solve_allocation(problem)
    assert counts(result) == {"c": 2, "d": 2}  # two of the dear cover 40 of the 30 that must not be spot
    limits = {limit.family: limit for limit in explain_allocation(problem, result).limits}
    assert limits["on_demand"].used == pytest.approx(40 / 60)
    assert limits["on_demand"].limit == 0.5
    short = decode_problem(demand=(floor,), spot_configs=("cheap",), available=np.array([[9, 1]]))
    assert solve_allocation(short).shortfall[0].frac == pytest.approx(1 / 3)  # 20 of 30, so two thirds count
    with pytest.raises(PlanViolationError, match="fraction"):
        verify_allocation(problem, solve_allocation(decode_problem()))


def test_on_demand_floors_are_fractions_of_known_markets():
    with pytest.raises(InputError, match="unknown config 'x'"):
        solve_allocation(decode_problem(spot_configs=("x",)))
    row = replace(decode_problem().demand[0], on_demand_frac=1.5)
    with pytest.raises(InputError, match="not in"):
        solve_allocation(decode_problem(demand=(row,)))
