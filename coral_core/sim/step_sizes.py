"""How much a pipeline's steps take: the largest batch of a node, a step's size, and how many steps are under way.

A step is split over the nodes of each stage by their weights. Prefill streams through: its steps are as large as their way
through all stages allows. Decode and aggregated service go round: of all numbers of batches under way and sizes, those that give
the most tokens/s with every round in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coral_core.domain import model_math
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.workload import Phase
from coral_core.perf.network import activation_bytes_per_token
from coral_core.perf.search import PREFILL_KV_BATCHES, Layout
from coral_core.sim.inputs import NodeTiming
from coral_core.sim.profiled import ProfiledTiming
from coral_core.sim.timing import Served, kv_blocks

FILLED_FRAC = 0.1
"""A gap of up to this share of a batch in a pipeline of prefill is left: one more batch under way delays all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of mean lengths: what it costs and what it holds. `size` is tokens for prefill, requests otherwise."""

    size: float
    decodes: float
    tokens: float
    rows: float
    kept_tokens: float
    pairs: float
    held_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One node of a template: internal layout, timing, weight within its stage, and its largest batch per replica.

    `profile`: whose timing it is, where it was measured.
    """

    config: NodeConfig
    layers: int
    layout: Layout
    timing: NodeTiming
    weight: float
    batch: Batch
    profile: ProfiledTiming | None

    @property
    def iteration_s(self) -> float:
        """Time of the largest batch."""
        return _iteration_s(self.timing, self.batch)


def largest_batch(
    served: Served,
    phase: Phase,
    config: NodeConfig,
    layers: int,
    *,
    layout: Layout,
    timing: NodeTiming,
    profile: ProfiledTiming | None,
    budget_s: float,
    hops: bool,
) -> Batch:
    """The largest batch of mean lengths within the stage's time and a replica's memory; at least the smallest one.

    None is larger than what was measured, where something was.
    """
    assumptions = served.assumptions
    token_hop_s = _token_hop_s(served, config, layout)

    def fits(size: int) -> bool:
        batch = batch_of(served, phase, size)
        if _beyond(profile, batch):
            return False
        hop_s = assumptions.hop_latency_s + batch.tokens * token_hop_s if hops else 0.0
        inner_s = (timing.depth - 1) * (timing.inner_hop_s + batch.tokens * timing.inner_hop_token_s)
        if timing.depth * _iteration_s(timing, batch) + inner_s + hop_s > budget_s:
            return False
        room = kv_blocks(served, config, layers, layout, batch_tokens=batch.tokens, rows=batch.rows, block_tokens=1)
        return batch.held_tokens <= room

    limit = assumptions.max_prefill_tokens if phase is Phase.PREFILL else assumptions.max_batch_requests
    return batch_of(served, phase, max(_last_true(fits, limit), 1))


def _last_true(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which a condition holds that never returns once lost; 0 where none."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def batch_of(served: Served, phase: Phase, size: float) -> Batch:
    """Prefill: `size` tokens of prompts. Decode: `size` requests. Aggregated: also their balanced share of prompts."""
    tokens_in, tokens_out = served.lengths.mean_input_tokens, served.lengths.mean_output_tokens
    kept_per_prompt = model_math.kept_tokens_per_layer(served.shape, tokens_in)
    decodes = 0 if phase is Phase.PREFILL else size
    prompts = {Phase.PREFILL: size / tokens_in, Phase.DECODE: 0.0, Phase.AGGREGATED: size / tokens_out}[phase]
    kept_tokens = decodes * served.kept_tokens
    return Batch(
        size=size,
        decodes=decodes,
        tokens=decodes + prompts * tokens_in,
        rows=decodes + prompts,
        kept_tokens=kept_tokens,
        pairs=prompts * tokens_in * served.pairs_per_prompt_token,
        held_tokens=kept_tokens + PREFILL_KV_BATCHES * prompts * kept_per_prompt,
    )


def _beyond(profile: ProfiledTiming | None, batch: Batch) -> bool:
    """Whether a batch is larger than those that were measured."""
    if profile is None:
        return False
    return batch.decodes > profile.most_requests or batch.tokens - batch.decodes > profile.most_prompt_tokens


def _iteration_s(timing: NodeTiming, batch: Batch) -> float:
    return timing.iteration_s(tokens=batch.tokens, rows=batch.rows, kept_tokens=batch.kept_tokens, pairs=batch.pairs)


def prefill_step_tokens(served: Served, engines: Sequence[Sequence[Engine]], *, slo_s: float, hop_s: float) -> float:
    """Tokens of the largest step of prefill whose way through all stages keeps the SLO, in memory at every stage.

    All stages compute the same steps, so what bounds them is the sum of the stages' times: the stage with the smallest budget
    would, where its nodes compute larger batches more cheaply, make the others' steps small and dear.
    """
    most = served.assumptions.max_prefill_tokens
    limit = min(most / share for stage in engines for share in shares(stage))

    def fits(size: int) -> bool:
        return _round_s(served, Phase.PREFILL, engines, size=size, under_way=1, hop_s=hop_s) <= slo_s

    return float(max(_last_true(fits, int(limit)), 1))


def shares(stage: Sequence[Engine]) -> list[float]:
    """The share of a stage's work that one replica of each of its nodes gets."""
    weights = sum(engine.weight for engine in stage)
    return [engine.weight / weights / engine.layout.dp for engine in stage]


def rounds(
    served: Served, phase: Phase, engines: Sequence[Sequence[Engine]], *, slo_s: float, hop_s: float
) -> tuple[int, int]:
    """Micro-batches under way and requests in each that give the most tokens/s with every round within the SLO.

    A round takes the way through all stages, or longer where the slowest node has all micro-batches to compute one after
    another. KV of all of them has to fit. Where not even one request is in time, it goes alone.
    """
    limit = served.assumptions.max_batch_requests * sum(engine.layout.dp for engine in engines[0])
    best = (0.0, 1, 1)
    for under_way in range(1, sum(max(engine.timing.depth for engine in stage) + 1 for stage in engines) + 1):

        def fits(size: int, under_way: int = under_way) -> bool:
            return _round_s(served, phase, engines, size=size, under_way=under_way, hop_s=hop_s) <= slo_s

        size = _last_true(fits, limit)
        if size > 0:
            round_s = _round_s(served, phase, engines, size=size, under_way=under_way, hop_s=hop_s)
            best = max(best, (under_way * size / round_s, under_way, size), key=lambda item: item[0])
    return best[1], best[2]


def _round_s(
    served: Served, phase: Phase, engines: Sequence[Sequence[Engine]], *, size: int, under_way: int, hop_s: float
) -> float:
    """Time of a round with so many micro-batches of `size` requests; infinite where KV or measured steps do not allow them."""
    way_s = slowest_s = 0.0
    for stage in engines:
        weights = sum(engine.weight for engine in stage)
        stage_s = 0.0
        for engine in stage:
            batch = batch_of(served, phase, size * engine.weight / weights / engine.layout.dp)
            room = kv_blocks(
                served,
                engine.config,
                engine.layers,
                engine.layout,
                batch_tokens=batch.tokens,
                rows=batch.rows,
                block_tokens=1,
            )
            if under_way * batch.held_tokens > room or _beyond(engine.profile, batch):
                return math.inf
            timing, step_s = engine.timing, _iteration_s(engine.timing, batch)
            inner_s = (timing.depth - 1) * (timing.inner_hop_s + batch.tokens * timing.inner_hop_token_s)
            sent_s = hop_s + batch.tokens * _token_hop_s(served, engine.config, engine.layout) if hop_s else 0.0
            stage_s = max(stage_s, timing.depth * step_s + inner_s + sent_s)
            slowest_s = max(slowest_s, step_s)
        way_s += stage_s
    return max(way_s, under_way * slowest_s)


def _token_hop_s(served: Served, config: NodeConfig, layout: Layout) -> float:
    """NIC time of one token of each replica on its way to the next stage."""
    token_bytes = activation_bytes_per_token(served.shape, served.assumptions) * layout.dp
    return token_bytes / (config.nic_bytes_per_s * served.assumptions.nic_usable_frac)


def prefill_batches(served: Served, engines: Sequence[Sequence[Engine]], step_tokens: float, hop_s: float) -> int:
    """As many as fill the way round, stage by stage and hop by hop, while the slowest node computes one after another."""
    steps_s = [[engine.iteration_s for engine in stage] for stage in engines]
    if len(engines) > 1:
        steps_s = [
            [
                _iteration_s(engine.timing, batch_of(served, Phase.PREFILL, step_tokens * share))
                for engine, share in zip(stage, shares(stage), strict=True)
            ]
            for stage in engines
        ]
    round_s = sum(
        max(engine.timing.depth * step_s for engine, step_s in zip(stage, row, strict=True)) + hop_s
        for stage, row in zip(engines, steps_s, strict=True)
    )
    return max(len(engines), math.ceil(round_s / max(map(max, steps_s)) - FILLED_FRAC))
