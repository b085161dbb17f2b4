"""The start-layer program of Helix (ASPLOS 2025, the published MILP): where each node's run begins, and the flow.

Data: nodes i = 1..n, T_i(k) requests/s with k layers, L layers, links e = (i, j) that are kept with bounds u_e.
Variables: s_i integer in [0, L-1], first layer; b_ik = 1 where node i holds k layers, so its end is e_i = s_i + sum k b_ik;
  f_e in [0, u_e] flow; d_e = 1 where link e may be used.
Constraints: sum_k b_ik = 1; e_i <= L; flow into i = flow out of i <= sum_k T_i(k) b_ik; f_e <= u_e d_e;
  source -> i: s_i <= L (1 - d); i -> sink: e_i >= L d;
  i -> j, partial: s_j - e_i <= L (1 - d) and e_i + 1 - e_j <= (L + 1)(1 - d); else |s_j - e_i| <= L (1 - d).
Objective: maximise the flow out of the source.

Added here, cutting off nothing: sum of source flow <= the bound of `helix_start` (the relaxation's own bound is useless,
since big-M lets every link be used a little); T_i(k) and u_e no larger than that bound, which also bounds the big f.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.pool import SINK, SOURCE, Floats, PoolPlacement, PoolProblem
from coral_core.solver.builder import Indices, ProgramBuilder
from coral_core.solver.program import IntegerProgram

Link = tuple[int, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProgram:
    """The program over chosen links, and where its variables lie. `held` starts at `first_held[i]` for node i."""

    program: IntegerProgram
    links: tuple[tuple[int, int], ...]
    start: Indices
    held: Indices
    first_held: NDArray[np.int64]
    flow: Indices
    usable: Indices

    def placement(self, x: Floats) -> PoolPlacement:
        """The runs of layers in a solution."""
        start = np.rint(x[self.start]).astype(np.int64)
        held = x[self.held]
        layers = [int(part.argmax()) + 1 for part in np.split(held, self.first_held[1:])]
        return PoolPlacement(start=tuple(start.tolist()), end=tuple((start + layers).tolist()))

    def point(self, placement: PoolPlacement, flow: dict[tuple[int, int], float]) -> Floats:
        """The solution that a placement and a flow over the program's links stand for."""
        x = np.zeros(self.program.n_columns)
        x[self.start] = placement.start
        layers = np.array(placement.end) - np.array(placement.start)
        x[self.held[self.first_held + layers - 1]] = 1.0
        amounts = np.array([flow.get(link, 0.0) for link in self.links])
        x[self.flow] = amounts
        x[self.usable] = amounts > 0
        return x


def kept_links(problem: PoolProblem, used: dict[tuple[int, int], float], degree: int) -> list[Link]:
    """All links from the source and to the sink, and at most `degree` out of each node.

    Those that carry flow in the start placement come first, then the widest, then links spread evenly over the nodes, so
    that the solver is left with ways between all of them.
    """
    n = len(problem.nodes)
    links: list[Link] = [(SOURCE, i, float(problem.source_requests_per_s[i])) for i in range(n)]
    links += [(i, SINK, float(problem.sink_requests_per_s[i])) for i in range(n)]
    for i in range(n):
        others = [j for j in range(n) if j != i and problem.link_requests_per_s[i, j] > 0]
        stride = max(len(others) // max(degree, 1), 1)
        order = sorted(
            others,
            key=lambda j: (
                -used.get((i, j), 0.0),
                -problem.link_requests_per_s[i, j],
                (j - i) % n % stride,
                (j - i) % n,
            ),
        )
        links += [(i, j, float(problem.link_requests_per_s[i, j])) for j in order[:degree]]
    return [link for link in links if link[2] > 0]


def pool_program(problem: PoolProblem, links: list[Link], bound: float) -> PoolProgram:
    """The program of the module's head over `links`; flows in units of `bound`."""
    n, L = len(problem.nodes), problem.layers
    rates = [np.array(node.requests_per_s[:L]) for node in problem.nodes]
    sizes = np.array([len(rate) for rate in rates])
    owner = np.repeat(np.arange(n), sizes)
    layers = np.concatenate([np.arange(1.0, size + 1) for size in sizes])
    builder = ProgramBuilder(name=f"flow through {n} nodes", maximize=True)
    start = builder.add_columns("start", n, upper=L - 1, integer=True)
    held = builder.add_columns("held", len(owner), upper=1.0, integer=True)
    from_, to, limit = (np.array(part) for part in zip(*links, strict=True))
    limit = np.minimum(limit / bound, 1.0)
    flow = builder.add_columns("flow", len(links), objective=(from_ == SOURCE).astype(float), upper=limit)
    usable = builder.add_columns("usable", len(links), upper=1.0, integer=True)

    builder.add_rows("one_run_per_node", n, rows=owner, columns=held, lower=1.0, upper=1.0)
    ends = builder.add_rows("inside_the_model", n, rows=owner, columns=held, values=layers, upper=L)
    builder.add_entries(ends, start)
    inside_from, inside_to = np.flatnonzero(from_ >= 0), np.flatnonzero(to >= 0)
    conserved = builder.add_rows("conserved", n, rows=to[inside_to], columns=flow[inside_to], lower=0.0, upper=0.0)
    builder.add_entries(conserved[from_[inside_from]], flow[inside_from], -1.0)
    served = builder.add_rows("served", n, rows=to[inside_to], columns=flow[inside_to], upper=0.0)
    builder.add_entries(served[owner], held, -np.minimum(np.concatenate(rates) / bound, 1.0))
    carried = builder.add_rows("carried", len(links), rows=np.arange(len(links)), columns=flow, upper=0.0)
    builder.add_entries(carried, usable, -limit)
    builder.add_rows("bound", 1, rows=np.zeros((from_ == SOURCE).sum()), columns=flow[from_ == SOURCE], upper=1.0)

    def end_of(rows: Indices, nodes: NDArray[np.int64], sign: float) -> None:
        """Add sign x e_i to each row."""
        builder.add_entries(rows, start[nodes], sign)
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            mine = owner == node
            builder.add_entries(np.full(int(mine.sum()), row), held[mine], sign * layers[mine])

    enters = np.flatnonzero(from_ == SOURCE)
    rows = builder.add_rows("enters_at_0", len(enters), rows=np.arange(len(enters)), columns=start[to[enters]], upper=L)
    builder.add_entries(rows, usable[enters], float(L))
    leaves = np.flatnonzero(to == SINK)
    rows = builder.add_rows(
        "leaves_at_L", len(leaves), rows=np.arange(len(leaves)), columns=usable[leaves], values=-float(L), lower=0.0
    )
    end_of(rows, from_[leaves], 1.0)
    between = np.flatnonzero((from_ >= 0) & (to >= 0))
    index = np.arange(len(between))
    rows = builder.add_rows("begins_by_then", len(between), rows=index, columns=start[to[between]], upper=L)
    end_of(rows, from_[between], -1.0)
    builder.add_entries(rows, usable[between], float(L))
    if problem.partial:
        rows = builder.add_rows("goes_further", len(between), upper=L)
        end_of(rows, from_[between], 1.0)
        end_of(rows, to[between], -1.0)
        builder.add_entries(rows, usable[between], L + 1.0)
    else:
        rows = builder.add_rows(
            "begins_then", len(between), rows=index, columns=start[to[between]], values=-1.0, upper=L
        )
        end_of(rows, from_[between], 1.0)
        builder.add_entries(rows, usable[between], float(L))
    return PoolProgram(
        program=builder.build(),
        links=tuple((i, j) for i, j, _ in links),
        start=start,
        held=held,
        first_held=np.concatenate(([0], np.cumsum(sizes)[:-1])),
        flow=flow,
        usable=usable,
    )
