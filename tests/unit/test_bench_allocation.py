"""The allocation bench measures what it says, on problems small enough to check."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from coral_core.allocation.ilp import solve_allocation
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import Scenario, load_scenario
from coral_core.domain.allocation import AllocationOptions, AllocationProblem, DemandRow, TemplateColumns
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from tasks import bench_allocation as bench
from tasks.bench_charts import allocation_chart


def small_problem(available=4):
    return AllocationProblem(
        regions=("east", "west"),
        configs=("small", "large"),
        available=np.full((2, 2), available),
        price_usd_per_h=np.array([[1.0, 3.0], [1.2, 2.9]]),
        templates=TemplateColumns(
            ids=("a", "b", "c", "d"),
            models=("m",) * 4,
            phases=(Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE),
            nodes=np.array([[1, 0], [0, 1], [1, 0], [1, 1]]),
            throughput=np.array([10.0, 35.0, 8.0, 50.0]),
        ),
        demand=(
            DemandRow(model="m", phase=Phase.PREFILL, tokens_per_s=60.0, requests_per_s=3.0),
            DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=45.0, requests_per_s=3.0),
        ),
        options=AllocationOptions(solver="highs", gap_frac=1e-6),
    )


def test_the_report_agrees_with_the_raw_program():
    report = bench.bench_allocation("mine", "paper", small_problem(), repeats=2, raw_time_limit_s=600.0).to_json()
    json.dumps(report, allow_nan=False)
    assert report["objective_usd_per_h"] == solve_allocation(small_problem()).objective_usd_per_h
    assert report["raw_milp"]["status"] == "optimal"
    assert report["raw_milp"]["objective_usd_per_h"] == pytest.approx(report["objective_usd_per_h"])
    assert report["columns_before"] == report["raw_milp"]["columns"] == 8
    assert report["columns_after"] <= 8
    assert report["gap_frac"] <= 1e-6
    assert report["speedup_ratio"] == pytest.approx(report["raw_milp"]["wall_s"] / report["solve_s"])


def test_the_raw_program_may_be_left_out_and_may_find_nothing():
    report = bench.bench_allocation("mine", "paper", small_problem(), repeats=0, raw_time_limit_s=0.0)
    assert report.raw_milp is None
    assert report.speedup_ratio is None
    assert report.solve_s == report.first_s
    nothing = bench.raw_milp(small_problem(available=0), time_limit_s=600.0)
    assert (nothing.status, nothing.objective_usd_per_h, nothing.columns) == ("infeasible", None, 0)


def test_a_solver_that_does_not_keep_its_limit_is_ended(monkeypatch):
    monkeypatch.setattr(bench, "_LOADING_S", 0.0)  # nothing is loaded in no time
    found = bench.raw_milp_apart(small_problem(), time_limit_s=0.001)
    assert found.status.startswith("ended")
    assert found.objective_usd_per_h is None
    assert found.columns == 8
    assert found.wall_s >= 0.002


def die(*_):
    raise SystemExit(1)


def test_a_raw_program_whose_process_dies_is_reported(monkeypatch):
    monkeypatch.setattr(bench, "_raw_milp_into", die)
    assert bench.raw_milp_apart(small_problem(), time_limit_s=600.0).status.startswith("failed")


def test_grown_problems_are_of_the_size_asked_and_alike_for_a_seed():
    given = small_problem()
    bigger = bench.grown(given, models=5, regions=3, seed=1)
    assert len(bigger.templates) == 20
    assert len({row.model for row in bigger.demand}) == 5
    assert bigger.price_usd_per_h.shape == bigger.available.shape == (3, 2)
    assert (bigger.price_usd_per_h[:2] == given.price_usd_per_h).all()
    assert not (bigger.price_usd_per_h[2] == given.price_usd_per_h[0]).any()
    again = bench.grown(given, models=5, regions=3, seed=1)
    other = bench.grown(given, models=5, regions=3, seed=2)
    assert (bigger.templates.throughput == again.templates.throughput).all()
    assert (bigger.templates.throughput != other.templates.throughput).all()
    assert solve_allocation(bigger).gap_frac <= 1e-6


def test_growth_solves_every_size(monkeypatch):
    monkeypatch.setattr(bench, "GROWTH_MODELS", (1, 2))
    monkeypatch.setattr(bench, "GROWTH_REGIONS", (2,))
    points = list(bench.growth(small_problem(available=40), seed=0))
    assert [(point.models, point.regions, point.templates) for point in points] == [(1, 2, 4), (2, 2, 8)]
    assert all(point.gap_frac <= 1e-6 and point.solve_s > 0 for point in points)


def test_gap_over_time_takes_every_seed_and_limit():
    seen = []

    def of_seed(seed):
        seen.append(seed)
        return replace(small_problem(available=3 if seed else 0))

    points = list(bench.gap_over_time(of_seed, seeds=3, limits_s=(1.0, 2.0)))
    assert seen == [0, 1, 2]
    assert [point.time_limit_s for point in points] == [1.0, 2.0]
    assert all(point.unserved == 1 for point in points)
    assert all(point.proven == 3 and point.worst_unproven_shortfall_frac < 1e-6 for point in points)
    assert all(point.worst_solve_s >= point.median_solve_s > 0 for point in points)


def test_modes_have_libraries_of_their_own():
    resolved = resolve_scenario(load_scenario("paper-core-scarce"))
    paper = bench.in_mode(resolved, "paper", method="lattice")
    full = bench.in_mode(resolved, "full", method="lattice")
    assert {paper.scenario.library_name, full.scenario.library_name}.isdisjoint({resolved.scenario.library_name})
    assert paper.scenario.library_name != full.scenario.library_name
    assert paper.models == resolved.models
    assert full.scenario.allocation.pd_same_region
    assert all(Phase.AGGREGATED in model.phases for model in full.models)
    assert all(Phase.AGGREGATED in spec.phases for spec in full.scenario.models)
    # fp8 competes wherever a model has it; resolving the changed scenario gives the same
    assert [model.variants for model in full.models] == [("bf16", "fp8"), ("mxfp4",), ("bf16", "fp8")]
    again = resolve_scenario(Scenario.model_validate(full.scenario.model_dump()))
    assert [(model.variants, model.phases) for model in again.models] == [
        (model.variants, model.phases) for model in full.models
    ]


def test_variants_that_a_scenario_names_stay_in_full_mode():
    named = load_scenario("paper-core").model_dump()
    named["models"][0]["variant"], named["models"][2]["variants"] = "bf16", ["int4", "fp8"]
    full = bench.in_mode(resolve_scenario(Scenario.model_validate(named)), "full", method="lattice")
    assert [model.variants for model in full.models] == [("bf16",), ("mxfp4",), ("int4", "fp8")]


def test_only_a_random_walk_has_seeds():
    scarce = bench.with_supply_seed(resolve_scenario(load_scenario("paper-core-scarce")), 7)
    assert scarce.scenario.availability.seed == 7
    with pytest.raises(InputError, match="the same for every seed"):
        bench.with_supply_seed(resolve_scenario(load_scenario("paper-core")), 7)


def test_growth_and_gaps_are_drawn(monkeypatch):
    monkeypatch.setattr(bench, "GROWTH_MODELS", (1, 2))
    monkeypatch.setattr(bench, "GROWTH_REGIONS", (2,))
    growth = [asdict(point) for point in bench.growth(small_problem(available=40), seed=0)]
    gaps = [asdict(point) for point in bench.gap_over_time(lambda _: small_problem(), seeds=2, limits_s=(1.0, 2.0))]
    both = " ".join(ET.fromstring(allocation_chart("mine", growth, gaps)).itertext())
    assert "2 models in 2 regions" in both
    assert "gap proven within a time limit, 2 seeds" in both
    alone = " ".join(ET.fromstring(allocation_chart("mine", (), gaps)).itertext())
    assert "time of a solve" not in alone
    assert "Within 2 s: median gap 0.000%" in alone
