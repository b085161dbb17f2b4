"""Plans with several variants and with spot nodes through an evaluation: planned, kept going, priced and simulated."""

from __future__ import annotations

import numpy as np
import pytest

from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import node_prices
from coral_core.domain.hardware import Market, split_market
from tasks.evaluation_facts import evaluation_facts
from tasks.replay import fleet_of, instance_counts, plan_epochs, replay, template_nodes, template_prices
from tests.fakes.evaluation_cases import resolved, source_of

LEVERS = (
    ("  - model: phi-4\n", "  - model: phi-4\n    variants: [bf16, fp8]\n    on_demand_frac: 0.5\n"),
    ("requests_per_s: 4", "requests_per_s: 20"),
    ("library: {", "library: {name: micro-variants, "),
    (
        "allocation:",
        "spot: {nodes: 2, default: {price_frac: 0.4, source: test, as_of: 2026-11-01}}\nallocation:",
    ),
)


@pytest.fixture
def scenario(tmp_path):
    return resolved(tmp_path, *LEVERS)


@pytest.mark.parametrize("name", ["coral", "coral_paper", "homo_joint", "homo", "cauchy"])
def test_every_policy_is_simulated_on_both_markets_and_paid_at_their_prices(scenario, name):
    source = source_of(scenario)
    assert source.supply.shape == (2, 2, 6)
    assert (source.supply[:, :, 3:] <= 2).all()
    plans = plan_epochs(source, scenario_policies(scenario, [name])[name])
    first, second = (epoch.result for epoch in plans.epochs)
    assert first.full
    # the fleet of the first epoch is known by its names in both markets, and kept
    assert second.churn_usd_per_h == pytest.approx(0, abs=1e-9)
    markets = {split_market(item.template)[1] for item in first.instances}
    assert markets == {Market.ON_DEMAND, Market.SPOT}

    prices, nodes, table = template_prices(scenario, plans), template_nodes(scenario, plans), node_prices(scenario)
    for template, region in plans.epochs[0].counts:
        on_demand, spot = nodes[template][:3], nodes[template][3:]
        assert not (on_demand.any() and spot.any())
        assert spot.any() == (split_market(template)[1] is Market.SPOT)
        row = np.nan_to_num(table[scenario.scenario.regions.index(region)])
        assert prices[template, region] == pytest.approx(float(nodes[template] @ row))
    assert sum(prices[key] * n for key, n in plans.epochs[0].counts.items()) == pytest.approx(first.cost_usd_per_h)
    assert instance_counts(plans, 0).nodes is not None

    fleet = fleet_of(scenario, plans)
    assert fleet.dropped == ()
    found = replay(scenario, plans, seed=0, fleet=fleet)
    assert found.billed_usd_per_h == pytest.approx([first.cost_usd_per_h] * 2)
    assert found.whole["*"].attainment_frac > 0.5


def test_narrow_weights_are_chosen_where_allowed_and_cost_less(tmp_path, scenario):
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario, ["coral"])["coral"])
    wide = resolved(
        tmp_path,
        *((old, new.replace("[bf16, fp8]", "[bf16]").replace("micro-variants", "micro-wide")) for old, new in LEVERS),
    )
    dear = plan_epochs(source_of(wide), scenario_policies(wide, ["coral"])["coral"])
    assert {template.variant for template in plans.templates.values()} == {"fp8"}
    assert {template.variant for template in dear.templates.values()} == {"bf16"}
    assert plans.epochs[0].result.cost_usd_per_h < dear.epochs[0].result.cost_usd_per_h


def test_an_evaluation_states_spot_prices_and_where_they_come_from(scenario):
    facts = evaluation_facts(source_of(scenario))
    assert facts["nodes"].keys() == set(scenario.offers)
    for name in ("1xL40S", "1xL4", "1xA10G"):
        own, spot = facts["nodes"][name], facts["nodes"][f"{name}@spot"]
        assert (own["gpu"], own["gpu_count"]) == (spot["gpu"], spot["gpu_count"])
        for region, price in own["price_usd_per_h"].items():
            assert spot["price_usd_per_h"][region] == pytest.approx(0.4 * price)
    assert "test" in facts["price_sources"]
    assert facts["price_as_of"] <= "2026-11-01"
