"""Why a named template is not in a plan: also one that a reduction dropped before the solve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import running_counts
from coral_core.allocation.coverage import Floats, Group
from coral_core.allocation.explain import volume_price
from coral_core.allocation.preferences import counted_usd_per_h
from coral_core.allocation.prices import Prices, price_plan
from coral_core.allocation.reduce import excluded, fits
from coral_core.domain.allocation import AllocationProblem, AllocationResult
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.solver.program import Solver

_NOISE = 1e-9


EXCLUDED = ("excluded",)
"""In `WhyNot.unavailable`: nodes or not, an exclusion forbids it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """Why a template is, or is not, in a plan.

    `chosen_count` per region. `reduced_cost_usd_per_h` per region where it fits: what one instance would add to the
    relaxed objective (0 or less: nothing speaks against it but whole numbers). `unavailable` maps a region to the
    configurations it lacks. `dominated_by`: a template of the same model and phase that needs no more nodes and gives at
    least as much (of what the demand can use). `usd_per_h_per_unit`: its least price per unit of throughput;
    `cheaper_chosen`: the chosen template of the same model and phase with the least price per unit, if that is less.
    """

    template: str
    chosen_count: dict[str, int]
    reduced_cost_usd_per_h: dict[str, float]
    unavailable: dict[str, tuple[str, ...]]
    dominated_by: str | None
    usd_per_h_per_unit: float | None
    cheaper_chosen: str | None
    cheaper_usd_per_h_per_unit: float | None
    reasons: tuple[str, ...]


def why_not(
    problem: AllocationProblem, result: AllocationResult, template_id: str, *, solver: Solver | None = None
) -> WhyNot:
    """Explain one template against `result`. Raises InputError for an unknown template, SolverError without prices."""
    if template_id not in problem.templates.ids:
        raise InputError(f"unknown template {template_id!r}", where="template", fix="see the problem's templates")
    t = problem.templates.ids.index(template_id)
    prices = price_plan(problem, result, solver=solver)
    chosen = {problem.regions[r]: int(n) for r, n in enumerate(prices.counts[t]) if n}
    lacking = _unavailable(problem, t)
    reduced = _reduced_costs(problem, prices, t)
    group = next((group for group in prices.coverage.groups if t in group.members), None)
    dominator = None if group is None else _dominator(problem, group, t)
    rate = _rates(problem)
    cheaper = None if group is None else _cheaper(group, prices, rate, t)
    own_rate = float(rate[t]) if np.isfinite(rate[t]) else None
    facts = WhyNot(
        template=template_id,
        chosen_count=chosen,
        reduced_cost_usd_per_h=reduced,
        unavailable=lacking,
        dominated_by=None if dominator is None else problem.templates.ids[dominator],
        usd_per_h_per_unit=own_rate,
        cheaper_chosen=None if cheaper is None else problem.templates.ids[cheaper],
        cheaper_usd_per_h_per_unit=None if cheaper is None else float(rate[cheaper]),
        reasons=(),
    )
    return replace(facts, reasons=tuple(_reasons(facts, problem.templates.phases[t], has_row=group is not None)))


def not_a_choice(template_id: str) -> WhyNot:
    """What is known of a template that a plan could not choose from: nothing of its prices, reasons to be given."""
    return WhyNot(
        template=template_id,
        chosen_count={},
        reduced_cost_usd_per_h={},
        unavailable={},
        dominated_by=None,
        usd_per_h_per_unit=None,
        cheaper_chosen=None,
        cheaper_usd_per_h_per_unit=None,
        reasons=(),
    )


def _unavailable(problem: AllocationProblem, t: int) -> dict[str, tuple[str, ...]]:
    lacking = {}
    for r, region in enumerate(problem.regions):
        short = np.flatnonzero(problem.templates.nodes[t] > problem.available[r])
        if len(short):
            lacking[region] = tuple(problem.configs[c] for c in short)
    if problem.exclusions:
        banned = excluded(problem)[t]
        lacking |= {name: EXCLUDED for r, name in enumerate(problem.regions) if banned[r]}
    return lacking


def _reduced_costs(problem: AllocationProblem, prices: Prices, t: int) -> dict[str, float]:
    """Per region where it fits: of the running column while some of what runs is given up, else of the new one."""
    columns, found = prices.formulation.columns, {}
    banned = excluded(problem)[t] if problem.exclusions else np.zeros(len(problem.regions), dtype=bool)
    spare = running_counts(problem)[t] > prices.counts[t]
    for j in np.flatnonzero(columns.template == t):
        r = int(columns.region[j])
        if banned[r]:
            continue
        if problem.regions[r] not in found or (columns.old[j] and spare[r]):
            found[problem.regions[r]] = float(prices.relaxation.reduced[j])
    return found


def _dominator(problem: AllocationProblem, group: Group, t: int) -> int | None:
    """Of the group's templates that need no more and give no less, the one with the fewest nodes; equals by order."""
    nodes = problem.templates.nodes[group.members]
    capped = np.minimum(problem.templates.throughput, max(group.amounts))
    gives = capped[group.members]
    better = (nodes <= problem.templates.nodes[t]).all(axis=1) & (gives >= capped[t])
    equal = (nodes == problem.templates.nodes[t]).all(axis=1) & (gives == capped[t])
    candidates = group.members[better & (~equal | (group.members < t))]
    if not len(candidates):
        return None
    order = np.lexsort((candidates, -capped[candidates], problem.templates.nodes[candidates].sum(axis=1)))
    return int(candidates[order[0]])


def _rates(problem: AllocationProblem) -> Floats:
    """(templates,): least USD/h, as preferences count it, per unit of throughput over the regions that hold it, or infinite."""
    possible = np.where(fits(problem), counted_usd_per_h(problem), np.inf).min(axis=1, initial=np.inf)
    throughput = problem.templates.throughput
    rate: Floats = np.divide(possible, throughput, out=np.full(len(throughput), np.inf), where=throughput > 0)
    return rate


def _cheaper(group: Group, prices: Prices, rate: Floats, t: int) -> int | None:
    chosen = group.members[prices.counts[group.members].any(axis=1)]
    chosen = chosen[rate[chosen] < rate[t]]
    return int(chosen[np.argmin(rate[chosen])]) if len(chosen) else None


def _reasons(facts: WhyNot, phase: Phase, *, has_row: bool) -> Iterator[str]:
    if facts.chosen_count:
        yield "it is in the plan: " + ", ".join(f"{n} in {region}" for region, n in facts.chosen_count.items())
    if not has_row:
        yield "no demand row asks for its model and phase"
        return
    for region, configs in facts.unavailable.items():
        banned = configs == EXCLUDED
        yield f"{region} excludes it" if banned else f"{region} cannot hold one instance: too few {', '.join(configs)}"
    if facts.dominated_by is not None:
        yield f"{facts.dominated_by} needs no more nodes and gives at least as much of what is asked"
    if facts.cheaper_chosen is not None:
        yield _cheaper_reason(facts, in_requests=phase is Phase.AGGREGATED)
    if facts.chosen_count:
        return
    for region, value in facts.reduced_cost_usd_per_h.items():
        if value > _NOISE:
            yield f"in {region} one instance would add {value:.4g} USD/h at the prices of the relaxation"
        else:
            yield f"in {region} prices do not speak against it: whole instances of others fit the demand better"


def _cheaper_reason(facts: WhyNot, *, in_requests: bool) -> str:
    if facts.usd_per_h_per_unit is None or facts.cheaper_usd_per_h_per_unit is None:
        return f"it fits nowhere, the chosen {facts.cheaper_chosen} does"
    own, unit = volume_price(facts.usd_per_h_per_unit, in_requests=in_requests)
    other, _ = volume_price(facts.cheaper_usd_per_h_per_unit, in_requests=in_requests)
    return f"used in full it costs {own:.3g} {unit} at best, the chosen {facts.cheaper_chosen} {other:.3g}"
