"""An independent check of placements with stage budgets: nothing here is shared with the method that makes them.

A stage's capacity is read off the budgets' grid at its share of the SLO; for equal shares 1/S that the grid lacks, and
for a single stage, off the published table.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations, PlacementProblem
from coral_core.domain.templates import Placement
from coral_core.errors import InputError
from coral_core.placement.verify import TOLERANCE_FRAC, PlacementMismatchError


def verify_free_placement(problem: PlacementProblem, placement: Placement, throughput_tokens_per_s: float) -> None:
    """Guarantee that a placement uses each node once, holds all layers, keeps to the SLO and has the stated throughput.

    Raises PlacementMismatchError naming what differs, InputError for a problem without capacities over budgets.
    """
    stages = placement.stages
    if Counter(node for stage in stages for node in stage.nodes) != Counter(problem.nodes):
        raise _mismatch("its stages do not hold each node exactly once")
    if any(stage.layers < 1 or not stage.nodes for stage in stages):
        raise _mismatch("a stage has no layer or no node")
    if placement.layers != problem.layers:
        raise _mismatch(f"its stages hold {placement.layers} layers, the model has {problem.layers}")
    shares = [stage.budget_frac for stage in stages if stage.budget_frac is not None and stage.budget_frac > 0]
    if len(shares) < len(stages) or not sum(shares) <= 1 + TOLERANCE_FRAC:
        raise _mismatch("its stages' budgets are missing or exceed the SLO")
    slowest = min(
        sum(_capacity(problem, node, len(stages), share, stage.layers) for node in stage.nodes)
        for stage, share in zip(stages, shares, strict=True)
    )
    if not slowest > 0:
        raise _mismatch("a stage has no throughput")
    if not abs(slowest - throughput_tokens_per_s) <= TOLERANCE_FRAC * slowest:
        raise _mismatch(f"its slowest stage gives {slowest} tokens/s, stated are {throughput_tokens_per_s}")


def verify_free_placed(table: CapacityTable, placed: PlacedCombinations) -> None:
    """The same guarantee for every row of a bulk answer; raises PlacementMismatchError naming the first wrong row."""
    if table.budgets is None or placed.stage_budget_frac is None:
        raise InputError("there are no stage budgets to verify", where="table.budgets")
    grid, frac = table.budgets.grid, placed.stage_budget_frac
    n, s_max = placed.stage_layers.shape
    used = np.arange(s_max) < placed.n_stages[:, np.newaxis]
    layers, nodes = placed.stage_layers.astype(np.int64), placed.stage_counts.astype(np.int64)
    beta = np.rint(frac * grid).astype(np.int64)
    on_grid = (np.abs(frac * grid - beta) <= TOLERANCE_FRAC * grid) & (beta >= 1) & (placed.n_stages > 1)[:, np.newaxis]
    equal = np.abs(frac * placed.n_stages[:, np.newaxis] - 1) <= TOLERANCE_FRAC
    slowest = np.full(n, np.inf)
    for s in range(s_max):
        for here, capacity, row in ((on_grid, table.budgets.throughput, beta), (~on_grid, table.throughput, None)):
            rows = np.flatnonzero(here[:, s] & used[:, s])
            at = (placed.n_stages[rows].astype(np.int64) if row is None else row[rows, s]) - 1
            by_node = capacity[at, :, layers[rows, s] - 1]
            slowest[rows] = np.minimum(slowest[rows], (nodes[rows, s] * by_node).sum(axis=1))
    laws = {
        "its number of stages is out of range": (placed.n_stages >= 1) & (placed.n_stages <= s_max),
        "a stage has a negative number of nodes": (nodes >= 0).all(axis=(1, 2)),
        "its stages do not hold each node exactly once": (nodes.sum(axis=1) == placed.counts).all(axis=1),
        f"its stages do not hold {table.layers} layers": layers.sum(axis=1) == table.layers,
        "a stage has no layer": ((layers >= 1) == used).all(axis=1),
        "a stage has no node": ((nodes.sum(axis=2) >= 1) == used).all(axis=1),
        "a stage's budget is neither on the grid nor an equal share": (np.where(used, on_grid | equal, frac == 0)).all(
            axis=1
        ),
        "its stages' budgets exceed the SLO": frac.sum(axis=1) <= 1 + TOLERANCE_FRAC,
        "a stage has no throughput": slowest > 0,
        "its stated throughput is not its slowest stage's": np.abs(slowest - placed.throughput)
        <= TOLERANCE_FRAC * slowest,
    }
    for what, holds in laws.items():
        if not holds.all():
            raise _mismatch(what, where=f"row {int(np.argmin(holds))}")


def _capacity(problem: PlacementProblem, node: str, n_stages: int, share: float, layers: int) -> float:
    over_budgets = problem.budget_capacity_tokens_per_s
    if over_budgets is None:
        raise InputError("there are no stage budgets to verify", where="budget_capacity_tokens_per_s")
    grid = len(over_budgets[node])
    beta = round(share * grid)
    if n_stages > 1 and beta >= 1 and abs(share * grid - beta) <= TOLERANCE_FRAC * grid:
        return float(over_budgets[node][beta - 1][layers - 1])
    if abs(share * n_stages - 1) <= TOLERANCE_FRAC:
        return float(problem.capacity_tokens_per_s[n_stages][node][layers - 1])
    raise _mismatch(f"a budget of {share:.6g} of the SLO is neither on the grid nor an equal share")


def _mismatch(what: str, *, where: str = "placement") -> PlacementMismatchError:
    return PlacementMismatchError(f"a placement was rejected: {what}", where=where, fix="report this as a bug")
