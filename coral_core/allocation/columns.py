"""Instance columns: one per (template, region), and one more for what runs there where churn costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import running_counts
from coral_core.allocation.check import MAX_COUNT
from coral_core.allocation.coverage import Bools, Coverage, Floats, Ints, fraction
from coral_core.allocation.preferences import counted_usd_per_h, real_prices
from coral_core.allocation.reduce import excluded
from coral_core.domain.allocation import AllocationProblem, TemplateColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Instance columns, (J,) each: template, region, price as counted, with churn, most that can be of use, running or new."""

    template: Ints
    region: Ints
    price_usd_per_h: Floats
    upper: Floats
    old: Bools

    def __len__(self) -> int:
        return len(self.template)

    def take(self, chosen: Bools | Ints) -> Columns:
        """The chosen columns."""
        return Columns(
            template=self.template[chosen],
            region=self.region[chosen],
            price_usd_per_h=self.price_usd_per_h[chosen],
            upper=self.upper[chosen],
            old=self.old[chosen],
        )


def with_templates(problem: AllocationProblem, kept: Ints) -> AllocationProblem:
    """The problem with these of its templates alone, in this order."""
    templates, index = problem.templates, kept.tolist()
    taken = TemplateColumns(
        ids=tuple(templates.ids[i] for i in index),
        models=tuple(templates.models[i] for i in index),
        phases=tuple(templates.phases[i] for i in index),
        nodes=templates.nodes[kept],
        throughput=templates.throughput[kept],
        variants=None if templates.variants is None else tuple(templates.variants[i] for i in index),
    )
    return replace(problem, templates=taken)


def columns_of(problem: AllocationProblem, coverage: Coverage, keep: Bools) -> Columns:
    """A new-instance column where `keep` (templates, regions) is set, and a running one (never dropped) where K > 0."""
    counted = counted_usd_per_h(problem)
    started = problem.templates.nodes.astype(np.float64) @ real_prices(problem).T if problem.preferences else counted
    limit = _limit(problem, coverage)
    running = np.minimum(running_counts(problem), limit) if problem.churn_k > 0 else np.zeros_like(limit)
    new, old = np.nonzero(keep), np.nonzero(running)
    return Columns(
        template=np.concatenate((new[0], old[0])),
        region=np.concatenate((new[1], old[1])),
        price_usd_per_h=np.concatenate((counted[new] + started[new] * problem.churn_k, counted[old])),
        upper=np.concatenate((limit[new], running[old])).astype(np.float64),
        old=np.repeat([False, True], [len(new[0]), len(old[0])]),
    )


def useful_instances(problem: AllocationProblem, coverage: Coverage) -> Ints:
    """(templates,): more instances than this in one region cannot help: so many alone cover all rows, spares and floors."""
    limit = np.zeros(len(problem.templates), dtype=np.int64)
    for group in coverage.groups:
        useful = np.full(len(group.members), float(max(problem.demand[row].min_instances for row in group.rows)))
        spare = coverage.spare[list(group.rows)].any()  # a pair's other row loses the instance too
        for row, amount in zip(group.rows, group.amounts, strict=True):
            if coverage.active[row]:
                frac = fraction(problem.templates.throughput[group.members], amount)
                with np.errstate(divide="ignore"):
                    alone = np.where(frac > 0, np.ceil(1.0 / frac) + spare, 0.0)
                useful = np.maximum(useful, alone)
        limit[group.members] = np.minimum(useful, MAX_COUNT)
    return limit


def _limit(problem: AllocationProblem, coverage: Coverage) -> Ints:
    """(templates, regions): most instances that are of use and that the region's nodes allow."""
    nodes = problem.templates.nodes
    fit = [
        np.where(nodes > 0, held // np.maximum(nodes, 1), MAX_COUNT).min(axis=1, initial=MAX_COUNT)
        for held in problem.available
    ]
    useful = useful_instances(problem, coverage)
    limit = np.minimum(useful[:, None], np.stack(fit, axis=1)) if fit else np.zeros((len(nodes), 0), dtype=np.int64)
    return np.where(excluded(problem), 0, limit) if problem.exclusions else limit
