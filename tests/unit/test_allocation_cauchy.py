"""Baseline `cauchy`: combos by hand, what it cannot serve, and how it treats limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from coral_core.allocation.baselines.cauchy import cauchy
from coral_core.allocation.baselines.combos import candidate_combos
from coral_core.allocation.coverage import coverage_of
from coral_core.allocation.verify import verify_allocation
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
from coral_core.solver.highs import HighsSolver
from coral_core.solver.program import SolveResult, SolveStatus

P, D, A = Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED


def problem(templates, demand, available=((99, 99),), price=((1.0, 2.0),), **fields):
    """`templates`: (model, phase, nodes, throughput); ids t0, t1, ..."""
    return AllocationProblem(
        regions=tuple(f"r{i}" for i in range(len(available))),
        configs=("a", "b"),
        available=np.array(available),
        price_usd_per_h=np.array(price, dtype=float),
        templates=TemplateColumns(
            ids=tuple(f"t{i}" for i in range(len(templates))),
            models=tuple(t[0] for t in templates),
            phases=tuple(t[1] for t in templates),
            nodes=np.array([t[2] for t in templates]),
            throughput=np.array([t[3] for t in templates], dtype=float),
        ),
        demand=tuple(demand),
        options=AllocationOptions(solver="highs", time_limit_s=600),
        **fields,
    )


def rows(model="m", prefill=100.0, decode=100.0, **fields):
    return (
        DemandRow(model=model, phase=P, tokens_per_s=prefill, **fields),
        DemandRow(model=model, phase=D, tokens_per_s=decode, **fields),
    )


SIMPLE = [("m", P, (1, 0), 50.0), ("m", D, (0, 1), 20.0)]


def counts(result):
    return {(item.template, item.region): item.count for item in result.instances}


def test_one_prefill_replica_feeds_as_many_decode_replicas_as_pay():
    # f_p = 0.5, f_q = 0.2: n = 2 serves 0.4 for 5 USD/h (0.080), n = 3 serves 0.5 for 7 USD/h (0.071)
    asked = problem(SIMPLE, rows())
    combos = candidate_combos(asked, coverage_of(asked), keep=9)
    assert combos.replicas.tolist() == [[1, 2]]
    assert combos.served_frac.tolist() == [pytest.approx(0.4)]
    assert combos.counted_usd_per_h.tolist() == [5.0]
    assert combos.considered == 2
    # whole combos: three of them, where separate replicas would do with two prefill and five decode
    result = cauchy(asked)
    assert counts(result) == {("t0", "r0"): 3, ("t1", "r0"): 6}
    assert result.cost_usd_per_h == 15.0
    assert (result.method, result.bound_usd_per_h) == ("cauchy", 0.0)


def test_mixed_replicas_are_no_candidates():
    mixed = [*SIMPLE, ("m", P, (1, 1), 1e6), ("m", D, (1, 1), 1e6)]
    assert counts(cauchy(problem(mixed, rows()))) == counts(cauchy(problem(SIMPLE, rows())))


def test_the_best_combo_is_kept_for_each_pair_of_configurations():
    templates = [*SIMPLE, ("m", P, (2, 0), 101.0), ("m", D, (1, 0), 5.0)]
    asked = problem(templates, rows())
    combos = candidate_combos(asked, coverage_of(asked), keep=9)
    assert len(combos) == 2
    assert len(candidate_combos(asked, coverage_of(asked), keep=1)) == 1


def test_a_region_counts_only_where_the_whole_combo_fits():
    asked = problem(SIMPLE, rows(), available=((1, 1), (9, 9)), price=((1.0, 2.0), (3.0, 3.0)))
    combos = candidate_combos(asked, coverage_of(asked), keep=9)
    by_region = dict(zip(combos.region.tolist(), combos.replicas.tolist(), strict=True))
    assert by_region == {0: [1, 1], 1: [1, 2]}


def test_what_no_combo_serves_is_a_stated_shortfall():
    result = cauchy(problem(SIMPLE, rows(), available=((1, 5),)))
    assert [item.frac for item in result.shortfall] == [pytest.approx(0.5), pytest.approx(0.6)]
    assert not result.full


def test_aggregated_demand_is_not_served():
    templates = [*SIMPLE, ("n", A, (1, 0), 9.0)]
    demand = (*rows(), DemandRow(model="n", phase=A, tokens_per_s=None, requests_per_s=1.0))
    result = cauchy(problem(templates, demand))
    assert [item.frac for item in result.shortfall] == [0.0, 0.0, 1.0]


def test_a_model_with_one_phase_has_replicas_of_that_phase():
    result = cauchy(problem(SIMPLE, rows()[1:]))
    assert counts(result) == {("t1", "r0"): 5}


def test_demand_of_zero_and_no_templates_give_the_empty_plan():
    assert cauchy(problem(SIMPLE, rows(prefill=0.0, decode=0.0))).instances == ()
    result = cauchy(problem([("other", P, (1, 0), 1.0)], rows()))
    assert (result.instances, [item.frac for item in result.shortfall]) == ((), [1.0, 1.0])


def test_a_template_without_throughput_is_no_candidate():
    result = cauchy(problem([("m", P, (1, 0), 0.0), *SIMPLE[1:]], rows()))
    assert result.instances == ()


def test_the_cheaper_model_per_token_weighs_more_when_nodes_are_scarce():
    # only one node of `a` is left; m asks for a tenth of n's tokens, so a USD saved on m is worth ten on n
    templates = [
        ("m", D, (1, 0), 100.0),
        ("m", D, (0, 1), 100.0),
        ("n", D, (1, 0), 1000.0),
        ("n", D, (0, 1), 1000.0),
    ]
    demand = [DemandRow(model="m", phase=D, tokens_per_s=100.0), DemandRow(model="n", phase=D, tokens_per_s=1000.0)]
    result = cauchy(problem(templates, demand, available=((1, 1),)))
    assert counts(result) == {("t0", "r0"): 1, ("t3", "r0"): 1}


def test_floors_caps_and_their_deficit():
    floored = (*rows(decode=20.0, prefill=50.0, min_instances=4),)
    result = cauchy(problem(SIMPLE, floored))
    assert result.floor_deficit == {}
    assert sum(n for (t, _), n in counts(result).items() if t == "t0") == 4
    capped = (*rows(max_instances=2),)
    result = cauchy(problem(SIMPLE, capped))
    assert counts(result) == {("t0", "r0"): 1, ("t1", "r0"): 2}
    scarce = cauchy(problem(SIMPLE, floored, available=((2, 99),)))
    assert scarce.floor_deficit == {0: 2, 1: 2}


def test_what_runs_costs_no_start_up():
    templates = [*SIMPLE, ("m", D, (0, 1), 20.0)]
    running = (Running(template="t2", region="r0", count=6),)
    asked = problem(templates, rows(), running=running, churn_k=0.5)
    verify_allocation(asked, cauchy(asked))
    # t1 and t2 are alike; one combo per pair of configurations is kept, so what runs cannot lead the choice
    fresh = cauchy(replace(asked, running=()))
    assert fresh.churn_usd_per_h == pytest.approx(0.5 * fresh.cost_usd_per_h)
    kept = cauchy(
        replace(asked, running=tuple(Running(template=t, region=r, count=n) for (t, r), n in counts(fresh).items()))
    )
    assert kept.churn_usd_per_h == 0.0


def test_a_problem_without_meaning_is_refused():
    with pytest.raises(InputError, match="churn_k"):
        cauchy(problem(SIMPLE, rows(), churn_k=float("nan")))


@dataclass
class Silent:
    """Finds nothing in time."""

    name: str = "silent"

    def accepts(self, program):
        return True

    def solve(self, program, options):
        return SolveResult(
            status=SolveStatus.UNKNOWN, x=None, objective=None, bound=None, solve_s=0.0, solver=self.name
        )


def test_a_solver_without_an_answer_leaves_the_empty_plan_and_says_so():
    result = cauchy(problem(SIMPLE, rows()), solver=Silent())
    assert (result.instances, [item.frac for item in result.shortfall]) == ((), [1.0, 1.0])


@dataclass
class Sloppy:
    """Takes one combo too few, as tolerances would allow, unless the demand was raised."""

    name: str = "sloppy"
    raised: bool = False

    def accepts(self, program):
        return True

    def solve(self, program, options):
        self.raised = self.raised or bool((program.row_lower > 1.0).any())
        found = HighsSolver().solve(program, options)
        if found.x is None:  # after its own answer of one combo too few nothing is left to do within the limits
            return found
        x = found.x.copy()
        if not self.raised:
            x[0] -= 1
        return replace(found, x=x)


def test_a_solver_that_misses_a_demand_is_asked_for_more():
    solver = Sloppy()
    assert cauchy(problem(SIMPLE, rows()), solver=solver).full
    assert solver.raised


def test_a_combo_is_of_one_variant_and_variants_compete():
    given = problem(
        [("m", P, (1, 0), 100.0), ("m", D, (1, 0), 10.0), ("m", P, (1, 0), 50.0), ("m", D, (1, 0), 100.0)], rows()
    )
    given = replace(given, templates=replace(given.templates, variants=("bf16", "bf16", "fp8", "fp8")))
    combos = candidate_combos(given, coverage_of(given), keep=9)
    of_combo = [{given.templates.variants[t] for t in np.flatnonzero(row)} for row in combos.replicas]
    assert all(len(variants) == 1 for variants in of_combo)
    # bf16 takes 1 + 10 nodes, fp8 two combos of 1 + 1
    assert counts(cauchy(given)) == {("t2", "r0"): 2, ("t3", "r0"): 2}


def spot_problem(**fields):
    """Configuration b is spot and far cheaper."""
    templates = [("m", phase, nodes, 50.0) for phase in (P, D) for nodes in ((1, 0), (0, 1))]
    given = problem(templates, rows(**fields), price=((1.0, 0.2),))
    return replace(given, spot_configs=("b",))


def test_combos_without_spot_nodes_are_kept_where_a_share_must_do_without():
    assert counts(cauchy(spot_problem(), candidates=1)) == {("t1", "r0"): 2, ("t3", "r0"): 2}
    half = cauchy(spot_problem(on_demand_frac=0.5), candidates=1)
    assert half.full
    assert counts(half) == {("t0", "r0"): 1, ("t1", "r0"): 1, ("t2", "r0"): 1, ("t3", "r0"): 1}


def test_exclusions_the_budget_and_regions_are_kept():
    given = spot_problem()
    banned = replace(given, exclusions=(Exclusion(model="m", config="b"),))
    assert counts(cauchy(banned)) == {("t0", "r0"): 2, ("t2", "r0"): 2}
    poor = cauchy(replace(banned, options=replace(given.options, budget_usd_per_h=3.0)))
    assert poor.cost_usd_per_h <= 3.0
    assert poor.shortfall[0].frac == pytest.approx(0.5)
    nothing = cauchy(replace(banned, options=replace(given.options, budget_usd_per_h=0.0)))
    assert nothing.instances == ()
    two = replace(
        problem(SIMPLE, rows(), available=((99, 99), (99, 99)), price=((1.0, 2.0), (1.5, 3.0))),
        demand=rows(region_fracs=(("r1", 0.4),)),
    )
    apart = cauchy(two)
    assert apart.full
    assert sum(n for (_, region), n in counts(apart).items() if region == "r1") >= 2
    elsewhere = cauchy(replace(two, available=np.array([[99, 99], [0, 0]])))
    assert elsewhere.shortfall[0].frac == pytest.approx(0.4)


def test_preferences_move_combos_but_not_what_they_cost():
    given = problem(SIMPLE, rows(), available=((99, 99), (99, 99)), price=((1.0, 2.0), (1.1, 2.1)))
    assert {region for _, region in counts(cauchy(given))} == {"r0"}
    moved = cauchy(replace(given, preferences=(Preference(region="r1", price_factor=0.5),)))
    assert {region for _, region in counts(moved)} == {"r1"}
    assert moved.cost_usd_per_h > cauchy(given).cost_usd_per_h
    assert moved.preference_usd_per_h == pytest.approx(-moved.cost_usd_per_h / 2)
