"""A quota that configurations share is recorded with a plan, and replayed and explained from the record alone."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

from artifacts.canonical import canonical_json
from artifacts.store import open_store
from coral_core.allocation.explain import explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.cli.work import resolved_scenario
from coral_core.domain.allocation import Pool
from tasks.executor import InlineExecutor
from tasks.plan import make_plan, recorded_problem, replay_plan
from tasks.template_source import fresh_library


def test_a_plan_with_a_shared_quota_is_recorded_and_replayed(tmp_path):
    resolved = resolved_scenario("tiny")
    snapshot = fresh_library(resolved, open_store(str(tmp_path)), InlineExecutor(processes=1))
    free = make_plan(resolved, snapshot, fleet="blue", now=datetime(2030, 1, 1, tzinfo=UTC))
    region = free.problem.regions[0]
    used = sum(
        item.count * int(free.problem.templates.nodes[free.problem.templates.ids.index(item.template)].sum())
        for item in free.result.instances
        if item.region == region
    )
    units = tuple((config, 4.0) for config in free.problem.configs)
    pools = tuple(
        Pool(name="q", region=name, limit=4.0 * (used - 1) if name == region else 4e9, units=units)
        for name in free.problem.regions
    )
    tight = make_plan(
        resolved,
        snapshot,
        fleet="blue",
        now=datetime(2030, 1, 1, tzinfo=UTC),
        adjust=lambda problem: replace(problem, pools=pools),
    )
    assert tight.result.objective_usd_per_h >= free.result.objective_usd_per_h or not tight.result.full
    decision = json.loads(canonical_json(tight.decision))
    problem = recorded_problem(decision, snapshot)
    assert problem.pools == pools
    again = replay_plan(decision, snapshot)
    assert again.objective_usd_per_h == tight.result.objective_usd_per_h
    limits = [
        limit for limit in explain_allocation(problem, solve_allocation(problem)).limits if limit.family == "quota"
    ]
    assert {limit.name for limit in limits} <= {(name, "q") for name in problem.regions}
    assert all(limit.used <= limit.limit for limit in limits)
    assert (region, "q") in {limit.name for limit in limits}
