"""Fits: kernel times as sums of physical terms, and the engine's costs from serving runs.

Kernels. Data: times y (n,), terms A (n, k): seconds that each part would take at peak. Variables: c >= least, one per
term (its inverse is the share of peak). Objective: least squares of the relative error A c / y - 1.

Engine. Data: kernel times of runs (`serving.KernelTimes`), measured TTFT and TPOT, weights. Variables: `EngineCosts`, all
above 0. Objective: the weighted mean of |log(predicted / measured)| of TPOT plus TTFT_WEIGHT times that of TTFT, each cut
where a run must be something else than what is modelled, plus a small pull to PRIOR that keeps apart what the runs
do not tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.perf.factors import EngineCosts
from coral_core.perf.serving import KernelTimes, latencies
from coral_core.units import MS, US

Floats = NDArray[np.float64]

TTFT_WEIGHT: Final = 0.6
TPOT_CUT: Final = 0.6
TTFT_CUT: Final = 0.8
PRIOR: Final = EngineCosts(
    step_overhead_s=200 * US,
    kernel_overhead_s=3 * US,
    quantised_gemm_overhead_s=12 * US,
    launch_s=35 * US,
    request_s=8 * MS,
    own_steps_factor=1.2,
    burst_frac=0.07,
)
PULL: Final = 0.003


def fit_terms(terms: Floats, times: Floats, *, least: Floats) -> Floats:
    """Coefficients (k,), none below `least`, that minimise the relative squared error of `terms @ c` to `times`.

    Exact: every choice of which coefficients sit at their bound is tried (k is small).
    """
    scaled = terms / times[:, None]
    best, best_loss = least, np.inf
    for free in product((True, False), repeat=terms.shape[1]):
        chosen = np.array(free)
        found = least.copy()
        if chosen.any():
            rest = 1.0 - scaled[:, ~chosen] @ least[~chosen]
            found[chosen] = np.linalg.lstsq(scaled[:, chosen], rest, rcond=None)[0]
        if np.any(found < least):
            continue
        loss = float(np.sum((scaled @ found - 1.0) ** 2))
        if loss < best_loss:
            best, best_loss = found, loss
    return best


def fit_engine_costs(
    times: KernelTimes, ttft_s: Floats, tpot_s: Floats, weights: Floats, *, start: EngineCosts = PRIOR
) -> EngineCosts:
    """The engine's costs that runs with these kernel times show; runs of weight 0 do not count."""
    total = weights.sum()

    def loss(values: Mapping[str, float]) -> float:
        first_s, token_s = latencies(times, EngineCosts(**values))
        tpot = np.minimum(np.abs(np.log(token_s / tpot_s)), TPOT_CUT)
        ttft = np.minimum(np.abs(np.log(first_s / ttft_s)), TTFT_CUT)
        pull = sum(np.log(values[name] / prior) ** 2 for name, prior in asdict(PRIOR).items())
        return float(weights @ (tpot + TTFT_WEIGHT * ttft) / total + PULL * pull)

    names = [item.name for item in fields(EngineCosts)]
    return EngineCosts(**_coordinate_search(loss, {name: getattr(start, name) for name in names}))


def _coordinate_search(loss: Callable[[Mapping[str, float]], float], start: dict[str, float]) -> dict[str, float]:
    """Positive values at which no single one can be scaled by a percent to lower the loss."""
    values, best = start, loss(start)
    step = dict.fromkeys(values, 0.4)
    while max(step.values()) > 0.01:
        for name in values:
            for factor in (1 + step[name], 1 / (1 + step[name])):
                tried = {**values, name: values[name] * factor}
                if (found := loss(tried)) < best - 1e-9:
                    values, best = tried, found
                    break
            else:
                step[name] *= 0.6
    return values
