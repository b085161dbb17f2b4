"""The most that can flow through a placement of a pool, and a check of any flow against it.

Data: node i holds layers s_i .. e_i - 1 and serves T_i(e_i - s_i); link bounds.
A link i -> j may be used where j continues at layer e_i: s_j <= e_i < e_j (partial), or e_i = s_j. The source enters
where s_i = 0, the sink is reached where e_i = L. Each node is split in two by an arc of its capacity; shortest
augmenting paths (Edmonds, Karp) find the flow.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from coral_core.domain.pool import SINK, SOURCE, Floats, PoolPlacement, PoolPlan, PoolProblem
from coral_core.errors import SolverError

_NOISE = 1e-9


def usable_links(problem: PoolProblem, placement: PoolPlacement) -> list[tuple[int, int, float]]:
    """(from, to, bound) of every link that the placement lets flow, source and sink included."""
    start, end = np.array(placement.start), np.array(placement.end)
    follows = end[:, None] == start[None, :]
    if problem.partial:
        follows = (start[None, :] <= end[:, None]) & (end[:, None] < end[None, :])
    np.fill_diagonal(follows, val=False)
    links = [(SOURCE, int(i), float(problem.source_requests_per_s[i])) for i in np.flatnonzero(start == 0)]
    links += [
        (int(i), int(j), float(problem.link_requests_per_s[i, j]))
        for i, j in np.argwhere(follows & (problem.link_requests_per_s > 0))
    ]
    links += [(int(i), SINK, float(problem.sink_requests_per_s[i])) for i in np.flatnonzero(end == problem.layers)]
    return [link for link in links if link[2] > 0]


def node_capacity(problem: PoolProblem, placement: PoolPlacement) -> Floats:
    """(n,) requests/s that each node serves at the layers it holds."""
    held = [end - start for start, end in zip(placement.start, placement.end, strict=True)]
    return np.array([node.requests_per_s[k - 1] for node, k in zip(problem.nodes, held, strict=True)])


def max_flow(problem: PoolProblem, placement: PoolPlacement) -> tuple[float, dict[tuple[int, int], float]]:
    """The largest flow in requests/s, and what it is on each link."""
    n = len(problem.nodes)
    source, sink = 2 * n, 2 * n + 1
    capacity = node_capacity(problem, placement)
    most = float(capacity.sum()) + 1.0  # stands for infinite: no flow can be larger than all nodes together
    left: list[dict[int, float]] = [{} for _ in range(2 * n + 2)]
    links = usable_links(problem, placement)
    arcs = [(2 * i, 2 * i + 1, float(capacity[i])) for i in range(n)]
    arcs += [(_out(i, source), _in(j, sink), min(bound, most)) for i, j, bound in links]
    for a, b, bound in arcs:
        left[a][b] = bound
        left[b].setdefault(a, 0.0)
    noise = _NOISE * most
    while (path := _shortest_path(left, source, sink, noise)) is not None:
        amount = min(left[a][b] for a, b in path)
        for a, b in path:
            left[a][b] -= amount
            left[b][a] += amount
    flow = {(i, j): left[_in(j, sink)][_out(i, source)] for i, j, _ in links}
    used = {link: amount for link, amount in flow.items() if amount > noise}
    return sum(amount for (i, _), amount in used.items() if i == SOURCE), used


def _out(node: int, source: int) -> int:
    return source if node == SOURCE else 2 * node + 1


def _in(node: int, sink: int) -> int:
    return sink if node == SINK else 2 * node


def _shortest_path(left: list[dict[int, float]], source: int, sink: int, noise: float) -> list[tuple[int, int]] | None:
    before = {source: source}
    queue = deque([source])
    while queue and sink not in before:
        here = queue.popleft()
        for there, bound in left[here].items():
            if bound > noise and there not in before:
                before[there] = here
                queue.append(there)
    if sink not in before:
        return None
    path = []
    here = sink
    while here != source:
        path.append((before[here], here))
        here = before[here]
    return path


def verify_pool_plan(problem: PoolProblem, plan: PoolPlan) -> None:
    """Raise SolverError unless the flow is one that the placement allows and is as large as stated."""
    n, placement = len(problem.nodes), plan.placement
    if len(placement.start) != n or len(placement.end) != n:
        raise _refused(f"{len(placement.start)} runs of layers for {n} nodes")
    for i, (start, end) in enumerate(zip(placement.start, placement.end, strict=True)):
        if not (0 <= start < end <= problem.layers and end - start <= len(problem.nodes[i].requests_per_s)):
            raise _refused(f"node {i} cannot hold layers {start}..{end}")
    allowed = {(i, j): bound for i, j, bound in usable_links(problem, placement)}
    into, out = np.zeros(n), np.zeros(n)
    slack = 1e-6 * max(1.0, plan.total_requests_per_s)
    for (i, j), amount in plan.flow_requests_per_s.items():
        if not 0 <= amount <= allowed.get((i, j), 0.0) + slack:
            raise _refused(f"{amount} requests/s from {i} to {j}, {allowed.get((i, j), 0.0)} allowed")
        if j != SINK:
            into[j] += amount
        if i != SOURCE:
            out[i] += amount
    if (np.abs(into - out) > slack).any() or (into > node_capacity(problem, placement) + slack).any():
        raise _refused("a node passes on more or less than it gets, or more than it serves")
    reached = sum(amount for (_, j), amount in plan.flow_requests_per_s.items() if j == SINK)
    if abs(reached - plan.total_requests_per_s) > slack or reached > plan.bound_requests_per_s + slack:
        raise _refused(f"{reached} requests/s reach the sink, {plan.total_requests_per_s} stated")


def _refused(what: str) -> SolverError:
    return SolverError(f"the pool's plan does not hold: {what}", where="helix")
