r"""Exact placement with a free latency split (DESIGN 3.4): each stage gets its own share of the SLO.

Data: T^_j(c, b) over budgets b = beta/grid of the SLO, hops included, non-increasing in the layers j, non-decreasing in
beta; the published table for a single stage (no hop, the whole SLO); multisets M of nodes; L layers.
Variables: a partition of M into stages, layers >= 1 and a budget beta >= 1 of each stage.
Constraints: L layers in all; budgets of at most `grid` in all.
Objective: maximise the slowest stage's throughput, that of nodes A with j layers being the sum of T^_j(., b) over A.

A throughput t is reachable with at least two stages where some A and b give lam_A(t, b) + F_{M\A}(t, grid - b) >= L, with
  lam_A(t, b) = most layers that A holds as one stage within b at a throughput of at least t
  F_M(t, B)   = max over lam_M(t, B) and, over A and b, lam_A(t, b) + F_{M\A}(t, B - b)
where A contains M's first node, and only the budgets at which lam_A steps up can matter.

From the published optimum on: test just above the best known t. Where it is reachable, take the partition found to its own
optimum (the same tests on one partition), then test again; where not, the best known is the optimum. Hence never below the
published split, also where a number of stages does not divide the grid.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem, PlacementResult, PlacementStatus
from coral_core.errors import InputError
from coral_core.placement.lattice import MAX_TABLE_BYTES, LatticePlacement
from coral_core.placement.problem import Capacity, placement_at, problem_arrays

MAX_LAYERS_IN_ALL: Final = 2**24
"""Of all stages of a combination together, each with all the model's layers: exact as 32-bit floats."""

MAX_SPLITS: Final = 200_000_000
"""Pairs of a sub-multiset and a part of it; each test goes over them, at about 0.3 us each."""

EQUAL_FRAC: Final = 1e-9
"""Relative difference allowed between the published capacities and those at the same budgets of the grid."""

Counts = NDArray[np.int16]


class FreePlacement:
    """Exact, without a solver, stage budgets free; needs capacities over budgets (`CapacityTable.budgets`)."""

    name = "lattice-free"

    def __init__(self, *, max_table_bytes: int = MAX_TABLE_BYTES) -> None:
        self._max_table_bytes = max_table_bytes
        self._published = LatticePlacement(max_table_bytes=max_table_bytes)

    def solve(self, problem: PlacementProblem) -> PlacementResult:
        """The best placement of one combination; its stages name their budgets.

        Raises InputError for a malformed or too large problem, or one without capacities over budgets.
        """
        started = time.perf_counter()
        types, counts, capacity = problem_arrays(problem)
        budgets = _problem_budgets(problem, types)
        check_budgets(budgets, capacity, types)
        start = _as_placed(self._published.solve(problem), types, len(capacity))
        placed = self._place(budgets, counts[np.newaxis, :], start, started)
        found = len(placed) == 1
        return PlacementResult(
            status=PlacementStatus.OPTIMAL if found else PlacementStatus.INFEASIBLE,
            throughput_tokens_per_s=float(placed.throughput[0]) if found else 0.0,
            placement=placement_at(placed, types, 0) if found else None,
            method=self.name,
            solve_s=placed.statistics["solve_s"],
        )

    def place(self, table: CapacityTable, counts: Counts) -> PlacedCombinations:
        """The best placements of many combinations, `counts` (n, C); infeasible rows are left out, order is kept.

        Statistics besides the port's: `improved` over the published split, `tests` of a throughput on all partitions.
        Raises InputError for a malformed table or combination, or a table without capacities over budgets.
        """
        started = time.perf_counter()
        if table.budgets is None:
            raise _no_budgets("table.budgets")
        counts = np.ascontiguousarray(counts, dtype=np.int16)
        start = self._published.place(table, counts)
        check_budgets(table.budgets.throughput, table.throughput, table.configs)
        return self._place(table.budgets.throughput, counts, start, started)

    def _place(
        self, budgets: Capacity, counts: Counts, start: PlacedCombinations, started: float
    ) -> PlacedCombinations:
        from coral_core.placement import free_kernel as kernel  # noqa: PLC0415 - numba takes a second to import

        grid, _, layers = budgets.shape
        n, s_max = len(counts), start.stage_layers.shape[1]
        _check_size(counts, layers * s_max, grid, self._max_table_bytes)
        at = np.empty(n, dtype=np.int64)
        kernel.match_rows(counts, start.counts, at)
        known = at >= 0
        throughput, stages = np.zeros(n), np.zeros(n, dtype=np.int16)
        stage_layers, stage_budgets = np.zeros((2, n, s_max), dtype=np.int16)
        stage_counts = np.zeros((n, s_max, counts.shape[1]), dtype=np.int16)
        tests = np.zeros(n, dtype=np.int64)
        throughput[known], stages[known] = start.throughput, start.n_stages
        stage_layers[known], stage_counts[known] = start.stage_layers, start.stage_counts
        if grid > 1 and s_max > 1:
            by_type = np.ascontiguousarray(budgets.transpose(1, 0, 2), dtype=np.float64)
            kernel.improve_free(by_type, counts, throughput, stages, stage_counts, stage_budgets, stage_layers, tests)
        found = throughput > 0
        return PlacedCombinations(
            counts=counts[found],
            throughput=throughput[found],
            n_stages=stages[found],
            stage_layers=stage_layers[found],
            stage_counts=stage_counts[found],
            stage_budget_frac=_budget_frac(stages, stage_budgets, grid)[found],
            proven=np.ones(int(found.sum()), dtype=np.bool_),
            method=self.name,
            statistics={
                "combinations": float(n),
                "infeasible": float((~found).sum()),
                "unproven": 0.0,
                "solve_s": time.perf_counter() - started,
                "improved": float(stage_budgets.any(axis=1).sum()),
                "tests": float(tests.sum()),
            },
        )


def check_budgets(budgets: Capacity, published: Capacity, types: tuple[str, ...]) -> None:
    """Guarantee capacities over budgets (grid, C, L) that the method may rely on, next to the published (S, C, L).

    Raises InputError naming budget, node and layer where a capacity is not finite and at least 0, grows with layers,
    shrinks with the budget, or differs from the published one at 1/S of the SLO.
    """
    if budgets.ndim != 3 or budgets.shape[1:] != published.shape[1:]:
        raise InputError(
            f"shape {budgets.shape} instead of (grid, {', '.join(map(str, published.shape[1:]))})", where="budgets"
        )
    above, below = np.zeros((2, *budgets.shape), dtype=np.bool_)
    above[:, :, 1:] = budgets[:, :, 1:] > budgets[:, :, :-1]
    below[1:] = budgets[1:] < budgets[:-1]
    faults = {
        "is not finite and at least 0": ~(np.isfinite(budgets) & (budgets >= 0)),
        "is above that of one layer less": above,
        "is below that of the next smaller budget": below,
    }
    grid = len(budgets)
    for stages in range(2, len(published) + 1):
        if grid % stages == 0:
            at = grid // stages - 1
            differs = np.zeros(budgets.shape, dtype=np.bool_)
            differs[at] = ~np.isclose(budgets[at], published[stages - 1], rtol=EQUAL_FRAC, atol=0)
            faults[f"is not the published one of {stages} stages"] = differs
    for what, wrong in faults.items():
        if wrong.any():
            beta, c, j = (int(i[0]) for i in np.nonzero(wrong))
            raise InputError(
                f"capacity {budgets[beta, c, j]} of node {types[c]!r} within {beta + 1}/{grid} of the SLO {what}",
                where=f"budgets.{beta + 1}.{types[c]}[{j}]",
            )


def _problem_budgets(problem: PlacementProblem, types: tuple[str, ...]) -> Capacity:
    """T^ over budgets (grid, C, L) of a problem's types."""
    given = problem.budget_capacity_tokens_per_s
    if given is None:
        raise _no_budgets("budget_capacity_tokens_per_s")
    for name in types:
        if name not in given:
            raise InputError(f"no capacity of node {name!r} over budgets", where="budget_capacity_tokens_per_s")
        shape = np.shape(given[name])
        if len(shape) != 2 or shape[1] != problem.layers or shape[0] != len(given[types[0]]) or shape[0] < 1:
            raise InputError(
                f"shape {shape} instead of (grid, {problem.layers})", where=f"budget_capacity_tokens_per_s.{name}"
            )
    return np.stack([np.asarray(given[name], dtype=np.float64) for name in types], axis=1)


def _as_placed(result: PlacementResult, types: tuple[str, ...], s_max: int) -> PlacedCombinations:
    """One result in the form of a bulk answer, without a row where it is infeasible."""
    stages = () if result.placement is None else result.placement.stages
    n = int(bool(stages))
    layers, nodes = np.zeros((n, s_max), dtype=np.int16), np.zeros((n, s_max, len(types)), dtype=np.int16)
    for s, stage in enumerate(stages):
        layers[0, s] = stage.layers
        nodes[0, s] = [stage.nodes.count(name) for name in types]
    return PlacedCombinations(
        counts=nodes.sum(axis=1, dtype=np.int16),
        throughput=np.full(n, result.throughput_tokens_per_s),
        n_stages=np.full(n, len(stages), dtype=np.int16),
        stage_layers=layers,
        stage_counts=nodes,
        proven=np.ones(n, dtype=np.bool_),
        method=result.method,
        statistics={},
    )


def _budget_frac(stages: Counts, stage_budgets: Counts, grid: int) -> NDArray[np.float64]:
    """Each stage's share of the SLO, (n, S); equal shares where no budgets were chosen."""
    used = np.arange(stage_budgets.shape[1]) < stages[:, np.newaxis]
    equal = used / np.maximum(stages, 1)[:, np.newaxis]
    return np.where(stage_budgets.any(axis=1, keepdims=True), stage_budgets / grid, equal)


def _check_size(counts: Counts, layers_in_all: int, grid: int, max_bytes: int) -> None:
    if layers_in_all > MAX_LAYERS_IN_ALL:
        raise InputError(
            f"stages of all the model's layers would hold {layers_in_all} of them, more than {MAX_LAYERS_IN_ALL}",
            where="layers",
            fix="place fewer nodes, or use method lattice",
        )
    sizes = counts.astype(np.float64)
    parts = float((sizes + 1).prod(axis=1).max(initial=1.0))
    splits = float(((sizes + 1) * (sizes + 2) / 2).prod(axis=1).max(initial=1.0))
    if parts * grid * 8 > max_bytes or splits > MAX_SPLITS:
        raise InputError(
            f"{parts:.3g} sub-multisets with {splits:.3g} parts of them are too many",
            where="nodes",
            fix="place fewer different nodes at a time",
        )


def _no_budgets(where: str) -> InputError:
    return InputError(
        f"method {FreePlacement.name} needs capacities over stage budgets, none are given",
        where=where,
        fix="build the capacities with budgets, or use method lattice",
    )
