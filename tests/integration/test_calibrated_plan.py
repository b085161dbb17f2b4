"""The shipped headroom does what it is for: the plan serves its demand within the latency bounds, simulated."""

from __future__ import annotations

import pytest

from artifacts.store import open_store
from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import CapacitySpec, load_scenario
from tasks.executor import InlineExecutor
from tasks.policy_plans import plan_epochs
from tasks.replay import replay
from tasks.template_source import TemplateSource, fresh_library, needed_methods

GOAL_FRAC = 0.99


def planned_and_run(capacity: CapacitySpec | None = None):
    """Cost of the plan of `tiny`, and each model's goodput over what was asked of it."""
    scenario = load_scenario("tiny")
    if capacity is not None:
        scenario = scenario.model_copy(update={"capacity": capacity})
    resolved = resolve_scenario(scenario)
    coral = scenario_policies(resolved, ["coral"])["coral"]
    (method,) = needed_methods(resolved, [coral])
    library = fresh_library(resolved, open_store("memory://calibrated-plan"), InlineExecutor())
    plans = plan_epochs(TemplateSource(resolved, {method: library}), coral)
    metrics = replay(resolved, plans, seed=0).whole
    shares = {
        model: one.goodput_tokens_per_s / one.offered_tokens_per_s for model, one in metrics.items() if model != "*"
    }
    return plans.epochs[0].result.cost_usd_per_h, shares


@pytest.fixture(scope="module")
def with_headroom():
    return planned_and_run()


def test_every_model_of_a_calibrated_plan_gets_its_demand_within_its_bounds(with_headroom):
    _, shares = with_headroom
    assert len(shares) == 3
    assert min(shares.values()) >= GOAL_FRAC


def test_without_headroom_the_plan_is_cheaper_and_every_model_misses_its_goal(with_headroom):
    cost, shares = planned_and_run(CapacitySpec())
    assert cost < with_headroom[0]
    assert max(shares.values()) < GOAL_FRAC
    assert min(shares.values()) < 0.5
