"""Laws of the baselines on problems that use every family at once: they keep what is asked, and never beat the joint program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.baselines.cauchy import UnsupportedFamilyError, cauchy
from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.policies import POLICIES
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

REGIONS, CONFIGS, SPOT = ("r0", "r1"), ("a", "b", "a@spot"), ("a@spot",)
MODELS, VARIANTS = ("m", "n"), ("bf16", "fp8")
PHASES = (Phase.PREFILL, Phase.DECODE)


def templates(draw):
    """One per model, phase, variant and configuration, and one mixed; throughput 0.15 to 0.9 of the demand."""
    kinds = [(m, p, v) for m in MODELS for p in PHASES for v in VARIANTS]
    shapes = [*np.eye(3, dtype=np.int64).tolist(), [1, 1, 0]]
    entries = [(*kind, shape) for kind in kinds for shape in shapes]
    return TemplateColumns(
        ids=tuple(f"t{i}" for i in range(len(entries))),
        models=tuple(entry[0] for entry in entries),
        phases=tuple(entry[1] for entry in entries),
        nodes=np.array([entry[3] for entry in entries]),
        throughput=np.array([draw(st.sampled_from([15.0, 30.0, 55.0, 90.0])) for _ in entries]),
        variants=tuple(entry[2] for entry in entries),
    )


def rows(draw, spare):
    fracs = {region: draw(st.sampled_from([0.0, 0.2, 0.5])) for region in REGIONS}
    found = []
    for model in MODELS:
        on_demand = draw(st.sampled_from([0.0, 0.4, 1.0]))
        regions = tuple(fracs.items()) if draw(st.booleans()) else ()
        spares = draw(st.integers(0, 1)) if spare else 0
        found += [
            DemandRow(
                model=model,
                phase=phase,
                tokens_per_s=100.0,
                on_demand_frac=on_demand,
                region_fracs=regions,
                spare_instances=spares,
                min_instances=draw(st.sampled_from([0, 0, 2])),
            )
            for phase in PHASES
        ]
    return tuple(found)


@st.composite
def problems(draw, *, spare=True, scarce=True):
    nodes = st.integers(0, 9) if scarce else st.just(60)
    price = [[draw(st.sampled_from([1.0, 1.3])), draw(st.sampled_from([1.1, 2.0])), 0.4] for _ in REGIONS]
    exclusions = [
        Exclusion(config="b", region="r1"),
        Exclusion(model="m", config="a", region="r0"),
        Exclusion(model="n", config="a@spot"),
    ]
    return AllocationProblem(
        regions=REGIONS,
        configs=CONFIGS,
        available=np.array([[draw(nodes) for _ in CONFIGS] for _ in REGIONS]),
        price_usd_per_h=np.array(price),
        templates=templates(draw),
        demand=rows(draw, spare),
        running=(Running(template="t0", region="r0", count=2),) if draw(st.booleans()) else (),
        exclusions=tuple(item for item in exclusions if draw(st.booleans())),
        preferences=(Preference(region="r1", price_factor=1.5),) if draw(st.booleans()) else (),
        spot_configs=SPOT,
        churn_k=0.25,
        options=AllocationOptions(
            pd_same_region=draw(st.booleans()),
            budget_usd_per_h=draw(st.sampled_from([None, 6.0, 25.0])) if scarce else None,
            gap_frac=1e-6,
            time_limit_s=600,
            solver="highs",
        ),
    )


def short(problem, result):
    """(instances missing from floors, missing fractions of the units): what comes before cost."""
    each = sum(item.frac for item in result.shortfall)
    return sum(result.floor_deficit.values()), each


def holds_as_asked(problem, result):
    """Checks that share nothing with the solve: the plan is within what was asked, and its own figures are right."""
    verify_allocation(problem, result)
    index = {name: t for t, name in enumerate(problem.templates.ids)}
    for item in result.instances:
        t = index[item.template]
        assert (problem.templates.nodes[t] > 0).sum() == 1
        for ban in problem.exclusions:
            named = (
                ban.model in (None, problem.templates.models[t]),
                ban.config is None or problem.templates.nodes[t][problem.configs.index(ban.config)] > 0,
                ban.region in (None, item.region),
            )
            assert not all(named)
    if problem.options.budget_usd_per_h is not None:
        assert result.cost_usd_per_h <= problem.options.budget_usd_per_h * (1 + 1e-8)


@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_greed_keeps_every_family_and_never_beats_the_joint_program(problem):
    greedy, joint = homo(problem), homo_joint(problem)
    holds_as_asked(problem, greedy)
    holds_as_asked(problem, joint)
    mine, best = short(problem, greedy), short(problem, joint)
    assert mine[0] >= best[0]
    if mine[0] == best[0]:
        assert mine[1] >= best[1] - 1e-6
        if abs(mine[1] - best[1]) < 1e-9:
            assert greedy.objective_usd_per_h >= joint.bound_usd_per_h - 1e-6


@given(problem=problems(spare=False))
@settings(max_examples=25, deadline=None)
def test_combos_keep_every_family_they_know(problem):
    holds_as_asked(problem, cauchy(problem))


@given(problem=problems(scarce=False))
@settings(max_examples=12, deadline=None)
def test_with_plenty_of_nodes_and_money_everything_asked_is_met(problem):
    problem = replace(problem, exclusions=())
    assert homo(problem).full
    without_spare = replace(problem, demand=tuple(replace(row, spare_instances=0) for row in problem.demand))
    assert cauchy(without_spare).full


@given(problem=problems())
@settings(max_examples=8, deadline=None)
def test_the_published_policy_keeps_every_family_but_the_shared_region(problem):
    free = replace(problem, options=replace(problem.options, pd_same_region=False))
    verify_allocation(free, POLICIES["coral_paper"].solve(problem))


def test_a_family_that_cannot_be_kept_is_an_error_and_names_the_model():
    asked = AllocationProblem(
        regions=("r0",),
        configs=("a",),
        available=np.array([[9]]),
        price_usd_per_h=np.array([[1.0]]),
        templates=TemplateColumns(
            ids=("t",), models=("m",), phases=(Phase.DECODE,), nodes=np.array([[1]]), throughput=np.array([50.0])
        ),
        demand=(DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=100.0, spare_instances=1),),
    )
    with pytest.raises(UnsupportedFamilyError, match="cauchy has no way to keep a spare instance, which m asks for"):
        cauchy(asked)
    assert [item.count for item in homo(asked).instances] == [3]
