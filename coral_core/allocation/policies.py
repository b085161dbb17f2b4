"""The policies that an evaluation compares, by name: the same input, the same kind of answer (DESIGN 3.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Final

from coral_core.allocation.baselines.cauchy import cauchy
from coral_core.allocation.baselines.helix import helix, pool_allocation
from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.ilp import solve_allocation
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.domain.pool import PoolPlan, PoolProblem
from coral_core.errors import InputError, unknown_name

Solve = Callable[[AllocationProblem], AllocationResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`solve` gives a verified plan for any allocation problem.

    `published_split`: the policy is meant for templates whose stages share the SLO equally (libraries of the methods
    `lattice` and `ilp`); whoever builds the problem sees to that, since templates do not say how they were made.
    """

    name: str
    solve: Solve
    about: str
    published_split: bool = True


def coral(problem: AllocationProblem) -> AllocationResult:
    """The joint program with all that the problem's options ask for."""
    return replace(solve_allocation(problem), method="coral")


def coral_paper(problem: AllocationProblem) -> AllocationResult:
    """The joint program as published: prefill and decode of a model may lie in different regions."""
    published = replace(problem, options=replace(problem.options, pd_same_region=False))
    return replace(solve_allocation(published), method="coral_paper")


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(name="coral", solve=coral, about="the joint program over mixed templates", published_split=False),
            Policy(name="coral_paper", solve=coral_paper, about="the joint program as published"),
            Policy(name="homo_joint", solve=homo_joint, about="the joint program over homogeneous templates"),
            Policy(name="homo", solve=homo, about="greedy per model over homogeneous templates"),
            Policy(name="cauchy", solve=cauchy, about="prefill/decode combos ranked by tokens per USD"),
        )
    }
)


HELIX: Final = "helix"


def policy(name: str) -> Policy:
    """The policy called `name`; InputError with near misses for any other, and for `helix`, which needs a fixed pool."""
    if name == HELIX:
        raise InputError("policy helix needs a fixed pool", where="policy", fix="make it with helix_policy")
    if name not in POLICIES:
        raise unknown_name("policy", name, [*POLICIES, HELIX])
    return POLICIES[name]


def helix_policy(pool: PoolProblem, *, region: str, time_limit_s: float = 60.0) -> Policy:
    """Policy `helix` on a fixed pool in `region`; the pool is placed once, when it is first asked.

    Its results hold for the problem with the pool as its only template (`pool_allocation`): the whole pool is paid for.
    """

    @cache
    def plan() -> PoolPlan:
        return helix(pool, time_limit_s=time_limit_s)

    def solve(problem: AllocationProblem) -> AllocationResult:
        return pool_allocation(problem, pool, plan(), region=region)[1]

    return Policy(name=HELIX, solve=solve, about="one model on a fixed pool, placed for the largest flow")
