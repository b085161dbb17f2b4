"""Plans from measured profiles are simulated with the profiles' times; what cannot be is said, with the profile that lacks something."""

from __future__ import annotations

from datetime import date

import pytest

from artifacts.profiles import write_profile
from artifacts.store import open_store
from coral_core.catalog.hardware import load_catalog
from coral_core.clock import SystemClock
from coral_core.config.policies import scenario_policies
from coral_core.domain.hardware import split_market
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.perf.profile import Profile, ProfileKey, ProfilePoint
from coral_core.sim.profiled import profiled_timing, profiled_timings
from tasks.policy_plans import plan_epochs
from tasks.replay import fleet_of, replay, why_not_simulated
from tests.fakes.evaluation_cases import resolved, source_of

ENGINE = "vllm-0.32.0-bf16"
BOTH = (Phase.PREFILL, Phase.DECODE)
FIXED_S = 0.002
USED = ("capacity: {", f"capacity: {{profiles: {{engine: {ENGINE}}}, ")
LAYERS = 40


def layer_s(phase: Phase, requests: float, tokens: float) -> float:
    """Within what an L4 can do for a layer of phi-4, and far above what it takes: no estimate is like it."""
    read = 0.01 + 2e-5 * requests
    return read + (2e-6 * requests * tokens if phase is Phase.PREFILL else 1e-8 * requests * tokens)


def made(config: str, phases=BOTH, *, slower: float = 0.1) -> Profile:
    points = tuple(
        ProfilePoint(
            phase=phase,
            tp=1,
            requests=float(requests),
            tokens=float(tokens),
            layer_s=slower * layer_s(phase, requests, tokens),
            fixed_s=FIXED_S,
            cv_frac=0.03,
        )
        for phase in phases
        for requests in (1, 4, 16, 64)
        for tokens in (64, 256, 1024)
        if phase is Phase.DECODE or requests * tokens <= 4096
    )
    key = ProfileKey(model="phi-4", variant="bf16", config=config, engine="vllm", version="0.32.0")
    return Profile(key=key, points=points, source="made up", as_of=date(2026, 11, 30))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A store with profiles of these configurations, and the scenario that plans with them."""
    store = open_store(f"file://{tmp_path / 'store'}")
    monkeypatch.setenv("CORAL_STORE", store.url)

    def scenario(*profiles: Profile):
        for profile in profiles:
            write_profile(store, profile, time=SystemClock().now())
        return resolved(tmp_path, USED)

    return scenario


def test_a_plan_from_profiles_is_simulated_with_their_times(measured):
    scenario = measured(*(made(name) for name in ("1xL40S", "1xL4", "1xA10G")))
    assert why_not_simulated(scenario) == ""
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario)["coral"])
    fleet = fleet_of(scenario, plans)
    assert fleet.dropped == ()
    instances = fleet.timeline.instances
    assert {one.phase for one in instances} == set(BOTH)
    for one in instances:
        for s, held in enumerate(one.stages):
            for node in held.nodes:
                assert node.timing.depth == 1
                decode = node.timing.iteration_s(tokens=16, rows=16, kept_tokens=16 * 256)
                fixed_s = FIXED_S if s == 0 else 0.0
                assert decode == pytest.approx(fixed_s + held.layers * 0.1 * layer_s(Phase.DECODE, 16, 256), rel=0.02)
    assert max(node.max_batched_tokens for one in instances for held in one.stages for node in held.nodes) <= 4096
    found = replay(scenario, plans, seed=0, fleet=fleet)
    assert found.whole["phi-4"].attainment_frac > 0.7


def test_a_configuration_without_a_profile_keeps_its_estimate_beside_those_that_have_one(measured):
    scenario = measured(made("1xL4", slower=1.0))  # too slow for its bound
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario)["coral"])
    fleet = fleet_of(scenario, plans)
    assert fleet.dropped == ()
    used = {name for template in plans.templates.values() for name in template.placement.combination}
    assert used - {"1xL4"}, "this case is meant to use others too"
    assert {split_market(name)[0] for name in used} <= set(load_catalog("paper-core").configs)


@pytest.mark.parametrize(("has", "lacks"), [(Phase.DECODE, "prefill"), (Phase.PREFILL, "decode")])
def test_a_profile_of_one_phase_plans_but_is_not_simulated_and_says_why(measured, has, lacks):
    scenario = measured(made("1xL4", (has,)))
    reason = why_not_simulated(scenario)
    assert f"no {lacks} times of phi-4 on 1xL4 at TP 1" in reason
    assert "needs steps of both phases" in reason
    plans = plan_epochs(source_of(scenario), scenario_policies(scenario)["coral"])
    with pytest.raises(InputError, match="needs steps of both phases"):
        fleet_of(scenario, plans)


def test_a_phase_that_capacities_do_not_take_from_the_profile_needs_nothing_of_it():
    only_decode = made("1xL4", (Phase.DECODE,))
    assert profiled_timings({"1xL4": only_decode}, (Phase.PREFILL, Phase.AGGREGATED)) == {}
    both = profiled_timings({"1xL4": made("1xL4")}, (Phase.PREFILL, Phase.AGGREGATED))
    assert set(both) == {(Phase.PREFILL, "1xL4", 1), (Phase.AGGREGATED, "1xL4", 1)}


def test_the_largest_steps_are_those_that_were_measured():
    found = profiled_timing(made("1xL4"), 1)
    assert (found.most_requests, found.most_prompt_tokens) == (64.0, 4096.0)
