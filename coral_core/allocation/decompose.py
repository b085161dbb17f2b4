"""Solve models apart as if no capacity were shared, and see whether the plans fit together.

Without capacity rows the problem falls into blocks of demand rows that share templates: one (model, phase), or one model
where aggregated templates or `pd_same_region` join its phases. Dropping rows is a relaxation. So if the joined plan fits
into what is available it is optimal, block bounds adding up; and if every block is served in full, the sum of their cost
bounds holds for every plan that serves all in full. Inside a block only price and throughput matter, hence the columns
are cut to the price front (`fronts`) first, and most
blocks are covering problems that a dynamic program solves (`cover`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.columns import Columns, with_templates
from coral_core.allocation.cover import CoverProblem, Items, cover, joined
from coral_core.allocation.coverage import Bools, Coverage, Group, Ints, coverage_of, fraction
from coral_core.allocation.formulation import formulate
from coral_core.allocation.fronts import Fronts
from coral_core.allocation.stages import Plan, Staged, StagedSolve
from coral_core.allocation.wide import Effort
from coral_core.domain.allocation import AllocationProblem
from coral_core.solver.program import Solver

COVER_FROM_TEMPLATES = 2_000
"""Below this an integer program is as fast as loading the compiled dynamic program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The joined plan; `settled`: it fits, so it answers the joint problem. `columns`: how many were left on the fronts."""

    staged: Staged
    settled: bool
    full_service_bound_usd_per_h: float
    columns: int


def blocks_of(problem: AllocationProblem, coverage: Coverage) -> list[tuple[int, ...]]:
    """Demand rows that must be solved together, each row in one block."""
    block = list(range(len(problem.demand)))
    for linked in [*(group.rows for group in coverage.groups), *coverage.pairs]:
        target, merged = block[linked[0]], {block[row] for row in linked}
        block = [target if name in merged else name for name in block]
    return [tuple(i for i, name in enumerate(block) if name == first) for first in dict.fromkeys(block)]


def asking_blocks(problem: AllocationProblem, coverage: Coverage) -> list[tuple[int, ...]]:
    """The blocks that ask for anything: throughput, or instances."""
    return [
        rows
        for rows in blocks_of(problem, coverage)
        if any(coverage.active[i] or problem.demand[i].min_instances for i in rows)
    ]


def solve_blocks(
    problem: AllocationProblem, coverage: Coverage, fronts: Fronts, solver: Solver, effort: Effort
) -> Blocks:
    """Solve every block without capacity limits, within less than half of the time left, and join the plans.

    Where they fit together and some are not within the gap, those get all the time left.
    """
    blocks = asking_blocks(problem, coverage)
    share = effort.within(0.4)
    parts: list[tuple[Block, Ints, Staged]] = []
    for number, rows in enumerate(blocks):
        by_region = any(row in pair for pair in coverage.pairs for row in rows) or bool(
            any(coverage.region_fracs[row] for row in rows)
        )
        picked = fronts.columns(rows, by_region=by_region)
        kept, own = np.unique(picked.template, return_inverse=True)
        block = Block.of(with_templates(problem, kept), replace(picked, template=own), rows, by_region=by_region)
        use_cover = len(problem.templates) >= COVER_FROM_TEMPLATES
        staged = _solve_block(block, solver, share.within(1 / (len(blocks) - number)), use_cover=use_cover)
        parts.append((block, kept, staged))
    joined = _joined(problem, parts)
    loose = [b for b, (_, _, staged) in enumerate(parts) if _loose(staged, effort)]
    if not joined.settled or not loose:
        return joined
    for number, b in enumerate(loose):
        block, kept, staged = parts[b]
        again = block.solve(solver).run(effort.within(1 / (len(loose) - number)), start=staged.plan)
        better = max(again.cost_bound_usd_per_h, staged.cost_bound_usd_per_h)
        parts[b] = (block, kept, replace(again, cost_bound_usd_per_h=better))
    tighter = _joined(problem, parts)
    return tighter if tighter.settled else joined


def _loose(staged: Staged, effort: Effort) -> bool:
    """Whether all is served, at a cost not proven to be within the gap."""
    return staged.plan.full and (
        staged.plan.cost_usd_per_h - staged.cost_bound_usd_per_h > effort.gap_frac * staged.plan.cost_usd_per_h
    )


def _joined(problem: AllocationProblem, parts: list[tuple[Block, Ints, Staged]]) -> Blocks:
    counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
    used = np.zeros_like(problem.available)
    for block, kept, part in parts:
        counts[kept] += part.plan.counts
        used += part.plan.counts.T @ block.problem.templates.nodes
    solved = [part for _, _, part in parts]
    plan = Plan(
        counts=counts,
        deficit=sum(block.plan.deficit for block in solved),
        shortfall=math.fsum(block.plan.shortfall for block in solved),
        cost_usd_per_h=math.fsum(block.plan.cost_usd_per_h for block in solved),
    )
    staged = Staged(
        plan=plan,
        cost_bound_usd_per_h=math.fsum(block.cost_bound_usd_per_h for block in solved),
        deficit_bound=math.fsum(block.deficit_bound for block in solved),
        shortfall_bound=math.fsum(block.shortfall_bound for block in solved),
    )
    return Blocks(
        staged=staged,
        settled=bool((used <= problem.available).all()),
        columns=sum(len(block.columns) for block, _, _ in parts),
        full_service_bound_usd_per_h=staged.cost_bound_usd_per_h if plan.full else 0.0,
    )


def _solve_block(block: Block, solver: Solver, effort: Effort, *, use_cover: bool) -> Staged:
    """By dynamic program where the block is of that kind and it gets within the gap, else by integer program."""
    solve = block.solve(solver)
    if not (use_cover and block.coverable):
        return solve.run(effort)
    found = cover(block.cover_problem(), gap_frac=effort.gap_frac, deadline_s=effort.deadline_s)
    if found.plan is None:
        return solve.run(effort)
    counts = np.zeros((len(block.problem.templates), len(block.problem.regions)), dtype=np.int64)
    for column, number in found.plan.items():
        counts[block.columns.template[column], block.columns.region[column]] += number
    plan = solve.judge(counts)
    if plan.cost_usd_per_h - found.bound_usd_per_h <= effort.gap_frac * plan.cost_usd_per_h:
        return Staged(plan=plan, cost_bound_usd_per_h=found.bound_usd_per_h)
    staged = solve.run(effort, start=plan)
    better = max(staged.cost_bound_usd_per_h, found.bound_usd_per_h)
    return replace(staged, cost_bound_usd_per_h=better) if staged.plan.full else staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Demand rows that are solved together, and the columns that may matter to them where no capacity binds."""

    problem: AllocationProblem
    coverage: Coverage
    columns: Columns
    rows: tuple[int, ...]
    by_region: bool

    @classmethod
    def of(cls, problem: AllocationProblem, columns: Columns, rows: tuple[int, ...], *, by_region: bool) -> Block:
        """A block of a problem that holds its templates alone."""
        return cls(problem=problem, coverage=coverage_of(problem), columns=columns, rows=rows, by_region=by_region)

    def solve(self, solver: Solver) -> StagedSolve:
        """The block as an integer program without capacity limits."""
        formulation = formulate(self.problem, self.coverage, self.columns, rows=self.rows, capacity=False)
        return StagedSolve(
            problem=self.problem, coverage=self.coverage, formulation=formulation, rows=self.rows, solver=solver
        )

    @property
    def groups(self) -> list[Group]:
        """Groups of templates that enter the block's rows."""
        return [group for group in self.coverage.groups if group.rows[0] in self.rows]

    @property
    def coverable(self) -> bool:
        """Whether the block is a `CoverProblem`: it asks for throughput alone, and alike of all its rows."""
        rows = [self.problem.demand[i] for i in self.rows]
        plain = all(row.min_instances == 0 and row.max_instances is None and row.weight > 0 for row in rows)
        plain &= not any(row.on_demand_frac for row in rows) and not self.coverage.guaranteed[list(self.rows)].any()
        active = all(self.coverage.active[i] for i in self.rows)
        alike = all(len(group.rows) == 1 or len(set(group.amounts)) == 1 for group in self.groups)
        return plain and active and alike

    def places(self) -> list[tuple[int | None, tuple[Items, ...]]]:
        """Places (`Coverage.place`; None: all together) in which every row can be served, and each row's items there."""
        kind = self.coverage.group_of[self.columns.template]
        alone = {i: [g for g, group in enumerate(self.coverage.groups) if group.rows == (i,)] for i in self.rows}
        found: list[tuple[int | None, tuple[Items, ...]]] = []
        place = self.coverage.place(self.columns.template, self.columns.region)
        for p in sorted(set(place.tolist())) if self.by_region else (None,):
            here = np.ones(len(kind), dtype=bool) if p is None else place == p
            own = tuple(
                joined([self._items(here & (kind == g), self.coverage.groups[g].amounts[0]) for g in alone[i]])
                for i in self.rows
            )
            if all(len(items) for items in own):
                found.append((p, own))
        return found

    def cover_problem(self) -> CoverProblem:
        """The block as a covering problem; its columns keep their numbers."""
        everywhere = joined(
            [
                self._items(self.coverage.group_of[self.columns.template] == g, group.amounts[0])
                for g, group in enumerate(self.coverage.groups)
                if len(group.rows) > 1 and group.rows[0] in self.rows
            ]
        )
        return CoverProblem(places=tuple(own for _, own in self.places()), everywhere=everywhere)

    def _items(self, chosen: Bools, amount: float) -> Items:
        column = np.flatnonzero(chosen)
        frac = fraction(self.problem.templates.throughput[self.columns.template[column]], amount)
        column, frac = column[frac > 0], frac[frac > 0]
        return Items(
            column=column,
            price_usd_per_h=self.columns.price_usd_per_h[column],
            covered_frac=frac,
            upper=np.where(self.columns.old[column], self.columns.upper[column], np.inf),
        )
