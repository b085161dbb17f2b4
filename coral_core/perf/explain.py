"""Why a node's capacity is what it is: the operating point behind one entry of a capacity table, taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import InputError
from coral_core.perf import memory
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import NO_PROFILES, check_inputs, node_capacity, published_budgets
from coral_core.perf.factors import Factors, load_factors
from coral_core.perf.profile import Profile
from coral_core.perf.search import Evaluator, Question, replica_steps

_DEFAULTS = CapacityAssumptions()


class Limit(StrEnum):
    """What keeps the capacity from being larger."""

    NIC = "nic"
    MEMORY = "memory"
    LATENCY = "latency"
    BATCH = "batch"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityExplanation:
    """The operating point of one node in one stage.

    `layers` is what was asked, `operating_layers` >= it what the point was found for (capacity never grows with
    layers). Times are of one step of one replica through the whole node; `*_bytes` are of its fullest GPU.
    `layer_parts_s` splits the time of a layer by kernel. `nic_frac` is the share of the usable NIC rate taken.
    `limit`: `compute` where a larger batch would not raise the rate, else the constraint that the next larger batch
    breaks (`batch`: the engine's own limit).
    """

    config: str
    stages: int
    layers: int
    operating_layers: int
    throughput: float
    layout: str
    batch_per_replica: int
    latency_s: float
    hop_s: float
    budget_s: float
    layer_parts_s: dict[str, float]
    memory_bound: bool
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    usable_bytes: float
    nic_frac: float
    limit: Limit


def explain_capacity(
    *,
    shape: ModelShape,
    variant: str,
    phase: Phase,
    slo: Slo,
    lengths: Lengths,
    config: NodeConfig,
    stages: int,
    layers: int,
    assumptions: CapacityAssumptions = _DEFAULTS,
    factors: Factors | None = None,
    profiles: Mapping[str, Profile] = NO_PROFILES,
) -> CapacityExplanation | None:
    """Take apart T^ of `config` holding `layers` in one of `stages` stages; None where it has no capacity.

    The throughput equals the table's. Raises what `capacity_table` raises, and InputError for layers not in 1..L.
    """
    check_inputs(shape, lengths, slo, [config], stages)
    if not 1 <= layers <= shape.layers:
        raise InputError(f"{layers} is not within 1..{shape.layers}", where="layers")
    question = Question(
        shape=shape,
        variant=variant,
        phase=phase,
        lengths=lengths,
        assumptions=assumptions,
        factors=load_factors() if factors is None else factors,
        profiles=profiles,
    )
    budgets = published_budgets(phase, assumptions.planned_slo(phase, slo), stages).only(stages)
    node = node_capacity(question, config, budgets)
    at = 0, layers - 1
    if node.rate[at] <= 0:
        return None
    layout, batch = node.layouts[node.layout[at]], int(node.batch[at])
    steps = replica_steps(question, config, layout.tp)
    point = Evaluator(question, config, layout, steps, budgets)
    j = np.array([[[int(node.layers[at])]]])
    state = point.state(j, np.array([[[batch]]]))
    time = steps.time
    # A profile says how long a layer takes, not what in it: its time is divided as the estimate's.
    scale = float(steps.layer_s[batch - 1] / time.total_s[batch - 1])
    held = -(-int(node.layers[at]) // layout.pp)
    return CapacityExplanation(
        config=config.name,
        stages=stages,
        layers=layers,
        operating_layers=int(node.layers[at]),
        throughput=float(node.rate[at]) * assumptions.max_utilization_frac[phase],
        layout=str(layout),
        batch_per_replica=batch,
        latency_s=float(state.latency_s[0, 0, 0]),
        hop_s=state.hop_s.item(),
        budget_s=budgets.stage_s.item(),
        layer_parts_s={
            "gemm": scale * float(time.gemm_s[batch - 1]),
            "experts": scale * float(time.experts_s[batch - 1]),
            "attention": scale * float(time.attention_s[batch - 1]),
            "elementwise": scale * float(time.elementwise_s[batch - 1]),
            "lm_head": scale * float(time.lm_head_s[batch - 1]),
            "all_reduce": scale * float(time.all_reduce_s[batch - 1]),
            "overhead": scale * time.overhead_s,
        },
        memory_bound=bool(time.memory_bound[batch - 1]),
        weight_bytes=held * point.weights,
        kv_bytes=held * float(point.kv_bytes(state.rate, state.residence_s, np.array([[[batch]]])).item()),
        activation_bytes=float(steps.activation_bytes[batch - 1]),
        usable_bytes=memory.usable_bytes(config.gpu, assumptions),
        nic_frac=float(state.rate.item() / state.nic_rate.item()),
        limit=_limit(point, question, j, batch),
    )


def _limit(point: Evaluator, question: Question, layers: NDArray[np.int64], batch: int) -> Limit:
    state = point.state(layers, np.array([[[batch]]]))
    if state.rate >= state.nic_rate:
        return Limit.NIC
    if state.rate >= state.memory_rate:
        return Limit.MEMORY
    if batch == question.max_batch:
        return Limit.BATCH
    larger = point.state(layers, np.array([[[batch + 1]]]))
    if not larger.in_time:
        return Limit.LATENCY
    return Limit.COMPUTE if larger.memory_rate > 0 else Limit.MEMORY
