"""What instances count in the objective: their price, times the factors of the preferences that their nodes match.

For a template of model m in region r, sum over configurations c of U_c p_rc times the product of the factors of all
preferences that name (m, c, r) or leave them open. Factors are above 0, so more nodes never count less. The budget and
the churn stay at real prices.
"""

from __future__ import annotations

import numpy as np

from coral_core.allocation.coverage import Floats, Ints
from coral_core.domain.allocation import AllocationProblem


def real_prices(problem: AllocationProblem) -> Floats:
    """(regions, configs): price of a node, 0 where none is sold."""
    return np.nan_to_num(problem.price_usd_per_h)


def counted_prices(problem: AllocationProblem) -> list[tuple[Ints, Floats]]:
    """Templates that share their factors, and what a node counts for them, (regions, configs); every template once."""
    named = {item.model for item in problem.preferences} - {None}
    models = np.array(problem.templates.models, dtype=object)
    parts = [(model, np.flatnonzero(models == model)) for model in sorted(map(str, named))]
    others = ~np.isin(models, [model for model, _ in parts]) if parts else np.ones(len(models), dtype=bool)
    return [(members, node_usd_per_h(problem, model)) for model, members in [*parts, (None, np.flatnonzero(others))]]


def node_usd_per_h(problem: AllocationProblem, model: str | None) -> Floats:
    """(regions, configs): what a node counts for a model's templates, 0 where none is sold."""
    counted = real_prices(problem)
    for item in problem.preferences:
        if item.model in (None, model):
            regions = [item.region in (None, name) for name in problem.regions]
            configs = [item.config in (None, name) for name in problem.configs]
            counted[np.ix_(regions, configs)] *= item.price_factor
    return counted


def counted_usd_per_h(problem: AllocationProblem) -> Floats:
    """(templates, regions): what an instance counts."""
    nodes = problem.templates.nodes.astype(np.float64)
    if not problem.preferences:
        return np.asarray(nodes @ real_prices(problem).T)
    counted = np.zeros((len(nodes), len(problem.regions)))
    for members, price in counted_prices(problem):
        counted[members] = nodes[members] @ price.T
    return counted


def preference_usd_per_h(problem: AllocationProblem, template: Ints, region: Ints) -> Floats:
    """(n,): what preferences add to the price of instances of `template` in `region`; below 0 where they are sought."""
    added = np.zeros(len(template))
    if not problem.preferences:
        return added
    models = np.array([problem.templates.models[t] for t in template.tolist()], dtype=object)
    for model in dict.fromkeys(models.tolist()):
        own = np.flatnonzero(models == model)
        more = node_usd_per_h(problem, model) - real_prices(problem)
        added[own] = (problem.templates.nodes[template[own]] * more[region[own]]).sum(axis=1)
    return added
