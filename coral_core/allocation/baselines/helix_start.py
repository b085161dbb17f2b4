"""Placements to start from, found without a solver, and an upper bound on every placement's flow.

c_l = sum of T_i(k_i) over the nodes that hold layer l. Cutting all of these nodes cuts every path, so the flow is at most
min_l c_l; where every node may be entered inside its run, all are linked and no link binds, it is exactly that (a node cut
leaves some layer that can be reached uncovered). So good placements are runs of layers with the largest least c_l.
At a flow t each node passes on min(T_i(k), t) at most, through at most k of the L layers that every request needs, hence
t L <= sum_i max_k k min(T_i(k), t). The largest such t bounds every placement (right over left falls in t: bisection).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_core.allocation.baselines.helix_flow import max_flow
from coral_core.domain.pool import Floats, PoolPlacement, PoolProblem

_SHARPNESS = (6.0, 12.0, 24.0)
_SWEEPS = 40
_SHAKEN = 4
_BISECTIONS = 60
Ints = NDArray[np.int64]


def flow_bound(problem: PoolProblem) -> float:
    """No placement serves more requests/s than this."""
    rates = [np.array(node.requests_per_s) for node in problem.nodes]
    best = np.array([rate.max() for rate in rates])
    entering = np.minimum(problem.source_requests_per_s, best).sum()
    leaving = np.minimum(problem.sink_requests_per_s, best).sum()
    low, high = 0.0, float(min(best.sum(), entering, leaving))
    if _work(rates, high) >= high * problem.layers:
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _work(rates, middle) >= middle * problem.layers else (low, middle)
    return high


def _work(rates: list[Floats], flow: float) -> float:
    """Layers per second that the nodes give to requests at a flow of `flow` requests/s."""
    return sum(float((np.arange(1, len(rate) + 1) * np.minimum(rate, flow)).max()) for rate in rates)


def equal_stages(problem: PoolProblem) -> PoolPlacement | None:
    """As Swarm does it: equal stages that the smallest node can hold, each node joins the weakest; None where impossible."""
    held = min(_most_layers(problem))
    if held == 0:
        return None
    n_stages = -(-problem.layers // held)
    if n_stages > len(problem.nodes):
        return None
    edges = [round(s * problem.layers / n_stages) for s in range(n_stages + 1)]
    strength = np.zeros(n_stages)
    stage_of = np.zeros(len(problem.nodes), dtype=np.int64)
    rate = [node.requests_per_s[held - 1] for node in problem.nodes]
    for i in sorted(range(len(problem.nodes)), key=lambda i: -rate[i]):
        stage_of[i] = int(strength.argmin())
        strength[stage_of[i]] += rate[i]
    return PoolPlacement(
        start=tuple(edges[s] for s in stage_of.tolist()), end=tuple(edges[s + 1] for s in stage_of.tolist())
    )


def weakest_span(problem: PoolProblem) -> PoolPlacement:
    """As Petals does it: node by node, as many layers as it holds, where the model is served worst."""
    start, end = [], []
    covered = np.zeros(problem.layers)
    for node, held in zip(problem.nodes, _most_layers(problem), strict=True):
        k = max(held, 1)
        windows = np.lib.stride_tricks.sliding_window_view(covered, k)
        at = int(np.lexsort((windows.sum(axis=1), windows.min(axis=1)))[0])
        start.append(at)
        end.append(at + k)
        covered[at : at + k] += node.requests_per_s[k - 1]
    return PoolPlacement(start=tuple(start), end=tuple(end))


def searched(
    problem: PoolProblem, placement: PoolPlacement, rng: np.random.Generator, *, rounds: int, enough: float
) -> PoolPlacement:
    """The largest flow found from `placement` on: improve the cover, then shake a few nodes and improve it again.

    Ends after `rounds`, or early at a flow of `enough`. Never below the flow of `placement`.
    """
    best, most = placement, max_flow(problem, placement)[0]
    other = placement
    for _ in range(rounds):
        other = improved_cover(problem, other, rng)
        if least_cover(problem, other) >= most and (flow := max_flow(problem, other)[0]) >= most:
            best, most = other, flow
        if most >= enough:
            break
        other = _shaken(problem, best, rng)
    return best


def _shaken(problem: PoolProblem, placement: PoolPlacement, rng: np.random.Generator) -> PoolPlacement:
    """`placement` with a few nodes put anywhere."""
    start, end = list(placement.start), list(placement.end)
    for i in rng.choice(len(start), min(_SHAKEN, len(start)), replace=False).tolist():
        held = int(rng.integers(1, len(problem.nodes[i].requests_per_s) + 1))
        start[i] = int(rng.integers(0, problem.layers - held + 1))
        end[i] = start[i] + held
    return PoolPlacement(start=tuple(start), end=tuple(end))


def least_cover(problem: PoolProblem, placement: PoolPlacement) -> float:
    """min_l c_l in requests/s, which bounds the placement's flow."""
    return float(_cover(problem, placement).min())


def _cover(problem: PoolProblem, placement: PoolPlacement) -> Floats:
    covered = np.zeros(problem.layers)
    for node, start, end in zip(problem.nodes, placement.start, placement.end, strict=True):
        covered[start:end] += node.requests_per_s[end - start - 1]
    return covered


def improved_cover(problem: PoolProblem, placement: PoolPlacement, rng: np.random.Generator) -> PoolPlacement:
    """Move one node at a time to the run of layers that is best for all, until no move helps.

    What is lowered is sum_l (bound / c_l)^q, a smooth stand-in for the least c_l that also prefers fewer weak layers, at
    one q after the other, ever nearer to it.
    """
    start, end = np.array(placement.start), np.array(placement.end)
    scale = flow_bound(problem) or 1.0
    covered = _cover(problem, placement)
    for sharpness in _SHARPNESS:
        for _ in range(_SWEEPS):
            moved = False
            for i in rng.permutation(len(problem.nodes)).tolist():
                rates, own = problem.nodes[i].requests_per_s, (int(start[i]), int(end[i]))
                covered[own[0] : own[1]] -= rates[own[1] - own[0] - 1]
                start[i], end[i] = _best_run(covered, rates, scale, sharpness, own)
                covered[start[i] : end[i]] += rates[end[i] - start[i] - 1]
                moved = moved or own != (start[i], end[i])
            if not moved:
                break
    return PoolPlacement(start=tuple(start.tolist()), end=tuple(end.tolist()))


def _best_run(
    covered: Floats, rates: tuple[float, ...], scale: float, sharpness: float, own: tuple[int, int]
) -> tuple[int, int]:
    """The run that lowers the cost most; its own unless another is clearly better, so that the sweeps come to an end."""
    base = _cost(covered, scale, sharpness)

    def changes(k: int) -> Floats:
        sums = np.concatenate(([0.0], np.cumsum(_cost(covered + rates[k - 1], scale, sharpness) - base)))
        return np.asarray(sums[k:] - sums[:-k])

    best, least = own, float(changes(own[1] - own[0])[own[0]])
    for k in range(1, len(rates) + 1):
        change = changes(k)
        at = int(change.argmin())
        if change[at] < least * (1 + 1e-9):  # none is above 0
            best, least = (at, at + k), float(change[at])
    return best


def _cost(covered: Floats, scale: float, sharpness: float) -> Floats:
    return np.asarray((scale / np.maximum(covered, 1e-3 * scale)) ** sharpness)


def _most_layers(problem: PoolProblem) -> list[int]:
    """Layers that each node can hold with some throughput left."""
    return [
        min(max((k for k, rate in enumerate(node.requests_per_s, start=1) if rate > 0), default=0), problem.layers)
        for node in problem.nodes
    ]
