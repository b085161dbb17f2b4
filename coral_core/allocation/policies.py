"""The policies that an evaluation compares, by name: the same input, the same kind of answer (DESIGN 3.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from coral_core.allocation.baselines.cauchy import cauchy
from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.ilp import solve_allocation
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.errors import unknown_name

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


def policy(name: str) -> Policy:
    """The policy called `name`; InputError with near misses for any other."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    return POLICIES[name]
