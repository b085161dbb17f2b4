"""Random capacities over stage budgets, with published ones beside them that agree wherever S divides the grid."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import BudgetTable, CapacityTable
from coral_core.domain.placement import PlacementProblem
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Phase, Slo
from coral_core.placement.problem import problem_at


def monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(grid, L) made non-decreasing in the budget and non-increasing in the layers."""
    return np.maximum.accumulate(np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1], axis=0)


def node_budgets(rng: np.random.Generator, layers: int, grid: int, *, ties: bool) -> NDArray[np.float64]:
    """One node's (grid, L): noise on a trend in budget and layers; memory ends each row at a random depth."""
    noise = rng.integers(0, 4, (grid, layers)) if ties else rng.random((grid, layers)) * 10
    trend = rng.integers(0, 15) * np.arange(grid)[:, None] / grid + rng.integers(0, 15) / np.arange(1, layers + 1)
    values = monotone(np.rint(noise + trend) if ties else noise + trend)
    depth = np.sort(rng.integers(0, layers + 1, grid))
    values[np.arange(layers) >= depth[:, None]] = 0
    return values


def free_table(
    rng: np.random.Generator, *, n_configs: int, layers: int, grid: int, s_max: int, ties: bool = False
) -> CapacityTable:
    """A table of random capacities; with `ties` they are small whole numbers."""
    shape = (s_max, n_configs, layers)
    published = -np.sort(-(rng.integers(0, 6, shape).astype(float) if ties else rng.random(shape) * 12), axis=2)
    budgets = np.stack([node_budgets(rng, layers, grid, ties=ties) for _ in range(n_configs)], axis=1)
    for stages in range(2, s_max + 1):
        if grid % stages == 0:
            published[stages - 1] = budgets[grid // stages - 1]
    return CapacityTable(
        model="m",
        variant="bf16",
        phase=Phase.DECODE,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        configs=tuple(f"c{c}" for c in range(n_configs)),
        layers=layers,
        throughput=published,
        layout=np.zeros(shape, dtype=np.int16),
        layouts=("tp1 pp1 dp1",),
        sources=(CapacitySource.ESTIMATED,) * n_configs,
        error_frac=(None,) * n_configs,
        memory_bytes=np.ones(n_configs),
        usable_memory_bytes=np.ones(n_configs),
        model_bytes=0.5,
        inputs_hash="none",
        budgets=BudgetTable(
            throughput=budgets, layout=np.zeros(budgets.shape, dtype=np.int16), layouts=("tp1 pp1 dp1",)
        ),
    )


def free_problem(
    rng: np.random.Generator, *, n: int, n_configs: int, layers: int, grid: int, ties: bool = False
) -> PlacementProblem:
    """One combination of n random nodes."""
    table = free_table(rng, n_configs=n_configs, layers=layers, grid=grid, s_max=n, ties=ties)
    counts = np.bincount(rng.integers(0, n_configs, n), minlength=n_configs).astype(np.int16)
    return problem_at(table, counts)
