"""Which columns matter where no capacity binds: the price fronts, found without sorting or comparing all templates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import running_instances
from coral_core.allocation.columns import Columns, useful_instances
from coral_core.allocation.coverage import Coverage, Floats, Group, Ints
from coral_core.allocation.preferences import counted_usd_per_h
from coral_core.allocation.reduce import excluded, price_front
from coral_core.domain.allocation import AllocationProblem

_BINS = 1_024
_CHUNK_ROWS = 2_048


def rent_usd_per_h(problem: AllocationProblem) -> Floats:
    """(templates, regions): real price of one instance, infinite where the region cannot hold it or it is excluded."""
    nodes, price = problem.templates.nodes, np.nan_to_num(problem.price_usd_per_h).T
    rent = np.empty((len(nodes), len(problem.regions)))
    most = np.zeros(nodes.shape[1], dtype=np.int64)
    for start in range(0, len(nodes), _CHUNK_ROWS):  # small products stay in the cache and on one thread
        chunk = nodes[start : start + _CHUNK_ROWS]
        rent[start : start + _CHUNK_ROWS] = chunk.astype(np.float64) @ price
        np.maximum(most, chunk.max(axis=0), out=most)
    for r, held in enumerate(problem.available):
        short = np.flatnonzero(most > held)
        if len(short):
            rent[(nodes[:, short] > held[short]).any(axis=1), r] = np.inf
    if problem.exclusions:
        rent[excluded(problem)] = np.inf
    return rent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronts:
    """Picks columns by block of demand rows.

    `rent_usd_per_h` (templates, regions), as preferences count it, is infinite where an instance does not fit; `start_usd_per_h`
    is what a new one costs besides; `new_usd_per_h` has both in it, and
    both that and `old_usd_per_h` the toll, if any, that stands for what the nodes are worth elsewhere. `useful` (templates,): see `useful_instances`.
    """

    problem: AllocationProblem
    coverage: Coverage
    rent_usd_per_h: Floats
    start_usd_per_h: Floats | float
    new_usd_per_h: Floats
    old_usd_per_h: Floats
    useful: Ints

    @classmethod
    def of(cls, problem: AllocationProblem, coverage: Coverage) -> Fronts:
        """Price all templates in all regions, without a toll."""
        real = rent_usd_per_h(problem)
        rent = np.where(np.isfinite(real), counted_usd_per_h(problem), np.inf) if problem.preferences else real
        start = real * problem.churn_k if problem.churn_k > 0 else 0.0
        new = rent + start if problem.churn_k > 0 else rent
        useful = useful_instances(problem, coverage)
        return cls(
            problem=problem,
            coverage=coverage,
            rent_usd_per_h=rent,
            start_usd_per_h=start,
            new_usd_per_h=new,
            old_usd_per_h=rent,
            useful=useful,
        )

    def with_toll(self, toll_usd_per_h: Floats) -> Fronts:
        """The same with a toll (templates, regions) on every instance."""
        new = self.rent_usd_per_h + self.start_usd_per_h + toll_usd_per_h
        return replace(self, new_usd_per_h=new, old_usd_per_h=self.rent_usd_per_h + toll_usd_per_h)

    def columns(self, rows: tuple[int, ...], *, by_region: bool) -> Columns:
        """New-instance columns on the price front (on each region's own with `by_region`), and all that runs."""
        picked = [
            self._front(group, r)
            for group in self.coverage.groups
            if group.rows[0] in rows and self._asked(group)
            for r in (range(len(self.problem.regions)) if by_region else (None,))
        ]
        none = np.zeros(0, dtype=np.int64)
        template = np.concatenate([none, *(part[0] for part in picked)])
        region = np.concatenate([none, *(part[1] for part in picked)])
        old_template, old_region, running = self.running(rows)
        return Columns(
            template=np.concatenate((template, old_template)),
            region=np.concatenate((region, old_region)),
            price_usd_per_h=np.concatenate(
                (self.new_usd_per_h[template, region], self.old_usd_per_h[old_template, old_region])
            ),
            upper=np.concatenate((self.useful[template], running)).astype(np.float64),
            old=np.repeat([False, True], [len(template), len(old_template)]),
        )

    def _asked(self, group: Group) -> bool:
        return any(self.coverage.active[row] or self.problem.demand[row].min_instances for row in group.rows)

    def _front(self, group: Group, region: int | None) -> tuple[Ints, Ints]:
        rent = self.new_usd_per_h[group.members]
        place = np.full(len(rent), region) if region is not None else rent.argmin(axis=1)
        price = rent[:, region] if region is not None else rent.min(axis=1)
        most = max(group.amounts)
        throughput = np.minimum(self.problem.templates.throughput[group.members], most)
        chosen = wide_price_front(price, throughput, most)
        return group.members[chosen], place[chosen]

    def running(self, rows: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
        """Templates, regions and numbers of what runs, fits and enters `rows`, where starting anew costs more."""
        template, region, count = running_instances(self.problem)
        own = [g for g, group in enumerate(self.coverage.groups) if group.rows[0] in rows]
        held = np.minimum(count, self.useful[template])
        fit = np.isfinite(self.rent_usd_per_h[template, region])
        stays = np.isin(self.coverage.group_of[template], own) & fit & (held > 0) & (self.problem.churn_k > 0)
        return template[stays], region[stays], held[stays]


def wide_price_front(price: Floats, throughput: Floats, most: float) -> Ints:
    """Indices of `price_front` among finite prices, cut down in linear time first; `most` >= every throughput.

    What costs no less than something of a higher bin of throughputs cannot be on the front.
    """
    if not most > 0:
        finite = np.flatnonzero(np.isfinite(price))
        return finite[price_front(price[finite], throughput[finite])]
    bins = (throughput / most * _BINS).astype(np.int64)  # in this order: most may be tiny
    least = np.full(_BINS + 2, np.inf)
    np.minimum.at(least, bins, price)
    above = np.minimum.accumulate(least[::-1])[::-1][1:]
    rest = np.flatnonzero(price < above[bins])
    return rest[price_front(price[rest], throughput[rest])]
