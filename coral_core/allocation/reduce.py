"""Lossless reductions: which (template, region) columns an optimal plan can do without, and why.

Each keeps at least one optimal plan (in the order floor deficit, shortfall, cost + churn):
- idle: a template that enters no row, or only rows without demand and floor. Condition: prices >= 0.
- unavailable: a template that needs more nodes of some configuration than its region may hold, or that is excluded there.
- dominated: another template of the same model and phase has capped T >= and U_c <= for every c. Condition: the two
  enter the same rows, so swapping one instance for the other keeps every floor and cap, frees nodes, covers at least as
  much and costs no more to rent; nor is it excluded, since it uses no other configurations. T may be capped at the largest demand of the rows entered, since one whole instance
  covers them. What runs now is exempt in its region up to its count: it is cheaper than a newcomer by the churn.
- dearer: only where no capacity binds (`price_front`): another column of the same group has price <= and capped T >=.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coral_core.allocation.coverage import Bools, Coverage, Floats, Ints
from coral_core.domain.allocation import AllocationProblem

_PAIRWISE_MAX = 400
"""Up to this many templates a numpy comparison of all pairs is faster than loading the compiled kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """`keep` (templates, regions): columns for new instances. `counts`: columns left after each step, in order."""

    keep: Bools
    counts: dict[str, int]


def reduce_columns(problem: AllocationProblem, coverage: Coverage) -> Reduction:
    """Drop what an optimal plan can do without; nothing when `options.reduce` is off."""
    shape = (len(problem.templates), len(problem.regions))
    counts = {"columns_all": shape[0] * shape[1]}
    keep = np.ones(shape, dtype=bool)
    if not problem.options.reduce:
        return Reduction(keep=keep, counts=counts)
    keep &= _useful(problem, coverage)[:, None]
    counts["columns_useful"] = int(keep.sum())
    keep &= fits(problem)
    counts["columns_available"] = int(keep.sum())
    for group in coverage.groups:
        members = group.members[keep[group.members].any(axis=1)]
        capped = np.minimum(problem.templates.throughput[members], max(group.amounts))
        keep[members[dominated(capped, problem.templates.nodes[members])]] = False
    counts["columns_undominated"] = int(keep.sum())
    return Reduction(keep=keep, counts=counts)


def _useful(problem: AllocationProblem, coverage: Coverage) -> Bools:
    useful = np.zeros(len(problem.templates), dtype=bool)
    for group in coverage.groups:
        if any(coverage.active[row] or problem.demand[row].min_instances for row in group.rows):
            useful[group.members] = True
    return useful


def fits(problem: AllocationProblem) -> Bools:
    """(templates, regions): whether one instance fits into what the region may hold, and is not excluded."""
    held = problem.available[None, :, :]
    inside = np.asarray((problem.templates.nodes[:, None, :] <= held).all(axis=2))
    return inside & ~excluded(problem) if problem.exclusions else inside


def excluded(problem: AllocationProblem) -> Bools:
    """(templates, regions): whether some exclusion names it."""
    found = np.zeros((len(problem.templates), len(problem.regions)), dtype=bool)
    for item in problem.exclusions:
        templates = np.ones(len(problem.templates), dtype=bool)
        if item.model is not None:
            templates &= np.fromiter((name == item.model for name in problem.templates.models), bool, len(templates))
        if item.config is not None:
            templates &= problem.templates.nodes[:, problem.configs.index(item.config)] > 0
        regions = np.array([item.region in (None, name) for name in problem.regions], dtype=bool)
        found |= templates[:, None] & regions[None, :]
    return found


def dominated(throughput: Floats, nodes: Ints) -> Bools:
    """(n,): another entry has throughput >= and nodes <= everywhere; of equals the first stays."""
    n = len(throughput)
    # any dominator sorts before what it dominates: more throughput first, then fewer nodes, then input order
    order = np.lexsort((np.arange(n), nodes.sum(axis=1), -throughput))
    sorted_nodes = np.ascontiguousarray(nodes[order])
    if n <= _PAIRWISE_MAX:
        below = (sorted_nodes[None, :, :] <= sorted_nodes[:, None, :]).all(axis=2)
        flags = np.tril(below, k=-1).any(axis=1)
    else:
        from coral_core.allocation.skyline import dominated_in_order  # noqa: PLC0415 - numba loads only when it pays

        flags = dominated_in_order(sorted_nodes)
    result = np.zeros(n, dtype=bool)
    result[order] = flags
    return result


def price_front(price: Floats, throughput: Floats) -> Bools:
    """(n,): entries that no other beats in both price (<=) and throughput (>=); of equals the first stays."""
    order = np.lexsort((np.arange(len(price)), -throughput, price))
    best = np.maximum.accumulate(throughput[order])
    keep = np.zeros(len(price), dtype=bool)
    keep[order] = np.concatenate(([True], best[1:] > best[:-1])) if len(price) else False
    return keep
