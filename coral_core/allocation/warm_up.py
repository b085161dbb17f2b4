"""What a policy compiles and loads when it is first asked, out of the way before its time is taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from coral_core.allocation.policies import HELIX, Policy
from coral_core.domain.allocation import AllocationProblem
from coral_core.domain.workload import Phase

TEMPLATES: Final = 20
"""Per model and phase, in the problem that a policy is warmed up with."""

_warm: set[str] = set()


def warm_up(policy: Policy, problem: AllocationProblem) -> None:
    """Let a policy solve a small part of `problem`, once per process and policy.

    A fixed pool is placed when it is first asked, and that is part of its solve time: it is left cold.
    """
    if policy.name in _warm or policy.name == HELIX:
        return
    _warm.add(policy.name)
    templates = problem.templates
    seen: Counter[tuple[str, Phase]] = Counter()
    keep = []
    for at, pair in enumerate(zip(templates.models, templates.phases, strict=True)):
        if seen[pair] < TEMPLATES:
            keep.append(at)
        seen[pair] += 1
    few = replace(
        templates,
        ids=tuple(templates.ids[at] for at in keep),
        models=tuple(templates.models[at] for at in keep),
        phases=tuple(templates.phases[at] for at in keep),
        variants=None if templates.variants is None else tuple(templates.variants[at] for at in keep),
        nodes=templates.nodes[keep],
        throughput=templates.throughput[keep],
    )
    policy.solve(replace(problem, templates=few, running=()))
