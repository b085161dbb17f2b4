"""Baseline `homo`: model by model, greedily the best goodput per USD among homogeneous templates (DESIGN 3.7).

Goodput is demand that is met, so an instance counts for no more than what its row still lacks. The price is what the
instance adds to the objective: churn included unless it runs already, preferences counted. Demand rows are taken in the
order given; models whose phases must share a place (a region, and one variant of the model) are filled place by place,
the cheapest first. Nothing is ever taken back.

Every family is kept, in this order for each model: what a region must serve, what must be served on demand, the rest, the
spare instances; floors last. Exclusions, caps and the budget bound each step, so whoever comes last gets what is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coral_core.allocation.assess import Assessment, assess, pool_units, result_of, running_counts
from coral_core.allocation.baselines.homo_joint import homogeneous
from coral_core.allocation.check import MAX_COUNT, check_problem
from coral_core.allocation.coverage import DEMAND_TOLERANCE_FRAC, Bools, Coverage, Floats, Ints, coverage_of
from coral_core.allocation.preferences import counted_usd_per_h, real_prices
from coral_core.allocation.reduce import excluded
from coral_core.allocation.verify import verify_allocation
from coral_core.domain.allocation import AllocationProblem, AllocationResult


def homo(problem: AllocationProblem) -> AllocationResult:
    """A verified plan without proof: `bound_usd_per_h` is 0, status `gap`.

    Raises InputError for a problem without a clear meaning.
    """
    started = time.perf_counter()
    check_problem(problem)
    problem = homogeneous(problem)
    coverage = coverage_of(problem)
    # with a share on demand both markets round up to whole instances: without spot nodes it may then be cheaper
    attempts = [_chosen(problem, coverage, banned) for banned in _markets(coverage)]
    counts, assessment = min(attempts, key=lambda attempt: _rank(problem, attempt[1]))
    result = result_of(
        problem,
        counts,
        assessment,
        bound_usd_per_h=0.0,
        shortfall_proven=False,
        method="homo",
        statistics={"columns_all": float(counts.size), "solve_s": time.perf_counter() - started},
    )
    verify_allocation(problem, result)
    return result


def _markets(coverage: Coverage) -> list[Bools]:
    """(templates,) each: what to do without. `spot_of` is set only where some row asks for service on demand."""
    none = np.zeros_like(coverage.spot_of)
    return [none, coverage.spot_of] if coverage.spot_of.any() else [none]


def _chosen(problem: AllocationProblem, coverage: Coverage, banned: Bools) -> tuple[Ints, Assessment]:
    greedy = _Greedy(problem, coverage, banned)
    for unit in coverage.units():
        greedy.serve(unit)
    for row, demand in enumerate(problem.demand):
        greedy.meet_floor(row, demand.min_instances)
    return greedy.counts, assess(problem, coverage, greedy.counts)


def _rank(problem: AllocationProblem, found: Assessment) -> tuple[int, float, float]:
    weights = [row.weight for row in problem.demand]
    missing = math.fsum(weight * frac for weight, frac in zip(weights, found.missing_frac, strict=True))
    return sum(found.deficit), round(missing, 9), found.objective_usd_per_h


_BISECTIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Zone:
    """Where coverage adds up: regions, and the templates that count there."""

    regions: tuple[int, ...]
    members: Bools

    def of(self, members: Bools) -> _Zone:
        """The zone with fewer templates."""
        return _Zone(regions=self.regions, members=self.members & members)


class _Greedy:
    """Instances chosen so far and what they leave: nodes, money, room under caps, demand."""

    def __init__(self, problem: AllocationProblem, coverage: Coverage, banned: Bools) -> None:
        self.problem = problem
        self.coverage = coverage
        self.nodes = problem.templates.nodes
        self.left = problem.available.copy()
        self.counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
        self.spent_usd_per_h = 0.0
        self.running = running_counts(problem)
        self.paid = np.asarray(self.nodes.astype(np.float64) @ real_prices(problem).T)
        self.counted = counted_usd_per_h(problem)
        self.banned = excluded(problem) | banned[:, None]
        self.limit = np.array([pool.limit for pool in problem.pools])
        # (pools, templates, regions): what an instance takes
        self.taken = np.einsum("tc,krc->ktr", self.nodes, pool_units(problem))
        rows = len(problem.demand)
        self.frac = np.zeros((rows, len(problem.templates)))
        self.enters = np.zeros((rows, len(problem.templates)), dtype=bool)
        for group in coverage.groups:
            for row, amount in zip(group.rows, group.amounts, strict=True):
                self.enters[row, group.members] = True
                if coverage.active[row]:
                    with np.errstate(over="ignore"):
                        covers = np.minimum(problem.templates.throughput[group.members] / amount, 1e9)
                    self.frac[row, group.members] = covers

    def serve(self, unit: tuple[int, ...]) -> None:
        """Meet what the rows of `unit` ask for together, as far as nodes and money go."""
        asked = self.coverage.region_fracs[unit[0]]
        for region, frac in asked:
            self.fill(unit, self._zones(unit, [region]), frac)
        everywhere = range(len(self.problem.regions))
        on_demand = max(self.problem.demand[row].on_demand_frac for row in unit)
        if on_demand > 0:
            self.fill(unit, [zone.of(~self.coverage.spot_of) for zone in self._zones(unit, everywhere)], on_demand)
        self.fill(unit, self._zones(unit, everywhere), 1.0)
        if self.coverage.spare[list(unit)].any():
            for regions in [*([region] for region, _ in asked), everywhere]:
                self.add_spares(unit, self._zones(unit, regions))

    def _zones(self, unit: tuple[int, ...], regions: Iterable[int]) -> list[_Zone]:
        """All `regions` at once for a row alone; each region and variant for rows that are served together."""
        if len(unit) == 1:
            return [_Zone(regions=tuple(regions), members=np.ones(len(self.nodes), dtype=bool))]
        variants = range(self.coverage.n_variants)
        return [
            _Zone(regions=(r,), members=self.coverage.variant_of == variant) for r in regions for variant in variants
        ]

    def fill(self, unit: tuple[int, ...], zones: Sequence[_Zone], target_frac: float) -> None:
        """Serve so much of the unit in these zones together, each only as far as all rows can be served in it."""
        served = sum(self._served(unit, zone) for zone in zones)
        for zone in sorted(zones, key=lambda zone: self._rate(unit, zone)):
            lacking = target_frac - served
            if lacking <= DEMAND_TOLERANCE_FRAC:
                return
            before = self._served(unit, zone)
            if len(unit) == 1:
                self._fill_row(unit[0], zone, before + lacking)
            elif not self._try(unit, zone, before + lacking):
                # the phases compete for nodes, so what all of them reach is found by bisection
                low, high = before, before + lacking
                for _ in range(_BISECTIONS):
                    middle = (low + high) / 2
                    low, high = (middle, high) if self._try(unit, zone, middle, keep=False) else (low, middle)
                self._try(unit, zone, low)
            served += self._served(unit, zone) - before

    def add_spares(self, unit: tuple[int, ...], zones: Sequence[_Zone]) -> None:
        """Where something is served, enough beside it that any one instance may fail; none larger than those there."""
        for zone in zones:
            served = min(self._served(unit, zone), 1.0)
            for row in unit:
                used = zone.members & self.counts[:, list(zone.regions)].any(axis=1) & (self.frac[row] > 0)
                if self.coverage.spare[row] and used.any():
                    largest = float(self.frac[row, used].max())
                    self._fill_row(row, zone.of(self.frac[row] <= largest), served + largest, measured_in=zone)

    def meet_floor(self, row: int, floor: int) -> None:
        """Add the cheapest instances until the row has `floor` of them, or nothing more fits."""
        everywhere = tuple(range(len(self.problem.regions)))
        while int(self.counts[self.enters[row]].sum()) < floor:
            best = self._best(self.enters[row].astype(np.float64), everywhere)
            if best is None:
                return
            self._add(*best, 1)

    def _fill_row(self, row: int, zone: _Zone, target_frac: float, *, measured_in: _Zone | None = None) -> None:
        """Add instances of the zone until they cover `target_frac` of the row there, or nothing more fits."""
        while True:
            lacking = target_frac - self._covered(row, measured_in or zone)
            if lacking <= DEMAND_TOLERANCE_FRAC:
                return
            gain = np.where(zone.members, np.minimum(self.frac[row], lacking), 0.0)
            best = self._best(gain, zone.regions)
            if best is None:
                return
            t, r = best
            # as many as are whole gains at this price; the rest is looked at again
            whole = max(1, math.floor(min(lacking / self.frac[row, t], MAX_COUNT)))
            self._add(t, r, min(whole, self._room(t, r)))

    def _try(self, unit: tuple[int, ...], zone: _Zone, target_frac: float, *, keep: bool = True) -> bool:
        """Whether all rows of `unit` reach the target in the zone; what was added is kept only if so, and wished."""
        before = (self.counts.copy(), self.left.copy(), self.spent_usd_per_h)
        for row in unit:
            self._fill_row(row, zone, target_frac)
        served = self._served(unit, zone) >= target_frac - DEMAND_TOLERANCE_FRAC
        if not (served and keep):
            self.counts, self.left, self.spent_usd_per_h = before
        return served

    def _covered(self, row: int, zone: _Zone) -> float:
        return float((self.frac[row] * zone.members) @ self.counts[:, list(zone.regions)].sum(axis=1))

    def _served(self, unit: tuple[int, ...], zone: _Zone) -> float:
        return min(self._covered(row, zone) for row in unit)

    def _rate(self, unit: tuple[int, ...], zone: _Zone) -> float:
        """Least USD/h per whole demand of the unit's rows in a zone; infinite where one cannot be served."""
        total = 0.0
        for row in unit:
            rates = [math.inf]
            for r in zone.regions:
                usable = zone.members & (self.frac[row] > 0) & self._fits(r)
                rates.append(float((self.counted[usable, r] / self.frac[row, usable]).min(initial=math.inf)))
            total += min(rates)
        return total

    def _fits(self, region: int) -> Bools:
        fits: Bools = (self.nodes <= self.left[region]).all(axis=1) & ~self.banned[:, region]
        fits &= (self.taken[:, :, region] <= self._left_of_pools()[:, None]).all(axis=0)
        return fits & (self.paid[:, region] <= self._money()) if self._money() < math.inf else fits

    def _left_of_pools(self) -> Floats:
        return np.asarray(self.limit - (self.taken * self.counts).sum(axis=(1, 2)))

    def _money(self) -> float:
        budget = self.problem.options.budget_usd_per_h
        return math.inf if budget is None else budget - self.spent_usd_per_h

    def _best(self, gain: Floats, regions: tuple[int, ...]) -> tuple[int, int] | None:
        """The (template, region) of most gain per USD that fits; of equals the cheaper, then the first."""
        found: tuple[float, float, int, int] | None = None
        for r in regions:
            fits = np.flatnonzero((gain > 0) & self._fits(r) & self._below_caps())
            if not len(fits):
                continue
            fresh = self.counts[fits, r] >= self.running[fits, r]
            price = self.counted[fits, r] + np.where(fresh, self.paid[fits, r] * self.problem.churn_k, 0.0)
            with np.errstate(divide="ignore"):
                rate = price / gain[fits]
            k = int(np.lexsort((fits, price, rate))[0])
            candidate = (float(rate[k]), float(price[k]), r, int(fits[k]))
            found = candidate if found is None else min(found, candidate)
        return None if found is None else (found[3], found[2])

    def _below_caps(self) -> Bools:
        room = np.ones(len(self.nodes), dtype=bool)
        for row, demand in enumerate(self.problem.demand):
            if demand.max_instances is not None and self._instances(row) >= demand.max_instances:
                room &= ~self.enters[row]
        return room

    def _instances(self, row: int) -> int:
        return int(self.counts[self.enters[row]].sum())

    def _room(self, t: int, r: int) -> int:
        """Instances that fit, at one price: up to what runs, or beyond it."""
        used = self.nodes[t] > 0
        room = int((self.left[r, used] // self.nodes[t, used]).min())
        shared = self.taken[:, t, r] > 0
        if shared.any():
            room = min(room, int((self._left_of_pools()[shared] // self.taken[shared, t, r]).min()))
        if self.counts[t, r] < self.running[t, r]:
            room = min(room, int(self.running[t, r] - self.counts[t, r]))
        for row, demand in enumerate(self.problem.demand):
            if demand.max_instances is not None and self.enters[row, t]:
                room = min(room, demand.max_instances - self._instances(row))
        if self.paid[t, r] > 0 and self._money() < math.inf:
            room = min(room, math.floor(self._money() / self.paid[t, r]))
        return room

    def _add(self, t: int, r: int, number: int) -> None:
        self.counts[t, r] += number
        self.left[r] -= number * self.nodes[t]
        self.spent_usd_per_h += number * float(self.paid[t, r])
