"""Whole plans of one unit of demand in one region, all that may matter, where the region's nodes are few (`lattice`).

A unit is a row, or the two rows of a same-region pair. What the unit is served in a region by nodes M, with P and Q the
closures of its rows' templates and G that of aggregated ones: the most of min(P(A), Q(B)) + G(C) over A + B + C <= M; the sum of
that over variants, each on its own nodes. Per choice k of running instances kept, nodes U_k, this is tabulated on the
nodes left, with what k covers added to P, Q and G; the price is that of k, and that of new instances for the rest.
Plans are the states at which one node less serves less; any other is no better than one of these.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from coral_core.allocation.coverage import DEMAND_TOLERANCE_FRAC, Bools, Coverage, Floats, Ints, fraction
from coral_core.allocation.lattice import Closure, NodeLattice
from coral_core.allocation.preferences import node_usd_per_h, real_prices
from coral_core.domain.allocation import AllocationProblem

KEPT_CHOICES_MAX = 256
"""Units with more ways than this to keep what runs in a region are not tabulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Templates of a unit that enter the same rows, by one variant: their closure, and what of them runs here."""

    variant: int
    rows: tuple[int, ...]
    closure: Closure
    running: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A choice of running instances: (kind, template, number), their nodes, and what they cover by kind."""

    instances: tuple[tuple[int, int, int], ...]
    nodes: Ints
    covered_frac: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlans:
    """Plans (p,) of a unit in a region, the empty one first: nodes (p, C), fraction served, price; where they come from."""

    nodes: Ints
    served_frac: Floats
    price_usd_per_h: Floats
    kept: Ints
    state: Ints
    held: Ints
    kinds: tuple[_Kind, ...]
    choices: tuple[_Kept, ...]

    def __len__(self) -> int:
        return len(self.served_frac)

    @property
    def most_frac(self) -> float:
        """The most that can be served."""
        return float(self.served_frac.max())

    def instances(self, plan: int) -> dict[int, int]:
        """How often each template runs in a plan."""
        if plan == 0:
            return {}
        choice = self.choices[int(self.kept[plan])]
        found: dict[int, int] = {}
        for _, template, number in choice.instances:
            found[template] = found.get(template, 0) + number
        service = _Service.of(self.kinds, choice, self.held)
        assert service is not None
        for kind, state in service.split(int(self.state[plan])):
            for template, number in kind.closure.instances(state).items():
                found[template] = found.get(template, 0) + number
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    """What the nodes beside a choice of running instances add up to.

    `tables`: by kind, on the states of the nodes left, whose numbers among all nodes held are `whole`. `by_variant`: the
    kinds of each variant in the order joined, and the tables along the way; `joined`: the variants' tables added up.
    """

    lattice: NodeLattice
    whole: Ints
    kinds: tuple[_Kind, ...]
    tables: list[Floats]
    by_variant: list[tuple[list[int], list[Floats]]]
    joined: list[Floats]

    @classmethod
    def of(cls, kinds: tuple[_Kind, ...], choice: _Kept, held: Ints) -> _Service | None:
        """None where what is kept does not fit into what is held."""
        if (choice.nodes > held).any():
            return None
        lattice = NodeLattice.of(held - choice.nodes)
        assert lattice is not None
        whole_lattice = kinds[0].closure.lattice
        whole = whole_lattice.states(lattice.nodes(np.arange(len(lattice)), len(held)))
        tables = [
            np.minimum(kind.closure.table[whole] + own, 1.0)
            for kind, own in zip(kinds, choice.covered_frac, strict=True)
        ]
        by_variant: list[tuple[list[int], list[Floats]]] = []
        joined: list[Floats] = []
        for variant in sorted({kind.variant for kind in kinds}):
            rows = [k for k, kind in enumerate(kinds) if kind.variant == variant and len(kind.rows) == 1]
            every = [k for k, kind in enumerate(kinds) if kind.variant == variant and len(kind.rows) > 1]
            own = [tables[rows[0]]] if rows else []
            own += [lattice.least_of(own[0], tables[k]) for k in rows[1:]]
            for k in every:
                own.append(lattice.sum_of(own[-1], tables[k]) if own else tables[k])
            by_variant.append(([*rows, *every], own))
            joined.append(lattice.sum_of(joined[-1], own[-1]) if joined else own[-1])
        return cls(lattice=lattice, whole=whole, kinds=kinds, tables=tables, by_variant=by_variant, joined=joined)

    @property
    def table(self) -> Floats:
        """(n,): fraction served on each state, 1 where that is all but for float noise."""
        return np.where(self.joined[-1] >= 1.0 - DEMAND_TOLERANCE_FRAC, 1.0, self.joined[-1])

    def split(self, state: int) -> list[tuple[_Kind, int]]:
        """The nodes of every kind (a state of all nodes held), serving what `table` says."""
        found = []
        for v in range(len(self.joined) - 1, -1, -1):
            order, own = self.by_variant[v]
            here = state
            if v > 0:
                sub = self.lattice.below(state)
                here = int(sub[np.argmax(own[-1][sub] + self.joined[v - 1][state - sub])])
                state -= here
            for k in range(len(order) - 1, 0, -1):
                sub, kind = self.lattice.below(here), self.kinds[order[k]]
                left, right = own[k - 1][here - sub], self.tables[order[k]][sub]
                value = np.minimum(left, right) if len(kind.rows) == 1 else left + right
                part = int(sub[np.argmax(value)])
                found.append((kind, int(self.whole[part])))
                here -= part
            found.append((self.kinds[order[0]], int(self.whole[here])))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionNodes:
    """A region of a problem, the multisets of its nodes, and which templates (templates,) it can hold."""

    problem: AllocationProblem
    coverage: Coverage
    region: int
    lattice: NodeLattice
    fits: Bools


def unit_plans(here: RegionNodes, unit: tuple[int, ...]) -> UnitPlans | None:
    """All plans that may matter. None where there are too many ways to keep what runs.

    The unit asks for throughput alone, and the templates that enter its rows enter no other.
    """
    problem, region = here.problem, here.region
    held = problem.available[region]
    kinds = _kinds(here, unit)
    choices = _kept_choices(problem, kinds, held) if kinds else [_nothing_kept(problem, ())]
    if choices is None:
        return None
    model = problem.demand[unit[0]].model
    start = real_prices(problem)[region] * problem.churn_k
    new = node_usd_per_h(problem, model)[region] + start
    empty = np.zeros((1, len(held)), dtype=np.int64)
    nodes, served, price = [empty], [np.zeros(1)], [np.zeros(1)]
    kept, state = [np.zeros(1, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    for k, choice in enumerate(choices):
        service = _Service.of(kinds, choice, held) if kinds else None
        if service is None:
            continue
        table = service.table
        states = service.lattice.least_states(table)
        states = states[table[states] > 0]
        rest = service.lattice.nodes(states, len(held))
        nodes.append(rest + choice.nodes)
        served.append(table[states])
        price.append(nodes[-1] @ new - float(choice.nodes @ start))
        kept.append(np.full(len(states), k, dtype=np.int64))
        state.append(states)
    return UnitPlans(
        nodes=np.concatenate(nodes),
        served_frac=np.concatenate(served),
        price_usd_per_h=np.concatenate(price),
        kept=np.concatenate(kept),
        state=np.concatenate(state),
        held=held,
        kinds=kinds,
        choices=tuple(choices),
    )


def _kinds(here: RegionNodes, unit: tuple[int, ...]) -> tuple[_Kind, ...]:
    """By variant: the kinds of templates through which the unit can be served in the region."""
    problem, coverage = here.problem, here.coverage
    parts: dict[tuple[int, tuple[int, ...]], list[tuple[Ints, Floats]]] = {}
    for group in coverage.groups:
        if group.rows[0] in unit:
            members = group.members[here.fits[group.members]]
            frac = fraction(problem.templates.throughput[members], group.amounts[0])
            variant = int(coverage.variant_of[group.members[0]])
            parts.setdefault((variant, group.rows), []).append((members, frac))
    found = []
    for (variant, rows), part in sorted(parts.items()):
        members, frac = (np.concatenate(arrays) for arrays in zip(*part, strict=True))
        closure = Closure.of(here.lattice, members, problem.templates.nodes[members], frac)
        running = _running(problem, here.region, members, frac)
        found.append(_Kind(variant=variant, rows=rows, closure=closure, running=running))
    complete = [
        kind
        for kind in found
        if len(kind.rows) == len(unit)
        or {other.rows for other in found if other.variant == kind.variant} >= {(row,) for row in unit}
    ]
    return tuple(complete)


def _running(
    problem: AllocationProblem, region: int, members: Ints, frac: Floats
) -> tuple[tuple[int, int, float], ...]:
    """(template, number, fraction covered by one) of what runs in the region and would cost more to start anew."""
    if not problem.churn_k > 0:
        return ()
    known = {problem.templates.ids[t]: (t, a) for t, a in zip(members.tolist(), frac.tolist(), strict=True)}
    counted: dict[int, int] = {}
    for item in problem.running:
        if item.region == problem.regions[region] and item.template in known:
            template = known[item.template][0]
            counted[template] = counted.get(template, 0) + item.count
    covers = dict(known.values())
    return tuple((t, n, covers[t]) for t, n in counted.items() if n > 0 and covers[t] > 0)


def _nothing_kept(problem: AllocationProblem, kinds: tuple[_Kind, ...]) -> _Kept:
    return _Kept(instances=(), nodes=np.zeros(len(problem.configs), dtype=np.int64), covered_frac=(0.0,) * len(kinds))


def _kept_choices(problem: AllocationProblem, kinds: tuple[_Kind, ...], held: Ints) -> list[_Kept] | None:
    """Every way to keep some of what runs that fits; None where they are too many."""
    running = [(k, t, n, a) for k, kind in enumerate(kinds) for t, n, a in kind.running]
    numbers = [
        range(min(n, int(np.ceil(1.0 / a)), _most(problem.templates.nodes[t], held)) + 1) for _, t, n, a in running
    ]
    if np.prod([float(len(number)) for number in numbers]) > KEPT_CHOICES_MAX:
        return None
    choices = []
    for combination in itertools.product(*numbers):
        nodes = np.zeros(len(held), dtype=np.int64)
        covered = [0.0] * len(kinds)
        for (k, t, _, a), number in zip(running, combination, strict=True):
            nodes += number * problem.templates.nodes[t]
            covered[k] += number * a
        if (nodes <= held).all():
            instances = tuple(
                (k, t, number) for (k, t, _, _), number in zip(running, combination, strict=True) if number
            )
            choices.append(_Kept(instances=instances, nodes=nodes, covered_frac=tuple(covered)))
    return choices


def _most(nodes: Ints, held: Ints) -> int:
    used = nodes > 0
    return int((held[used] // nodes[used]).min())
