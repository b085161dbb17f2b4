"""Plans with several variants and with spot nodes through an evaluation: planned, kept going, priced and simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import node_prices
from coral_core.domain.hardware import Market, split_market
from coral_core.sim import LifecycleEvent, LifecycleKind
from tasks.evaluation_facts import evaluation_facts
from tasks.interruptions import Interruptions, interruptions
from tasks.policy_plans import instance_counts, plan_epochs, template_nodes, template_prices
from tasks.replay import fleet_of, replay
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


def with_rate(folder, rate, *changes):
    offer = "{price_frac: 0.4, "
    return resolved(
        folder, *((old, new.replace(offer, f"{offer}interruptions_per_h: {rate}, ")) for old, new in LEVERS), *changes
    )


def line_of(scenario):
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario, ["coral"])["coral"])
    return plans, fleet_of(scenario, plans).timeline


def test_spot_instances_are_lost_at_their_rate_and_start_anew_at_once(tmp_path):
    scenario = with_rate(tmp_path, 60)
    plans, line = line_of(scenario)
    spot = {one.name: one for one in line.instances if one.template.endswith("@spot")}
    assert spot
    hours, seeds = 1.0, 40
    lost = dict.fromkeys(spot, 0)
    for seed in range(seeds):
        found = interruptions(scenario, line, plans.templates, end_s=hours * 3600, seed=seed)
        assert found.notes == ()
        assert list(found.events) == sorted(found.events, key=lambda event: event.at_s)
        for name, one in spot.items():
            own = [event for event in found.events if event.instance == name]
            kinds = [event.kind for event in own]
            assert kinds == [LifecycleKind.DRAIN, LifecycleKind.FAIL, LifecycleKind.START] * (len(own) // 3)
            for notice, loss, start in zip(own[::3], own[1::3], own[2::3], strict=True):
                assert loss.at_s - 120 - 1e-9 <= notice.at_s <= loss.at_s == start.at_s < hours * 3600
            starts = [0.0, *(event.at_s + one.boot_s for event in own[2::3])]
            assert all(notice.at_s >= ready - 1e-9 for ready, notice in zip(starts, own[::3], strict=False))
            lost[name] += len(own) // 3
        assert {event.instance for event in found.events} <= set(spot)
    for name, one in spot.items():
        nodes = sum(plans.templates[one.template].placement.combination.values())
        expected = hours * 3600 / (60 / nodes + one.boot_s) * seeds  # a renewal process: time to loss, then to boot
        assert lost[name] == pytest.approx(expected, rel=0.15)


def test_losses_end_where_a_group_begins_to_be_drained_and_unknown_rates_are_told(tmp_path, scenario):
    falling = "\nallocation:"
    supply = "\navailability: {kind: trace, file: supply.csv}\nallocation:"
    rows = [f"0,{region},{config},9" for region in ("us-east-2", "ap-northeast-2") for config in ("1xL40S", "1xL4")]
    (tmp_path / "supply.csv").write_text("start_s,region,config,nodes\n" + "\n".join(rows) + "\n")
    shrinking = with_rate(tmp_path, 60, (falling, supply))
    plans, line = line_of(shrinking)
    one = next(one for one in line.instances if one.template.endswith("@spot"))
    drain = LifecycleEvent(at_s=40.0, kind=LifecycleKind.DRAIN_ONE, template=one.template, region=one.region)
    cut = interruptions(shrinking, replace(line, lifecycle=(drain,)), plans.templates, end_s=3600, seed=0)
    assert any("is not interrupted after 40 s" in note for note in cut.notes)
    assert all(event.at_s < 40 for event in cut.events if event.instance == one.name)

    plans, line = line_of(scenario)
    quiet = interruptions(scenario, line, plans.templates, end_s=3600, seed=0)
    assert quiet.events == ()
    assert quiet.notes
    assert all("is not known: it never is" in note for note in quiet.notes)
    assert replay(scenario, plans, seed=0).notes == quiet.notes
    never = with_rate(tmp_path, 0)
    plans, line = line_of(never)
    assert interruptions(never, line, plans.templates, end_s=3600, seed=0) == Interruptions(events=(), notes=())


def test_lost_nodes_cost_service_and_the_same_seed_loses_the_same(tmp_path):
    frequent, none = with_rate(tmp_path, 60), with_rate(tmp_path, 0)
    runs = {}
    for scenario in (frequent, none):
        plans, _ = line_of(scenario)
        runs[scenario is frequent] = [replay(scenario, plans, seed=seed) for seed in (0, 1)]
        if scenario is frequent:
            assert replay(scenario, plans, seed=0).digest == runs[True][0].digest
    good = {lost: sum(run.whole["*"].goodput_tokens_per_s for run in found) for lost, found in runs.items()}
    assert good[True] < good[False]
    for run in runs[True]:
        whole = run.whole["*"]
        ended = whole.done_requests + whole.failed_requests + whole.rejected_requests + whole.unfinished_requests
        assert ended == whole.offered_requests
