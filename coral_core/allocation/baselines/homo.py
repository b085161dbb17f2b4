"""Baseline `homo`: model by model, greedily the best goodput per USD among homogeneous templates (DESIGN 3.7).

Goodput is demand that is met, so an instance counts for no more than what its row still lacks. The price is what the
instance adds to the objective: churn included unless it runs already. Demand rows are taken in the order given; models
whose phases must share a region are filled region by region, the cheapest first. Nothing is ever taken back.
"""

from __future__ import annotations

import math
import time

import numpy as np

from coral_core.allocation.assess import assess, result_of, running_counts
from coral_core.allocation.baselines.homo_joint import homogeneous
from coral_core.allocation.check import check_problem
from coral_core.allocation.coverage import DEMAND_TOLERANCE_FRAC, Coverage, Floats, coverage_of
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
    greedy = _Greedy(problem, coverage)
    for unit in coverage.units():
        if len(unit) == 1:
            greedy.fill(unit[0], range(len(problem.regions)), 1.0)
        else:
            greedy.fill_together(unit)
    for row, demand in enumerate(problem.demand):
        greedy.meet_floor(row, demand.min_instances)
    result = result_of(
        problem,
        greedy.counts,
        assess(problem, coverage, greedy.counts),
        bound_usd_per_h=0.0,
        shortfall_proven=False,
        method="homo",
        statistics={"columns_all": float(greedy.counts.size), "solve_s": time.perf_counter() - started},
    )
    verify_allocation(problem, result)
    return result


_BISECTIONS = 20


class _Greedy:
    """Instances chosen so far and what they leave: nodes, room under caps, demand."""

    def __init__(self, problem: AllocationProblem, coverage: Coverage) -> None:
        self.problem = problem
        self.nodes = problem.templates.nodes
        self.left = problem.available.copy()
        self.counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
        self.running = running_counts(problem)
        self.price = self.nodes.astype(np.float64) @ np.nan_to_num(problem.price_usd_per_h).T
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

    def fill(self, row: int, regions: range, target_frac: float) -> None:
        """Add instances in `regions` until they cover `target_frac` of the row there, or nothing more fits."""
        while True:
            lacking = target_frac - float(self.frac[row] @ self.counts[:, regions].sum(axis=1))
            if lacking <= DEMAND_TOLERANCE_FRAC:
                return
            gain = np.minimum(self.frac[row], lacking)
            best = self._best(gain, regions)
            if best is None:
                return
            t, r = best
            # as many as are whole gains at this price; the rest is looked at again
            whole = max(1, math.floor(lacking / self.frac[row, t]))
            self._add(t, r, min(whole, self._room(t, r)))

    def fill_together(self, unit: tuple[int, ...]) -> None:
        """Serve the rows of `unit` region by region, each region only as far as all of them can be served in it."""
        lacking = 1.0
        for r in sorted(range(len(self.problem.regions)), key=lambda r: self._rate(unit, r)):
            if lacking <= DEMAND_TOLERANCE_FRAC:
                return
            # the phases compete for nodes, so what all of them reach is found by bisection
            low, high = 0.0, lacking
            if not self._serve(unit, r, lacking):
                for _ in range(_BISECTIONS):
                    middle = (low + high) / 2
                    low, high = (middle, high) if self._serve(unit, r, middle, keep=False) else (low, middle)
                self._serve(unit, r, low)
            lacking -= min(float(self.frac[row] @ self.counts[:, r]) for row in unit)

    def _serve(self, unit: tuple[int, ...], region: int, target_frac: float, *, keep: bool = True) -> bool:
        """Whether all rows of `unit` reach the target in the region; what was added is kept only if so, and wished."""
        before = (self.counts.copy(), self.left.copy())
        for row in unit:
            self.fill(row, range(region, region + 1), target_frac)
        reached = min(float(self.frac[row] @ self.counts[:, region]) for row in unit)
        served = reached >= target_frac - DEMAND_TOLERANCE_FRAC
        if not (served and keep):
            self.counts, self.left = before
        return served

    def meet_floor(self, row: int, floor: int) -> None:
        """Add the cheapest instances until the row has `floor` of them, or nothing more fits."""
        while int(self.counts[self.enters[row]].sum()) < floor:
            best = self._best(self.enters[row].astype(np.float64), range(len(self.problem.regions)))
            if best is None:
                return
            self._add(*best, 1)

    def _rate(self, unit: tuple[int, ...], region: int) -> float:
        """Least USD/h per whole demand of the unit's rows in a region; infinite where one cannot be served."""
        total = 0.0
        for row in unit:
            usable = (self.frac[row] > 0) & (self.nodes <= self.left[region]).all(axis=1)
            rates = self.price[usable, region] / self.frac[row, usable]
            total += float(rates.min(initial=math.inf))
        return total

    def _best(self, gain: Floats, regions: range) -> tuple[int, int] | None:
        """The (template, region) of most gain per USD that fits; of equals the cheaper, then the first."""
        found: tuple[float, float, int, int] | None = None
        for r in regions:
            fits = np.flatnonzero((gain > 0) & (self.nodes <= self.left[r]).all(axis=1) & self._below_caps())
            if not len(fits):
                continue
            fresh = self.counts[fits, r] >= self.running[fits, r]
            price = self.price[fits, r] * np.where(fresh, 1 + self.problem.churn_k, 1.0)
            with np.errstate(divide="ignore"):
                rate = price / gain[fits]
            k = int(np.lexsort((fits, price, rate))[0])
            candidate = (float(rate[k]), float(price[k]), r, int(fits[k]))
            found = candidate if found is None else min(found, candidate)
        return None if found is None else (found[3], found[2])

    def _below_caps(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
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
        if self.counts[t, r] < self.running[t, r]:
            room = min(room, int(self.running[t, r] - self.counts[t, r]))
        for row, demand in enumerate(self.problem.demand):
            if demand.max_instances is not None and self.enters[row, t]:
                room = min(room, demand.max_instances - self._instances(row))
        return room

    def _add(self, t: int, r: int, number: int) -> None:
        self.counts[t, r] += number
        self.left[r] -= number * self.nodes[t]
