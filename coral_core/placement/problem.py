"""From capacity tables to single problems and back, with the checks that every method relies on."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem
from coral_core.domain.templates import Placement, Stage
from coral_core.errors import InputError

MAX_SIZE: Final = 10_000
"""Most layers, and most nodes of one combination; counts are 16-bit integers."""

Capacity = NDArray[np.float64]
"""T^ of (S, C, L): entry [S-1, c, j-1] is one node of type c holding j layers in a pipeline of S stages."""


def problem_at(table: CapacityTable, counts: NDArray[np.int16]) -> PlacementProblem:
    """The problem of one combination: `counts` is (C,) in the order of `table.configs`.

    Raises InputError where the table does not cover as many stages as the combination can form.
    """
    check_counts(counts[np.newaxis, :], table)
    held = np.flatnonzero(counts)
    return PlacementProblem(
        layers=table.layers,
        nodes=tuple(table.configs[c] for c in held for _ in range(int(counts[c]))),
        capacity_tokens_per_s={
            n_stages + 1: {table.configs[c]: table.throughput[n_stages, c] for c in held}
            for n_stages in range(min(int(counts.sum()), table.max_stages))
        },
        budget_capacity_tokens_per_s=None
        if table.budgets is None
        else {table.configs[c]: table.budgets.throughput[:, c] for c in held},
    )


def placement_at(placed: PlacedCombinations, configs: tuple[str, ...], row: int) -> Placement:
    """The placement in one row of a bulk answer."""
    return Placement(
        stages=tuple(
            Stage(
                layers=int(placed.stage_layers[row, stage]),
                nodes=tuple(
                    configs[c]
                    for c in np.flatnonzero(placed.stage_counts[row, stage])
                    for _ in range(int(placed.stage_counts[row, stage, c]))
                ),
                budget_frac=None if placed.stage_budget_frac is None else float(placed.stage_budget_frac[row, stage]),
            )
            for stage in range(int(placed.n_stages[row]))
        )
    )


def problem_arrays(problem: PlacementProblem) -> tuple[tuple[str, ...], NDArray[np.int16], Capacity]:
    """(types, counts (C,), T^ (S_max, C, L)) of a problem, types sorted so that the order of its nodes is irrelevant.

    S_max = min(nodes, layers): a stage needs a layer. Raises InputError for anything the problem's contract forbids.
    """
    if not 1 <= problem.layers <= MAX_SIZE:
        raise InputError(f"1 to {MAX_SIZE} layers are due, not {problem.layers}", where="layers")
    if not 1 <= len(problem.nodes) <= MAX_SIZE:
        raise InputError(f"1 to {MAX_SIZE} nodes are due, not {len(problem.nodes)}", where="nodes")
    types = tuple(sorted(set(problem.nodes)))
    counts = np.array([problem.nodes.count(name) for name in types], dtype=np.int16)
    n_stages = min(len(problem.nodes), problem.layers)
    capacity = np.empty((n_stages, len(types), problem.layers))
    for stages in range(1, n_stages + 1):
        for c, name in enumerate(types):
            capacity[stages - 1, c] = _row(problem, stages, name)
    check_capacity(capacity, types)
    return types, counts, capacity


def check_capacity(capacity: Capacity, types: tuple[str, ...]) -> None:
    """Guarantee finite, non-negative capacities that never increase with layers (every method relies on it).

    Raises InputError that names the number of stages, the node type and the layer.
    """
    wrong = ~np.isfinite(capacity) | (capacity < 0)
    if wrong.any():
        stages, c, j = (int(i[0]) for i in np.nonzero(wrong))
        value = capacity[stages, c, j]
        raise InputError(f"capacity must be finite and at least 0, not {value}", where=_place(stages, types[c], j))
    rises = capacity[:, :, 1:] > capacity[:, :, :-1]
    if rises.any():
        stages, c, j = (int(i[0]) for i in np.nonzero(rises))
        before, after = capacity[stages, c, j], capacity[stages, c, j + 1]
        raise InputError(
            f"capacity of node {types[c]!r} increases from {before} at layer {j + 1} to {after} at layer {j + 2}",
            where=_place(stages, types[c], j + 1),
            fix="a node that can hold more layers can hold fewer at least as fast",
        )


def check_counts(counts: NDArray[np.int16], table: CapacityTable) -> None:
    """Guarantee rows (n, C) of at least one node each that the table covers; raises InputError otherwise."""
    if counts.ndim != 2 or counts.shape[1] != len(table.configs):
        raise InputError(f"shape {counts.shape} instead of (n, {len(table.configs)})", where="counts")
    if (counts < 0).any():
        raise InputError(f"row {int(np.nonzero(counts < 0)[0][0])} has a negative count", where="counts")
    sizes = counts.sum(axis=1)
    if (sizes > MAX_SIZE).any() or table.layers > MAX_SIZE:
        raise InputError(f"more than {MAX_SIZE} nodes or layers", where="counts")
    if (sizes == 0).any():
        raise InputError(f"row {int(np.argmin(sizes))} has no node", where="counts")
    due = min(int(sizes.max(initial=0)), table.layers)
    if due > table.max_stages:
        raise InputError(
            f"the capacity table covers {table.max_stages} stages, {due} are due",
            where="counts",
            fix="build the table for as many stages as a combination has nodes",
        )


def _row(problem: PlacementProblem, stages: int, name: str) -> NDArray[np.float64]:
    try:
        row = problem.capacity_tokens_per_s[stages][name]
    except KeyError:
        raise InputError(f"no capacity of node {name!r} at {stages} stages", where=_place(stages - 1, name)) from None
    if np.shape(row) != (problem.layers,):
        raise InputError(f"{np.size(row)} capacities instead of {problem.layers}", where=_place(stages - 1, name))
    return row


def _place(stages: int, name: str, layer: int | None = None) -> str:
    place = f"capacity_tokens_per_s.{stages + 1}.{name}"
    return place if layer is None else f"{place}[{layer}]"
