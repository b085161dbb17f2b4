"""Rows that guarantee service: per-region demand and N+1 redundancy.

A unit u (a demand row, or the two rows of a same-region pair) is served c_z in zone z: a region (`region_demand`), a place
(pairs), or everywhere at once. Of its demand the fractions f_r must be served in region r, the rest anywhere, so its missing
fraction is max(1 - sum_z c_z, sum_r (f_r - c_r)+): the most that can be assigned is the rest of that.

  region_demand  c_r + m_r >= f_r,  s_u >= sum_r m_r
  redundancy     for each zone z and each kind of instance whose loss counts there (of a row that asks for a spare; both phases
                 of a pair lose an aggregated one), with c'_z what the zone still serves without its largest one:
                   sum_{q /= z} c_q + c'_z + s_u + v_u >= 1
                   c'_r + m'_r >= f_r,  s_u + v_u >= sum_{q /= r} m_q + m'_r      where its region r has a fraction

v_u is what is served but would not survive a loss. The largest instance is among those used: with the throughputs of the
columns ascending, l_1 < ... < l_K, binary y_k = 1 where none of l_k or above is used, hence y_k <= y_k+1, x_j <= M (1 - y_k)
for each column j of throughput l_k, and the largest is l_K - sum_k (l_k - l_(k-1)) y_k. M: more instances of one throughput
than cover everything and one more are never of use.

Lossless with redundancy as without: T capped at the demand (all others together either hold one that covers everything or
none is capped); dominance and price fronts (swap an instance for another that gives no less: whichever is lost afterwards,
what is left gives no less than before).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coral_core.allocation.coverage import Floats, Ints
from coral_core.allocation.rows import Family, Rows, Term, row_scale

_NOTHING = Term(column=np.zeros(0, dtype=np.int64), value=np.zeros(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Columns of a zone that may lose an instance, and the fraction of each affected row that one covers.

    Of the columns of one `group` and throughput no more than `most` together are of use.
    """

    columns: Ints
    group: Ints
    most: Floats
    frac_by_row: dict[int, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """Where instances add up: what each row of the unit gets there, and what counts as served (one term for one row)."""

    region: int | None
    rows: dict[int, Term]
    served: Term
    losses: tuple[Loss, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """`y[k]` says that none of the columns of level k or above is used."""

    y: Ints
    columns: Ints
    level: Ints


@dataclass(slots=True, kw_only=True)
class Guarantees:
    """Adds the rows of units to a program, and knows what its own variables are worth in a given plan."""

    rows: Rows
    levels: list[_Levels] = field(default_factory=list)
    kept: list[tuple[int, list[Term]]] = field(default_factory=list)
    missing: list[tuple[int, Term]] = field(default_factory=list)

    def add(
        self, unit: tuple[int, ...], zones: list[Zone], fracs: dict[int, float], short: int, exposed: int | None
    ) -> None:
        """Rows of a unit: `short` is its s, `exposed` its v (None: it asks for no spare)."""
        asked = self._region_demand(unit[0], zones, fracs, short)
        if exposed is None:
            return
        met = Term.of(np.array([short, exposed]))
        for z, zone in enumerate(zones):
            for loss in zone.losses:
                left = self._without_largest(zone, loss)
                others = [other.served for q, other in enumerate(zones) if q != z]
                self._cover((Family.REDUNDANCY, unit[0], z), left.plus(*others), met, 1.0)
                if zone.region in asked:
                    near = [o.served for q, o in enumerate(zones) if q != z and o.region == zone.region]
                    lacking = self._missing(left.plus(*near), fracs[zone.region], (Family.REDUNDANCY, unit[0], z))
                    elsewhere = [lacking, *(m for r, m in asked.items() if r != zone.region)]
                    row = met.plus(*(Term.of(np.array([m]), -1.0) for m in elsewhere))
                    self.rows.add((Family.LINK, unit[0], 0), row, lower=0.0)

    def fill(self, x: Floats) -> None:
        """Set the own variables of `x`, whose others are set, to what they are worth."""
        for levels in self.levels:
            used = levels.level[x[levels.columns] > 0.5]
            x[levels.y] = np.arange(len(levels.y)) > used.max(initial=-1)
        for index, terms in self.kept:
            x[index] = min(1.0, max(0.0, min(term.at(x) for term in terms)))
        for index, lacking in self.missing:
            x[index] = max(0.0, lacking.at(x))

    @property
    def level_variables(self) -> Ints:
        """All y: which sizes are not used."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(levels.y for levels in self.levels)])

    def _region_demand(self, row: int, zones: list[Zone], fracs: dict[int, float], short: int) -> dict[int, int]:
        asked = {}
        for region, frac in fracs.items():
            served = _NOTHING.plus(*(zone.served for zone in zones if zone.region == region))
            asked[region] = self._missing(served, frac, (Family.REGION_DEMAND, row, region))
        if asked:
            all_missing = Term.of(np.array(list(asked.values())), -1.0)
            self.rows.add((Family.LINK, row, 0), Term.of(np.array([short])).plus(all_missing), lower=0.0)
        return asked

    def _missing(self, served: Term, frac: float, key: tuple[Family, int, int]) -> int:
        """A new m >= frac - served."""
        (index,) = self.rows.variables(np.array([frac])).tolist()
        self._cover(key, served, Term.of(np.array([index])), frac)
        self.missing.append((index, Term(column=served.column, value=-served.value, less=-frac - served.less)))
        return int(index)

    def _cover(self, key: tuple[Family, int, int], term: Term, slack: Term, lower: float) -> None:
        self.rows.add(key, term.plus(slack), lower=lower, scale=row_scale(term.value))

    def _without_largest(self, zone: Zone, loss: Loss) -> Term:
        """What the zone serves without its largest instance of this kind, as a term."""
        levels = self._levels(loss)
        left: list[tuple[int, Term]] = []
        for row, term in zone.rows.items():
            if row in loss.frac_by_row:
                size = np.zeros(len(levels.y))
                size[levels.level] = loss.frac_by_row[row]
                step = np.diff(size, prepend=0.0)
                left.append((row, term.plus(Term(column=levels.y, value=step, less=float(size[-1])))))
            else:
                left.append((row, term))
        if len(left) == 1:
            return left[0][1]
        (index,) = self.rows.variables(np.ones(1)).tolist()
        for row, term in left:
            minus = Term.of(np.array([index]), -1.0)
            self.rows.add((Family.LEFT, row, index), term.plus(minus), lower=0.0, scale=row_scale(term.value))
        self.kept.append((index, [term for _, term in left]))
        return Term.of(np.array([index]))

    def _levels(self, loss: Loss) -> _Levels:
        sizes = np.sum(list(loss.frac_by_row.values()), axis=0)
        distinct, level = np.unique(sizes, return_inverse=True)
        y = self.rows.variables(np.ones(len(distinct)), integer=True)
        for k in range(len(distinct)):
            here = np.flatnonzero(level == k)
            groups = np.unique(loss.group[here]).tolist()
            most = sum(max(float(loss.most[here[loss.group[here] == g]].max()), 1.0) for g in groups)
            used = Term.of(loss.columns[here], 1 / most)
            self.rows.add((Family.LINK, int(y[k]), 1), used.plus(Term.of(y[[k]])), upper=1.0)
            if k:
                self.rows.add((Family.LINK, int(y[k]), 2), Term.of(y[[k - 1]]).plus(Term.of(y[[k]], -1.0)), upper=0.0)
        levels = _Levels(y=y, columns=loss.columns, level=level)
        self.levels.append(levels)
        return levels
