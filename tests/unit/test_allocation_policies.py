"""The registry of policies: one signature, verified answers, honest names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.allocation.policies import POLICIES, policy
from coral_core.allocation.verify import verify_allocation
from coral_core.domain.allocation import AllocationOptions, AllocationProblem, DemandRow, TemplateColumns
from coral_core.domain.workload import Phase
from coral_core.errors import InputError

SPLIT = AllocationProblem(
    regions=("r0", "r1"),
    configs=("a", "b"),
    available=np.array([[9, 0], [0, 9]]),
    price_usd_per_h=np.array([[1.0, 1.0], [1.0, 1.0]]),
    templates=TemplateColumns(
        ids=("p", "d", "both"),
        models=("m",) * 3,
        phases=(Phase.PREFILL, Phase.DECODE, Phase.DECODE),
        nodes=np.array([[1, 0], [0, 1], [1, 1]]),
        throughput=np.array([100.0, 100.0, 500.0]),
    ),
    demand=(
        DemandRow(model="m", phase=Phase.PREFILL, tokens_per_s=100.0),
        DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=100.0),
    ),
    options=AllocationOptions(pd_same_region=True, solver="highs"),
)
"""Prefill fits into r0 only, decode into r1 only."""


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_answers_under_its_name_with_a_plan_that_holds(name):
    problem = replace(SPLIT, options=AllocationOptions(solver="highs"))
    result = policy(name).solve(problem)
    verify_allocation(problem, result)
    assert result.method == name == POLICIES[name].name
    assert POLICIES[name].about


def test_the_published_policy_lets_phases_live_in_different_regions():
    assert policy("coral_paper").solve(SPLIT).full
    assert [item.frac for item in policy("coral").solve(SPLIT).shortfall] == [1.0, 1.0]


def test_all_but_ours_are_meant_for_the_published_split():
    assert {name for name in POLICIES if not POLICIES[name].published_split} == {"coral"}


def test_an_unknown_policy_suggests_the_near_one():
    with pytest.raises(InputError, match="homo_joint"):
        policy("homojoint")
