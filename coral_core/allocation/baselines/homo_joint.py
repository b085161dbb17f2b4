"""Baseline `homo_joint`: the joint program over homogeneous templates only (DESIGN 3.7).

It separates what joint optimisation gains from what heterogeneous templates gain.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coral_core.allocation.ilp import solve_allocation
from coral_core.domain.allocation import AllocationProblem, AllocationResult, TemplateColumns
from coral_core.solver.program import Solver


def homogeneous(problem: AllocationProblem) -> AllocationProblem:
    """The same problem with only the templates whose nodes are all of one configuration."""
    templates = problem.templates
    chosen = np.flatnonzero((templates.nodes > 0).sum(axis=1) == 1)
    return replace(
        problem,
        templates=TemplateColumns(
            ids=tuple(templates.ids[i] for i in chosen),
            models=tuple(templates.models[i] for i in chosen),
            phases=tuple(templates.phases[i] for i in chosen),
            nodes=templates.nodes[chosen],
            throughput=templates.throughput[chosen],
        ),
    )


def homo_joint(problem: AllocationProblem, *, solver: Solver | None = None) -> AllocationResult:
    """As `solve_allocation` over homogeneous templates; its bound holds for plans of such templates only."""
    return replace(solve_allocation(homogeneous(problem), solver=solver), method="homo_joint")
