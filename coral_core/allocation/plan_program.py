"""The integer program over whole plans of units in regions, on some of the plans."""

from __future__ import annotations

import math

import numpy as np

from coral_core.allocation.coverage import Ints
from coral_core.allocation.plan_tolls import SERVED_TOLERANCE_FRAC, Aim, PlanBook
from coral_core.allocation.wide import cost_scale
from coral_core.solver.program import IntegerProgram


def plan_program(book: PlanBook, aim: Aim, used: Ints, margin: float) -> tuple[IntegerProgram, float]:
    """The program of `plan_tolls` on the plans `used` (n, 3: unit, region, number), its objective scaled by the factor returned.

    The columns are the plans, then what is missing of every unit. `margin`: how much more than all must be covered.
    """
    n, n_units, (n_regions, n_configs) = len(used), len(book.plans), book.available.shape
    nodes = np.stack([book.plans[u][r].nodes[g] for u, r, g in used.tolist()]) if n else np.zeros((0, n_configs))
    served = np.array([book.plans[u][r].served_frac[g] for u, r, g in used.tolist()])
    price = np.array([book.plans[u][r].price_usd_per_h[g] for u, r, g in used.tolist()])
    at, config = np.nonzero(nodes)
    j, s = np.arange(n), n + np.arange(n_units)
    of_place, of_node = n_units, n_units + n_units * n_regions
    last = of_node + book.available.size
    row = np.concatenate(
        (
            used[:, 0],
            np.arange(n_units),
            of_place + used[:, 0] * n_regions + used[:, 1],
            of_node + used[at, 1] * n_configs + config,
            np.full(n_units, last),
        )
    )
    column = np.concatenate((j, s, j, at, s))
    value = np.concatenate((served, np.ones(n_units), np.ones(n), nodes[at, config], book.weight))
    order = np.lexsort((column, row))
    most_missing = book.most_missing_frac(aim.shortfall)
    none = np.zeros(n_units)
    objective = np.concatenate((price, none)) if aim.by_cost else np.concatenate((np.zeros(n), book.weight))
    scale = cost_scale(objective)
    program = IntegerProgram(
        objective=objective * scale,
        lower=np.zeros(n + n_units),
        upper=np.concatenate((np.ones(n), most_missing)),
        integer=np.arange(n + n_units) < n,
        indptr=np.concatenate(([0], np.cumsum(np.bincount(row, minlength=last + 1)))).astype(np.int32),
        indices=column[order].astype(np.int32),
        values=value[order],
        row_lower=np.concatenate((np.full(n_units, 1.0 + margin), np.full(last + 1 - n_units, -np.inf))),
        row_upper=np.concatenate(
            (
                np.full(n_units, np.inf),
                np.ones(n_units * n_regions),
                book.available.ravel().astype(np.float64),
                [math.inf if aim.shortfall is None else max(aim.shortfall, 0.0) + SERVED_TOLERANCE_FRAC],
            )
        ),
        name="plans of units",
    )
    return program, scale
