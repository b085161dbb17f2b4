"""From what runs to the next plan: service that a change costs while new instances start is weighed against what it brings."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.assess import running_counts
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.policies import policy
from coral_core.allocation.transition import holding_what_runs, solve_from_running
from coral_core.allocation.verify import verify_allocation
from coral_core.config.allocation_file import read_allocation_file
from tests.fakes.allocation_cases import documents

TIE = 1e-7


def document(*, small, large, running, tokens_per_s=10.0, churn_k=0.1, **fields):
    """One model, served by `a` (5 tokens/s on one small node) or `b` (9 tokens/s on a small node and a large one)."""
    return {
        "regions": {
            "r": {
                "small": {"available": small, "price_usd_per_h": 1.0},
                "large": {"available": large, "price_usd_per_h": 1.0},
            }
        },
        "templates": [
            {"id": "a", "model": "m", "phase": "decode", "nodes": {"small": 1}, "throughput_tokens_per_s": 5.0},
            {
                "id": "b",
                "model": "m",
                "phase": "decode",
                "nodes": {"small": 1, "large": 1},
                "throughput_tokens_per_s": 9.0,
            },
        ],
        "demand": [{"model": "m", "phase": "decode", "tokens_per_s": tokens_per_s, **fields}],
        "running": [{"template": name, "region": "r", "count": n} for name, n in running.items()],
        "churn_k": churn_k,
        "options": {},
    }


def problem_of(doc, path):
    path.write_text(json.dumps(doc))
    problems, _ = read_allocation_file(path)
    return problems[0]


def planned(doc, tmp_path):
    problem = problem_of(doc, tmp_path / "problem.json")
    result = solve_from_running(problem, solve_allocation)
    verify_allocation(problem, result)
    return {item.template: item.count for item in result.instances}


def test_a_change_is_made_where_it_brings_more_than_it_costs_while_it_starts(tmp_path):
    # Over the interval: 0.5 missing if it stays, 0.1 x 1 + 0.9 x 0.1 = 0.19 if it changes.
    assert planned(document(small=1, large=1, running={"a": 1}), tmp_path) == {"b": 1}
    # Started anew for 60% of the interval: 0.6 x 1 + 0.4 x 0.1 = 0.64.
    assert planned(document(small=1, large=1, running={"a": 1}, churn_k=0.6), tmp_path) == {"a": 1}


def test_the_old_that_fits_beside_the_new_costs_no_service(tmp_path):
    doc = document(small=2, large=1, running={"a": 1}, tokens_per_s=9.0, churn_k=0.6)
    doc["regions"]["r"]["small"]["price_usd_per_h"] = 5.0
    assert planned(doc, tmp_path) == {"b": 1}
    # With no node beside it, it is kept though it leaves 4 of 9 unmet: changing would leave 0.6.
    doc["regions"]["r"]["small"]["available"] = 1
    assert planned(doc, tmp_path) == {"a": 1}


def test_what_runs_is_kept_and_more_is_put_on_top_where_all_anew_would_serve_too_little_meanwhile(tmp_path):
    # All anew: 2 b for 18 of 20. On top: b beside a for 14 of 20.
    doc = document(small=2, large=2, running={"a": 1}, tokens_per_s=20.0, churn_k=0.6)
    assert planned(doc, tmp_path) == {"a": 1, "b": 1}
    assert planned({**doc, "churn_k": 0.05}, tmp_path) == {"b": 2}
    # A cap on instances cannot be split, so what runs stays as it is rather than be stopped.
    capped = document(small=1, large=2, running={"a": 1}, tokens_per_s=20.0, churn_k=0.9, max_instances=1)
    assert planned(capped, tmp_path) == {"a": 1}


def test_a_budget_and_a_floor_hold_for_what_is_put_on_top(tmp_path):
    doc = document(small=2, large=2, running={"a": 1}, tokens_per_s=20.0, churn_k=0.6, min_instances=2)
    assert planned({**doc, "options": {"budget_usd_per_h": 3.5}}, tmp_path) == {"a": 1, "b": 1}
    assert planned({**doc, "options": {"budget_usd_per_h": 2.5}}, tmp_path) == {"a": 2}


def test_a_market_that_sells_fewer_nodes_takes_none_back(tmp_path):
    problem = problem_of(document(small=0, large=3, running={"a": 2}), tmp_path / "problem.json")
    assert holding_what_runs(problem).available.tolist() == [[2, 3]]


def test_spot_nodes_may_be_taken_back(tmp_path):
    problem = problem_of(document(small=0, large=3, running={"a": 2}), tmp_path / "problem.json")
    problem = replace(problem, spot_configs=("small",))
    assert holding_what_runs(problem).available.tolist() == [[0, 3]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_plans_are_valid_and_what_already_serves_all_is_never_stopped(tmp_path_factory, data):
    doc = data.draw(documents())
    problem = holding_what_runs(problem_of(doc, tmp_path_factory.mktemp("case") / "problem.json"))
    for solve in (solve_allocation, policy("homo").solve):
        free, kept = solve(problem), solve_from_running(problem, solve)
        verify_allocation(problem, kept)
        assert kept.method == free.method
        if not running_counts(problem).any():
            assert kept.instances == free.instances
        if kept.instances != free.instances:
            lacking = [sum(result.floor_deficit.values()) for result in (kept, free)]
            assert lacking[0] <= lacking[1]
            # it was kept to lose less meanwhile, so something of what runs is in it
            assert {(x.template, x.region) for x in kept.instances} & {(x.template, x.region) for x in problem.running}
