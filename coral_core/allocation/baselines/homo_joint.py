"""Baseline `homo_joint`: the joint program over homogeneous templates only (DESIGN 3.7).

It separates what joint optimisation gains from what heterogeneous templates gain. Every family of constraints holds for it
as for `coral`.
"""

from __future__ import annotations

from dataclasses import replace

from coral_core.allocation.columns import with_templates
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.start import homogeneous_templates
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.solver.program import Solver


def homogeneous(problem: AllocationProblem) -> AllocationProblem:
    """The same problem with only the templates whose nodes are all of one configuration (of one market)."""
    return with_templates(problem, homogeneous_templates(problem))


def homo_joint(problem: AllocationProblem, *, solver: Solver | None = None) -> AllocationResult:
    """As `solve_allocation` over homogeneous templates; its bound holds for plans of such templates only."""
    return replace(solve_allocation(homogeneous(problem), solver=solver), method="homo_joint")
