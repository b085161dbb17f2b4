"""Which demand rows a template enters, and what fraction of each row's demand one instance covers.

A prefill or decode template enters its model's row of that phase; an aggregated template enters its model's aggregated
row, or both the prefill and the decode row (those that state requests/s). With D the row's demand in the template's
unit (tokens/s, or requests/s for aggregated templates), one instance covers T / D of it. A row with D = 0 asks for no
throughput, but its floor and cap still count the instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.allocation import AllocationProblem, DemandRow, TemplateColumns
from coral_core.domain.workload import Phase

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

DEMAND_TOLERANCE_FRAC = 1e-9
"""A row is met when its coverage is at least 1 minus this: room for float noise (3 x 0.333..), not for a shortage."""

_WEIGHT_RANGE_MAX = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Templates of one model and phase that enter the same rows: `rows[k]` has demand `amounts[k]` in their unit."""

    members: Ints
    rows: tuple[int, ...]
    amounts: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Groups of templates that enter some row, and which rows are served together.

    `group_of` (templates,): number of the group, -1 for none. `variant_of` (templates,) counts a model's variants where pairs
    must not mix them, else 0; `n_variants`: the most of any model. `active[i]`: row i has demand above 0. `pairs`: the
    (prefill, decode) rows of a model that must be served in the same region (`pd_same_region`), by one variant.
    `spot_of` (templates,): uses spot nodes; all False where no row asks for on-demand coverage. `spare[i]`: row i has demand
    and asks for a spare instance. `region_fracs[i]`: the fractions above 0 of row i that must be served in a region (its
    number), for the rows of a pair the larger of both; they add up to at most 1.
    """

    groups: tuple[Group, ...]
    group_of: Ints
    variant_of: Ints
    n_variants: int
    spot_of: Bools
    active: Bools
    pairs: tuple[tuple[int, int], ...]
    spare: Bools
    region_fracs: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def guaranteed(self) -> Bools:
        """Rows that ask for more than throughput somewhere: a spare, or service in a certain region."""
        return np.asarray(self.spare | np.array([bool(fracs) for fracs in self.region_fracs], dtype=bool))

    def place(self, template: Ints, region: Ints) -> Ints:
        """Where an instance serves: region and variant in one number, region * n_variants + variant."""
        return region * self.n_variants + self.variant_of[template]

    def units(self) -> list[tuple[int, ...]]:
        """Active rows that share one shortfall: pairs, then the others alone, in order of their first row."""
        paired = {row for pair in self.pairs for row in pair}
        alone = [(int(row),) for row in np.flatnonzero(self.active) if int(row) not in paired]
        return sorted([*self.pairs, *alone])


def coverage_of(problem: AllocationProblem) -> Coverage:
    """Group the templates by the rows they enter. The problem must have passed `check_problem`."""
    groups = []
    variant_of = _variants(problem)
    spot_of = _spot(problem)
    for (model, phase, _), members in _split(members_by_kind(problem.templates), 2 * variant_of + spot_of):
        entered = [
            (i, amount) for i, row in enumerate(problem.demand) if (amount := _amount(row, model, phase)) is not None
        ]
        if entered:
            rows, amounts = zip(*entered, strict=True)
            groups.append(Group(members=members, rows=rows, amounts=amounts))
    group_of = np.full(len(problem.templates), -1, dtype=np.int64)
    for g, group in enumerate(groups):
        group_of[group.members] = g
    active = np.array(
        [bool(row.requests_per_s if row.tokens_per_s is None else row.tokens_per_s) for row in problem.demand],
        dtype=bool,
    )
    pairs = _pairs(problem, active)
    return Coverage(
        groups=tuple(groups),
        group_of=group_of,
        variant_of=variant_of,
        n_variants=int(variant_of.max(initial=0)) + 1,
        spot_of=spot_of,
        active=active,
        pairs=pairs,
        spare=active & np.array([row.spare_instances > 0 for row in problem.demand], dtype=bool),
        region_fracs=_region_fracs(problem, active, pairs),
    )


def _region_fracs(
    problem: AllocationProblem, active: Bools, pairs: tuple[tuple[int, int], ...]
) -> tuple[tuple[tuple[int, float], ...], ...]:
    asked: list[dict[int, float]] = [
        {problem.regions.index(region): frac for region, frac in row.region_fracs if frac > 0 and active[i]}
        for i, row in enumerate(problem.demand)
    ]
    for a, b in pairs:
        both = {r: max(asked[a].get(r, 0.0), asked[b].get(r, 0.0)) for r in sorted({*asked[a], *asked[b]})}
        asked[a] = asked[b] = both
    sums = [max(sum(fracs.values()), 1.0) for fracs in asked]  # float noise alone brings them above 1
    return tuple(tuple((r, f / s) for r, f in fracs.items()) for fracs, s in zip(asked, sums, strict=True))


def _variants(problem: AllocationProblem) -> Ints:
    """(templates,): number of the variant within its model, in order of first appearance; 0 where they may mix."""
    templates = problem.templates
    if templates.variants is None or not problem.options.pd_same_region:
        return np.zeros(len(templates), dtype=np.int64)
    numbers: dict[str, dict[str, int]] = {}
    found = []
    for model, variant in zip(templates.models, templates.variants, strict=True):
        known = numbers.setdefault(model, {})
        found.append(known.setdefault(variant, len(known)))
    return np.array(found, dtype=np.int64)


def _spot(problem: AllocationProblem) -> Bools:
    index = [problem.configs.index(name) for name in problem.spot_configs]
    if not index or not any(row.on_demand_frac for row in problem.demand):
        return np.zeros(len(problem.templates), dtype=bool)
    return np.asarray((problem.templates.nodes[:, index] > 0).any(axis=1))


def _split(kinds: dict[tuple[str, Phase], Ints], sort_of: Ints) -> Iterator[tuple[tuple[str, Phase, int], Ints]]:
    """Every kind by sort: what differs in it neither replaces nor dominates the other."""
    for (model, phase), members in kinds.items():
        for sort in np.unique(sort_of[members]).tolist():
            yield (model, phase, sort), members[sort_of[members] == sort]


def members_by_kind(templates: TemplateColumns) -> dict[tuple[str, Phase], Ints]:
    """Templates by (model, phase), in order of first appearance."""
    models = list(dict.fromkeys(templates.models))
    number = {name: i for i, name in enumerate(models)}
    phases = list(Phase)
    of_phase = {id(phase): i for i, phase in enumerate(phases)}  # members are single objects, and ids hash fast
    n = len(templates)
    model = np.fromiter(map(number.__getitem__, templates.models), dtype=np.int64, count=n)
    phase = np.fromiter(map(of_phase.__getitem__, map(id, templates.phases)), dtype=np.int64, count=n)
    kind = model * len(phases) + phase
    order = np.argsort(kind, kind="stable")
    kinds, first = np.unique(kind[order], return_index=True)
    parts = dict(zip(kinds.tolist(), np.split(order, first[1:]), strict=True)) if n else {}
    by_appearance = sorted(parts.items(), key=lambda item: int(item[1][0]))
    return {(models[k // len(phases)], phases[k % len(phases)]): members for k, members in by_appearance}


def _amount(row: DemandRow, model: str, phase: Phase) -> float | None:
    """The row's demand in the unit of templates of (model, phase); None where they do not enter it."""
    if row.model != model:
        return None
    if phase is Phase.AGGREGATED:
        # a row without tokens asks for nothing, whatever its request rate
        return 0.0 if row.tokens_per_s == 0 else row.requests_per_s
    return row.tokens_per_s if row.phase is phase else None


def _pairs(problem: AllocationProblem, active: Bools) -> tuple[tuple[int, int], ...]:
    if not problem.options.pd_same_region:
        return ()
    row_of = {(row.model, row.phase): i for i, row in enumerate(problem.demand) if active[i]}
    return tuple(
        (prefill, row_of[model, Phase.DECODE])
        for (model, phase), prefill in row_of.items()
        if phase is Phase.PREFILL and (model, Phase.DECODE) in row_of
    )


def weight_unit(problem: AllocationProblem) -> float:
    """What weights are measured in: the least one above 0, so that no row is lost in a tolerance; 1 where all are 0.

    Rows of less than a millionth of the largest weight do fall below the tolerance (numbers have 16 digits).
    """
    weights = [row.weight for row in problem.demand if row.weight > 0]
    return max(min(weights), max(weights) / _WEIGHT_RANGE_MAX) if weights else 1.0


def fraction(throughput: Floats, amount: float, *, capped: bool = True) -> Floats:
    """T / D, D > 0; `capped` at 1, which is lossless for whole instances: one never needs to cover a row twice."""
    with np.errstate(over="ignore"):
        frac = throughput / amount
    return np.minimum(frac, 1.0) if capped else frac
