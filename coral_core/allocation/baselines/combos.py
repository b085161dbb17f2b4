"""GPU combos of baseline `cauchy`: one prefill replica feeding several decode replicas, ranked by tokens per USD.

Data: per model the share of its demand that one replica covers, f_p (prefill) and f_q (decode); node prices by region.
A combo of replicas p and q, of one variant, in a region has n decode replicas. It serves min(f_p, n f_q, 1) of the demand and costs
price_p + n price_q (preferences counted), so tokens per USD are greatest at the n just below or just above f_p / f_q: up to there tokens grow
in proportion to n, beyond it not at all. Both are tried, no more than fit into the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coral_core.allocation.coverage import Bools, Coverage, Floats, Ints
from coral_core.allocation.preferences import counted_usd_per_h
from coral_core.allocation.reduce import excluded
from coral_core.domain.allocation import AllocationProblem
from coral_core.domain.workload import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Combos:
    """Candidates, one entry each: model (index in `models`), region, replicas as (templates,) counts, demand served.

    `replicas` is (n, templates), `served_frac` capped at 1, `counted_usd_per_h` per combo. `rows` lists each model's demand
    rows (prefill, decode, or the one that it has).
    """

    models: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    model: Ints
    region: Ints
    replicas: Ints
    served_frac: Floats
    counted_usd_per_h: Floats
    considered: int

    def __len__(self) -> int:
        return len(self.model)


def candidate_combos(problem: AllocationProblem, coverage: Coverage, *, keep: int) -> Combos:
    """Per model and region the `keep` best GPU combos by tokens per USD, one for each pair of configurations.

    Where a model asks for on-demand service, so many without spot nodes besides. The templates must be homogeneous. A model with demand in one phase only has combos of a single replica. Models whose
    demand is aggregated have none.
    """
    rows_of: dict[str, tuple[int, ...]] = {}
    for i, row in enumerate(problem.demand):
        if row.phase is not Phase.AGGREGATED and coverage.active[i]:
            rows_of[row.model] = (*rows_of.get(row.model, ()), i)
    found: list[tuple[int, int, _Ranked]] = []
    considered = 0
    counted, banned = counted_usd_per_h(problem), excluded(problem)
    for m, rows in enumerate(rows_of.values()):
        ordered = sorted(rows, key=lambda i: problem.demand[i].phase is Phase.DECODE)
        for r in range(len(problem.regions)):
            ranked = _rank(problem, coverage, ordered, r, price=counted[:, r], allowed=~banned[:, r])
            considered += len(ranked.served_frac)
            found += [(m, r, ranked.take(index)) for index in _kept(problem, coverage, ordered, ranked, keep)]
    replicas = np.zeros((len(found), len(problem.templates)), dtype=np.int64)
    for k, (_, _, one) in enumerate(found):
        np.add.at(replicas[k], one.members[0], one.numbers[0])
    return Combos(
        models=tuple(rows_of),
        rows=tuple(rows_of.values()),
        model=np.array([m for m, _, _ in found], dtype=np.int64),
        region=np.array([r for _, r, _ in found], dtype=np.int64),
        replicas=replicas,
        served_frac=np.array([float(one.served_frac[0]) for _, _, one in found]),
        counted_usd_per_h=np.array([float(one.counted_usd_per_h[0]) for _, _, one in found]),
        considered=considered,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranked:
    """Combos of one model in one region: template indices (n, 1 or 2), replicas of each, service and price."""

    members: Ints
    numbers: Ints
    served_frac: Floats
    counted_usd_per_h: Floats

    def take(self, index: Ints) -> _Ranked:
        return _Ranked(
            members=self.members[index],
            numbers=self.numbers[index],
            served_frac=self.served_frac[index],
            counted_usd_per_h=self.counted_usd_per_h[index],
        )


def _rank(
    problem: AllocationProblem, coverage: Coverage, rows: list[int], region: int, *, price: Floats, allowed: Bools
) -> _Ranked:
    """All combos that fit into the region, most tokens per USD first; of equals the cheaper, then the first.

    `price` and `allowed` are (templates,).
    """
    held = problem.available[region]
    sides = []
    for row in rows:
        members, frac = row_members(coverage, problem, row)
        fits = (frac > 0) & allowed[members] & (problem.templates.nodes[members] <= held).all(axis=1)
        sides.append((members[fits], frac[fits]))
    if len(sides) == 1:
        members, numbers = sides[0][0][:, None], np.ones((len(sides[0][0]), 1), dtype=np.int64)
        served = sides[0][1]
    else:
        members, numbers, served = _pairs(problem, held, *sides)
    served = np.minimum(served, 1.0)
    total = (price[members] * numbers).sum(axis=1)
    with np.errstate(divide="ignore"):
        tokens_per_usd = served / total
    order = np.lexsort((np.arange(len(total)), total, -tokens_per_usd))
    return _Ranked(members=members, numbers=numbers, served_frac=served, counted_usd_per_h=total).take(order)


def row_members(coverage: Coverage, problem: AllocationProblem, row: int) -> tuple[Ints, Floats]:
    """Templates of the row's own phase, in their order, and the share of its demand that each covers."""
    own = [
        group
        for group in coverage.groups
        if problem.templates.phases[int(group.members[0])] is problem.demand[row].phase and row in group.rows
    ]
    if not own:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    members = np.sort(np.concatenate([group.members for group in own]))
    amount = own[0].amounts[own[0].rows.index(row)]
    with np.errstate(over="ignore"):
        return members, np.minimum(problem.templates.throughput[members] / amount, 1e9)


def _pairs(
    problem: AllocationProblem, held: Ints, prefill: tuple[Ints, Floats], decode: tuple[Ints, Floats]
) -> tuple[Ints, Ints, Floats]:
    """Every prefill with every decode replica, at the two numbers of decode replicas that can be best."""
    p, q = (grid.ravel() for grid in np.meshgrid(np.arange(len(prefill[0])), np.arange(len(decode[0])), indexing="ij"))
    if problem.templates.variants is not None:
        variants = np.array(problem.templates.variants)
        alike = variants[prefill[0][p]] == variants[decode[0][q]]
        p, q = p[alike], q[alike]
    nodes = problem.templates.nodes
    left = held - nodes[prefill[0][p]]
    need = nodes[decode[0][q]]
    room = np.where(need > 0, left // np.maximum(need, 1), np.iinfo(np.int64).max).min(axis=1)
    ratio = np.minimum(prefill[1], 1.0)[p] / decode[1][q]
    parts = []
    for wished in (np.floor(ratio), np.ceil(ratio)):
        number = np.minimum(np.maximum(wished, 1.0), room.astype(np.float64)).astype(np.int64)
        some = np.flatnonzero(number >= 1)
        parts.append((p[some], q[some], number[some]))
    p, q, number = (np.concatenate(part) for part in zip(*parts, strict=True))
    members = np.stack((prefill[0][p], decode[0][q]), axis=1)
    numbers = np.stack((np.ones_like(number), number), axis=1)
    return members, numbers, np.minimum(prefill[1][p], number * decode[1][q])


def _kept(
    problem: AllocationProblem, coverage: Coverage, rows: list[int], ranked: _Ranked, keep: int
) -> Iterator[Ints]:
    """The first combo of each pair of configurations, `keep` of them; as many more without spot nodes where it matters."""
    if not len(ranked.members):
        return
    pairs = problem.templates.nodes.argmax(axis=1)[ranked.members]
    _, first = np.unique(pairs, axis=0, return_index=True)
    first = np.sort(first)
    kept = set(first[:keep].tolist())
    if any(problem.demand[row].on_demand_frac for row in rows):
        steady = ~coverage.spot_of[ranked.members[first]].any(axis=1)
        kept |= set(first[steady][:keep].tolist())
    for index in sorted(kept):
        yield np.array([index])
