"""What is known to be feasible before a problem is solved in which capacity binds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coral_core.allocation.assess import running_instances
from coral_core.allocation.coverage import Bools, Ints
from coral_core.domain.allocation import AllocationProblem


def homogeneous_templates(problem: AllocationProblem) -> Ints:
    """The templates whose nodes are all of one configuration (of one market): a far smaller program."""
    return np.flatnonzero((problem.templates.nodes > 0).sum(axis=1) == 1)


def running_that_fits(problem: AllocationProblem, fits: Bools) -> Ints:
    """As much of what runs as the nodes available hold, in the order given; only where `fits` (templates, regions)."""
    return fitting(problem, fits, zip(*(part.tolist() for part in running_instances(problem)), strict=True))


def fitting(problem: AllocationProblem, fits: Bools, instances: Iterable[tuple[int, int, int]]) -> Ints:
    """(templates, regions): as many of (template, region, number) as the nodes available hold, in the order given."""
    counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
    left = problem.available.copy()
    for t, r, count in instances:
        nodes = problem.templates.nodes[t]
        fit = min(count, int((left[r][nodes > 0] // nodes[nodes > 0]).min(initial=count))) if fits[t, r] else 0
        counts[t, r] += fit
        left[r] -= fit * nodes
    return counts
