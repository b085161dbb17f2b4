"""One model on a fixed pool of nodes: where each node's layers begin and end, and how requests flow through them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNode:
    """A node of the pool: its configuration and, for k = 1, 2, ... consecutive layers held, the requests/s it serves."""

    config: str
    requests_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProblem:
    """Give each of n nodes a run of the `layers` so that the most requests/s flow from source to sink.

    `link_requests_per_s` (n, n) bounds the flow from node i to node j, `source_requests_per_s` and `sink_requests_per_s`
    (n,) that from and to outside; 0 where there is no link, infinite where none binds. With `partial` a node may be entered
    inside its run (at a layer that it holds) and then computes the rest of it; without only at its first layer.
    """

    model: str
    layers: int
    nodes: tuple[PoolNode, ...]
    link_requests_per_s: Floats
    source_requests_per_s: Floats
    sink_requests_per_s: Floats
    partial: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlacement:
    """Node i holds layers start[i] .. end[i]-1, counted from 0."""

    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A placement, a flow through it and what is proven.

    `flow_requests_per_s` maps (from, to), node indices or `source`/`sink` as -1/-2, to the flow on that link.
    `bound_requests_per_s`: no placement gives more. `method` says where the placement came from.
    """

    placement: PoolPlacement
    flow_requests_per_s: dict[tuple[int, int], float]
    total_requests_per_s: float
    bound_requests_per_s: float
    method: str
    statistics: dict[str, float]

    @property
    def gap_frac(self) -> float:
        """Proven relative distance to the most that is possible."""
        return (self.bound_requests_per_s - self.total_requests_per_s) / max(self.bound_requests_per_s, 1e-12)


SOURCE = -1
SINK = -2
