"""A policy through the epochs of a scenario: plans in turn, one fleet, the same requests for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.config.policies import scenario_policies
from coral_core.config.requests import request_traces
from coral_core.config.resolve import allocation_problem
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError
from coral_core.sim import SimRequests
from tasks.policy_plans import instance_counts, plan_epochs, template_prices
from tasks.replay import fleet_of, latest_good_finish_s, replay
from tasks.template_source import needed_methods, policy_method, with_method
from tests.fakes.evaluation_cases import resolved, source_of

CHAINS = (
    ("configs: [1xL40S, 1xL4, 1xA10G]", "configs: [1xL4]"),
    ("requests_per_s: 4", "requests_per_s: 0.2\n    phases: [aggregated]"),
    ("library: {", "library: {name: micro-chains, "),
)
STILL = ("count: 2", "count: 1")
FALLING = ("epochs:", "availability: {kind: trace, file: supply.csv}\nepochs:")


@pytest.fixture
def scenario(tmp_path):
    return resolved(tmp_path)


def test_policies_of_the_published_method_never_get_free_splits(scenario):
    policies = scenario_policies(scenario)
    assert {name: policy_method(scenario, one) for name, one in policies.items()} == {
        "coral": "lattice-free",
        "coral_paper": "lattice",
        "homo_joint": "lattice",
        "homo": "lattice",
    }
    assert needed_methods(scenario, list(policies.values())) == ("lattice-free", "lattice")
    other = with_method(scenario, "lattice")
    assert (other.scenario.library_name, other.scenario.library.method) == ("micro-lattice", "lattice")
    assert with_method(scenario, "lattice-free") is scenario


def test_supply_that_follows_an_ample_plan_is_that_of_coral_plan(tmp_path):
    scarce = resolved(
        tmp_path, ("epochs:", "availability: {kind: random_walk, seed: 1, memory_frac_of_ample: 2}\nepochs:")
    )
    policies = scenario_policies(scarce, ["coral", "coral_paper"])
    assert needed_methods(scarce, [policies["coral"]]) == ("lattice-free",)
    assert needed_methods(scarce, [policies["coral_paper"]]) == ("lattice", "lattice-free")
    source = source_of(scarce)
    planned = allocation_problem(scarce, source.columns["lattice-free"])
    assert source.supply.any()
    assert (planned.available == source.supply[0]).all()
    # A plan that counts on less of its capacity holds more nodes, and supply that is a multiple of it grows with it.
    assert source.supply_at({Phase.PREFILL: 0.1, Phase.DECODE: 0.1}).sum() > source.supply.sum()
    assert (source.supply_at({Phase.PREFILL: 0.6, Phase.DECODE: 0.6}) == source.supply).all()


def test_a_policy_is_warm_before_its_time_is_taken(tmp_path):
    source = source_of(resolved(tmp_path))
    asked = []
    coral = scenario_policies(source.resolved, ["coral"])["coral"]

    def solve(problem):
        asked.append(len(problem.templates))
        return coral.solve(problem)

    policy = replace(coral, name="not asked before", solve=solve)
    plan_epochs(source, policy)
    plan_epochs(source, policy)
    epochs = source.resolved.scenario.epochs.count
    assert len(asked) == 1 + 2 * epochs
    assert asked[0] <= min(asked[1:])


def test_a_plan_that_stays_is_paid_for_as_planned_and_charged_no_start_up_again(scenario):
    source = source_of(scenario)
    plans = plan_epochs(source, scenario_policies(scenario)["coral"])
    first, second = (epoch.result for epoch in plans.epochs)
    assert first.instances == second.instances
    assert first.churn_usd_per_h > 0
    assert second.churn_usd_per_h == pytest.approx(0, abs=1e-9)
    found = replay(scenario, plans, seed=0)
    assert found.billed_usd_per_h == pytest.approx([first.cost_usd_per_h] * 2)
    prices = template_prices(scenario, plans)
    assert sum(prices[key] * n for key, n in plans.epochs[0].counts.items()) == pytest.approx(first.cost_usd_per_h)
    counts = instance_counts(plans, 0)
    assert counts.instances == sum(item.count for item in first.instances)
    assert counts.nodes is not None
    assert counts.nodes >= counts.instances > 0
    unknown = instance_counts(replace(plans, templates={}), 0)
    assert (unknown.instances, unknown.mixed_instances, unknown.nodes) == (counts.instances, None, None)


def test_every_request_is_counted_once_and_all_policies_meet_the_same(scenario):
    source = source_of(scenario)
    sent = request_traces(scenario, seed=3)["phi-4"]
    offered = set()
    for policy in scenario_policies(scenario, ["coral", "homo"]).values():
        found = replay(scenario, plan_epochs(source, policy), seed=3)
        whole = found.whole["phi-4"]
        assert whole.offered_requests == len(sent) == sum(one["phi-4"].offered_requests for one in found.epochs)
        ended = whole.done_requests + whole.failed_requests + whole.rejected_requests + whole.unfinished_requests
        assert ended == len(sent)
        assert 0 < whole.goodput_tokens_per_s <= whole.offered_tokens_per_s
        offered.add(whole.offered_tokens_per_s)
    assert len(offered) == 1


def test_the_same_seed_gives_the_same_run_and_another_gives_another(scenario):
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario)["coral"])
    fleet = fleet_of(scenario, plans)
    first, again, other = (replay(scenario, plans, seed=seed, fleet=fleet) for seed in (0, 0, 1))
    assert first.digest == again.digest != other.digest


def test_less_utilisation_rents_more_and_serves_no_less(tmp_path):
    busy = resolved(tmp_path, STILL, ("requests_per_s: 4", "requests_per_s: 20"))
    source, policy = source_of(busy), scenario_policies(busy)["coral"]
    costs, good = [], []
    for frac in (1.0, 0.3):
        plans = plan_epochs(source, policy, utilization={Phase.PREFILL: frac, Phase.DECODE: frac})
        costs.append(plans.epochs[0].result.cost_usd_per_h)
        good.append(replay(busy, plans, seed=0).whole["*"].attainment_frac)
    assert costs[0] < costs[1]
    assert good[0] < good[1]
    own = plan_epochs(source, policy, utilization={Phase.PREFILL: 0.6, Phase.DECODE: 0.6})
    assert own.epochs[0].result.instances == plan_epochs(source, policy).epochs[0].result.instances
    with pytest.raises(InputError, match="not in"):
        plan_epochs(source, policy, utilization={Phase.PREFILL: 1.5})


def test_nodes_that_run_stay_ours_when_the_market_has_none_left(tmp_path):
    rows = [f"{at},{region},1xL40S,9" for at, region in ((0, "us-east-2"), (15, "ap-northeast-2"))]
    rows.append("15,us-east-2,1xL40S,0")
    (tmp_path / "supply.csv").write_text("start_s,region,config,nodes\n" + "\n".join(sorted(rows)) + "\n")
    moving = resolved(tmp_path, FALLING)
    plans = plan_epochs(source_of(moving), scenario_policies(moving)["coral"])
    first, second = (epoch.counts for epoch in plans.epochs)
    assert first == second
    assert {region for _, region in first} == {"us-east-2"}
    assert fleet_of(moving, plans).timeline.lifecycle == ()
    held, market = plans.supply[1], source_of(moving).supply[1]
    assert (held >= market).all()
    assert held.sum() - market.sum() == instance_counts(plans, 0).nodes


def test_a_fleet_that_is_too_small_refuses_some_and_serves_others_in_time(tmp_path):
    short = resolved(
        tmp_path,
        STILL,
        ("requests_per_s: 4", "requests_per_s: 40"),
        ("epochs:", "availability: {kind: constant, nodes: {us-east-2: {1xL40S: 2}}}\nepochs:"),
    )
    whole = replay(short, plan_epochs(source_of(short), scenario_policies(short)["coral"]), seed=0).whole["*"]
    assert whole.rejected_requests > 0
    assert whole.within_slo_requests > 0


def test_without_supply_nothing_is_served_and_every_request_is_still_counted(tmp_path):
    none = resolved(tmp_path, ("epochs:", "availability: {kind: constant, nodes: {}}\nepochs:"))
    found = replay(none, plan_epochs(source_of(none), scenario_policies(none)["coral"]), seed=0)
    assert found.whole["*"].goodput_tokens_per_s == 0
    whole = found.whole["*"]
    assert whole.unfinished_requests + whole.rejected_requests == whole.offered_requests > 0
    assert found.billed_usd_per_h == (0.0, 0.0)


def test_prefill_that_no_decode_takes_over_is_left_out_and_named(scenario):
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario)["coral"])
    prefill = {name for name, template in plans.templates.items() if template.phase is Phase.PREFILL}
    half = replace(
        plans,
        epochs=tuple(
            replace(
                epoch,
                result=replace(
                    epoch.result,
                    instances=tuple(item for item in epoch.result.instances if item.template in prefill),
                ),
            )
            for epoch in plans.epochs
        ),
    )
    fleet = fleet_of(scenario, half)
    assert fleet.timeline.instances == ()
    assert all("no decode to hand over to" in text for text in fleet.dropped)
    assert len(fleet.dropped) == len(prefill)


def test_no_requests_and_measured_layer_times_are_refused(tmp_path, monkeypatch):
    idle = resolved(tmp_path, ("requests_per_s: 4", "requests_per_s: 0"))
    with pytest.raises(InputError, match="no request arrives"):
        replay(idle, plan_epochs(source_of(idle), scenario_policies(idle)["coral"]), seed=0)
    monkeypatch.setattr("tasks.replay.why_not_simulated", lambda _: "no timing")
    plans = plan_epochs(source_of(idle), scenario_policies(idle)["coral"])
    with pytest.raises(InputError, match="plans of coral are not simulated: no timing"):
        fleet_of(idle, plans)


def test_the_run_goes_on_as_long_as_a_request_can_be_in_time():
    requests = SimRequests(
        model=np.array([0, 1]),
        arrival_s=np.array([5.0, 9.0]),
        input_tokens=np.array([1, 1]),
        output_tokens=np.array([100, 2]),
    )
    slos = [Slo(ttft_s=1.0, tpot_s=0.1), Slo(ttft_s=2.0, tpot_s=0.5)]
    assert latest_good_finish_s(requests, slos, 10.0) == pytest.approx(5 + 1 + 10 + 1)
    assert latest_good_finish_s(requests, slos, 60.0) == pytest.approx(61)


def test_only_what_the_scenarios_runtimes_can_run_is_planned_with(tmp_path):
    """Stock vLLM hands no KV over between pipelines, and has one node in a stage."""
    vllm = resolved(tmp_path, ("library: {", "runtimes: [vllm]\nlibrary: {name: micro-vllm, "))
    for policy in scenario_policies(vllm).values():
        plans = plan_epochs(source_of(vllm), policy)
        assert plans.templates
        assert {len(one.placement.stages) for one in plans.templates.values()} == {1}
        assert {len(stage.nodes) for one in plans.templates.values() for stage in one.placement.stages} == {1}
    free = resolved(tmp_path)
    every, usable = (source_of(one).rows["lattice-free"].num_rows for one in (free, vllm))
    assert usable < every


@pytest.mark.parametrize(
    ("runtimes", "by_vllm"), [("", False), ("runtimes: [coral]\n", False), ("runtimes: [vllm, coral]\n", True)]
)
def test_steps_of_a_pipeline_are_formed_as_its_runtime_forms_them(tmp_path, runtimes, by_vllm):
    name = "library: {name: micro-chains" + "-".join(word for word in ("coral", "vllm") if word in runtimes)
    scenario = resolved(tmp_path, *CHAINS, ("library: {name: micro-chains", runtimes + name))
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario, ["coral"])["coral"])
    chains = [one for one in fleet_of(scenario, plans).timeline.instances if len(one.stages) > 1]
    assert chains
    assert {one.balanced_steps for one in chains} == {not by_vllm}
    if by_vllm:
        assert {one.micro_batches for one in chains} == {2}
    assert replay(scenario, plans, seed=0).whole["*"].goodput_tokens_per_s > 0
