"""What a simulation is given: models, a fleet with its timing, requests, what befalls the fleet, and options.

Plain records: `coral_core.sim.checks.check_input` says what is wrong with them, and every run begins with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.workload import Phase
from coral_core.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

UNLIMITED = 2**40
"""Tokens, blocks or requests, where there is to be no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTiming:
    """Time of one iteration on a node with the layers it holds.

        t = fixed_s + tokens(n) + rows(m) + kept_token_s * K + pair_s * A

    n tokens in the batch, m of its requests are sampled, K tokens of KV the decoding ones read in a mean layer, A
    (query, attended) pairs of its prompts in a mean layer. `tokens` and `rows` are piecewise linear in `grid`, the
    outer pieces prolonged. A node that is a pipeline of `depth` equal parts inside is free again after t, its results
    leave after depth t + (depth - 1) (inner_hop_s + n inner_hop_token_s).
    """

    grid: tuple[float, ...] = (0.0, 1.0)
    token_s: tuple[float, ...] = (0.0, 0.0)
    row_s: tuple[float, ...] = (0.0, 0.0)
    fixed_s: float = 0.0
    kept_token_s: float = 0.0
    pair_s: float = 0.0
    depth: int = 1
    inner_hop_s: float = 0.0
    inner_hop_token_s: float = 0.0

    def iteration_s(self, *, tokens: float, rows: float = 0.0, kept_tokens: float = 0.0, pairs: float = 0.0) -> float:
        """The formula, for planning limits; the kernel has its own copy of it."""
        parts = [prolonged(self.grid, values, x) for values, x in ((self.token_s, tokens), (self.row_s, rows))]
        return self.fixed_s + sum(parts) + self.kept_token_s * kept_tokens + self.pair_s * pairs


def prolonged(grid: Sequence[float], values: Sequence[float], x: float) -> float:
    """Piecewise linear through (grid, values), the outer pieces prolonged."""
    at = min(max(int(np.searchsorted(grid, x, side="right")) - 1, 0), len(grid) - 2)
    return values[at] + (x - grid[at]) / (grid[at + 1] - grid[at]) * (values[at + 1] - values[at])


@dataclass(frozen=True, slots=True, kw_only=True)
class SimNode:
    """One engine: its timing, room for KV, share of its stage's requests, and the machine whose NIC it uses.

    `max_batched_tokens` per iteration and `max_running_requests` hold beside those of the instance, for nodes of the first
    stage. Nodes of one instance with the same `machine` share its NIC (data-parallel replicas inside a node); without one, a
    node has its own.
    """

    timing: NodeTiming
    kv_blocks: int = UNLIMITED
    weight: float = 1.0
    max_batched_tokens: int = UNLIMITED
    max_running_requests: int = UNLIMITED
    nic_bytes_per_s: float = math.inf
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStage:
    """Layers and the nodes that each hold all of them."""

    layers: int
    nodes: tuple[SimNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimInstance:
    """One serving instance.

    With `SimOptions.pd_same_region`, prefill hands over to decode of the same `variant` and `region`. `weight` is what the router weighs it by, in requests/s (templates of prefill and decode: tokens/s over the mean
    tokens per request). `max_batched_tokens` per iteration and `max_running_requests` per node of the first stage are
    the engine's limits; `max_outstanding_requests` bounds what the router gives it at a time. An instance of several stages has
    at most `micro_batches` steps under way, each over all its nodes (`coral_core.sim.steps`). `balanced_steps`: whether each takes
    its share of the decoding requests, as our runtime's do; False: as vLLM's own scheduler does it, all that can run goes
    into one step, and who comes later waits until the oldest step is through, even if fewer are under way. `hop_s` is the latency
    of any message between its nodes, beside the time that bytes take on the NIC. `ready_at_start`: it serves from
    second 0; otherwise a lifecycle event starts it, and `boot_s` later it is ready.
    """

    name: str
    model: str
    phase: Phase
    stages: tuple[SimStage, ...]
    weight: float
    variant: str = ""
    region: str = ""
    template: str = ""
    max_batched_tokens: int = 8192
    max_running_requests: int = 256
    max_outstanding_requests: int = UNLIMITED
    micro_batches: int = 1
    balanced_steps: bool = True
    hop_s: float = 0.0
    boot_s: float = 0.0
    ready_at_start: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """What the simulator knows of a model.

    `kv_bytes_per_token` is per layer, `activation_bytes_per_token` what a token sends from stage to stage. A share
    `window_frac` of the layers keeps the last `window_tokens` only. Requests are rejected on arrival
    (`coral_core.routing.admission`) when they would wait for their first computation longer than `max_wait_s` less the
    time of their own prompt, `prompt_s` and `prompt_token_s` per token, or when what waits to be taken over by decode
    instances takes them longer than `max_handover_s`.
    """

    name: str
    kv_bytes_per_token: float = 0.0
    activation_bytes_per_token: float = 0.0
    window_tokens: float = math.inf
    window_frac: float = 0.0
    max_wait_s: float = math.inf
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0
    max_handover_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequests:
    """Requests in order of arrival, (n,) each; `model` indexes the models of the `SimInput`. Token counts are >= 1."""

    model: Ints
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def merged(cls, parts: Iterable[tuple[int, Floats, Ints, Ints]]) -> SimRequests:
        """All streams (model index, arrival_s, input_tokens, output_tokens) in one, ordered by arrival, stably."""
        items = list(parts)
        if not items:
            raise InputError("no requests are given", where="requests")
        arrival_s = np.concatenate([np.asarray(item[1], dtype=np.float64) for item in items])
        order = np.argsort(arrival_s, kind="stable")
        return cls(
            model=np.concatenate([np.full(len(item[1]), item[0], dtype=np.int64) for item in items])[order],
            arrival_s=arrival_s[order],
            input_tokens=np.concatenate([np.asarray(item[2], dtype=np.int64) for item in items])[order],
            output_tokens=np.concatenate([np.asarray(item[3], dtype=np.int64) for item in items])[order],
        )


class Routing(StrEnum):
    """How requests are spread over instances, and over a stage's nodes: in turns by weight, or to the least work."""

    WEIGHTED_ROUND_ROBIN = "weighted_round_robin"
    LEAST_WORK = "least_work"


class LifecycleKind(StrEnum):
    """`drain_one` drains the least loaded instance of a template in a region; it names the template, not an instance."""

    START = "start"
    DRAIN = "drain"
    FAIL = "fail"
    DRAIN_ONE = "drain_one"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleEvent:
    """Something happens to an instance (or, `drain_one`, to one instance of a template in a region)."""

    at_s: float
    kind: LifecycleKind
    instance: str = ""
    template: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """How long and by which rules.

    `epoch_starts_s` begins with 0 and cuts the aggregates. `reserve_full_prompt`: a request is admitted only when its
    whole prompt fits, not just the first chunk (vLLM's default). `max_retries` of a request whose instance is lost
    before its first token. `pd_same_region`: KV does not cross regions, nor go to another variant's weights. `stream_kv`: a prompt's KV goes to its decode
    instance layer by layer while later layers are computed, not in one piece when all are. `compiled` chooses the kernel, which changes no
    result; None compiles (half a minute once, then cached) only for runs that repay it.
    """

    end_s: float
    epoch_starts_s: tuple[float, ...] = (0.0,)
    block_tokens: int = 16
    reserve_full_prompt: bool = True
    max_retries: int = 1
    pd_same_region: bool = True
    stream_kv: bool = False
    routing: Routing = Routing.WEIGHTED_ROUND_ROBIN
    compiled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimInput:
    """A whole simulation."""

    models: tuple[SimModel, ...]
    instances: tuple[SimInstance, ...]
    requests: SimRequests
    options: SimOptions
    lifecycle: tuple[LifecycleEvent, ...] = field(default=())
