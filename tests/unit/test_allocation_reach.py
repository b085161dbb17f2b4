"""Demand far beyond all supply: what little there is still goes to where it counts most."""

from __future__ import annotations

import json

import pytest

from coral_core.allocation import solve_allocation
from coral_core.config.allocation_file import read_allocation_file


@pytest.fixture
def solve(tmp_path):
    def call(document):
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(document))
        (problem,), _ = read_allocation_file(path)
        return solve_allocation(problem)

    return call


def template(name, phase, nodes, throughput):
    return {"id": name, "model": "m", "phase": phase, "nodes": {"c": nodes}, "throughput_tokens_per_s": throughput}


def region(available):
    return {"r": {"c": {"available": available, "price_usd_per_h": 1.2}}}


@pytest.mark.parametrize("demand_tokens_per_s", [1e3, 1e6, 1e9, 1e12])
def test_every_node_is_used_whatever_is_asked(solve, demand_tokens_per_s):
    result = solve(
        {
            "regions": region(20),
            "templates": [template("t", "decode", 2, 100.0)],
            "demand": [{"model": "m", "phase": "decode", "tokens_per_s": demand_tokens_per_s}],
            "churn_k": 0.1,
        }
    )
    assert [(item.template, item.count) for item in result.instances] == [("t", 10)]
    assert result.shortfall[0].frac == pytest.approx(1 - min(1000 / demand_tokens_per_s, 1), abs=1e-12)
    assert result.gap_frac == 0


def test_the_larger_part_of_its_own_demand_goes_first(solve):
    # Two nodes: each gives 1e-6 of the one demand or 1e-9 of the other.
    result = solve(
        {
            "regions": region(2),
            "templates": [template("p", "prefill", 1, 1e-6), template("d", "decode", 1, 1.0)],
            "demand": [
                {"model": "m", "phase": "prefill", "tokens_per_s": 1.0},
                {"model": "m", "phase": "decode", "tokens_per_s": 1e9},
            ],
        }
    )
    assert [(item.template, item.count) for item in result.instances] == [("p", 2)]


def test_a_row_within_reach_is_met_beside_one_that_is_not(solve):
    result = solve(
        {
            "regions": region(4),
            "templates": [template("p", "prefill", 1, 100.0), template("d", "decode", 1, 100.0)],
            "demand": [
                {"model": "m", "phase": "prefill", "tokens_per_s": 150.0},
                {"model": "m", "phase": "decode", "tokens_per_s": 1e7},
            ],
        }
    )
    assert sorted((item.template, item.count) for item in result.instances) == [("d", 2), ("p", 2)]
    assert result.shortfall[0].frac == 0


def test_what_gives_next_to_nothing_leaves_a_demand_that_can_be_stated(solve):
    result = solve(
        {
            "regions": {
                "r": {"c": {"available": 2, "price_usd_per_h": 1.2}, "e": {"available": 1, "price_usd_per_h": 1}}
            },
            "templates": [
                template("t", "decode", 1, 1e-300),
                template("mixed", "decode", 1, 1e-299) | {"nodes": {"c": 1, "e": 1}},
            ],
            "demand": [{"model": "m", "phase": "decode", "tokens_per_s": 1000.0}],
        }
    )
    assert result.shortfall[0].frac == 1.0
