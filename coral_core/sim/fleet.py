"""From serving templates to the simulator's instances: internal layouts, engine limits and micro-batches.

An engine's batch of mean lengths is as large as its stage's share of the SLO (hop included) and its memory allow, by the
rules of T^ (`perf.search`); its limits follow from that batch. In a pipeline steps pass through all stages, split by the
nodes' weights, so the node of the first stage that counts most gets most of what a step may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coral_core.domain import model_math
from coral_core.domain.capacity import BudgetTable, CapacityTable
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.templates import ServingTemplate, Stage
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, NoSolutionError
from coral_core.perf.network import activation_bytes_per_token
from coral_core.perf.search import PREFILL_KV_BATCHES, Layout
from coral_core.sim.inputs import NodeTiming, SimInstance, SimNode, SimStage
from coral_core.sim.timing import Served, kv_blocks, node_timing

LEAST_CHUNK_TOKENS = 256
"""An engine never gets a smaller budget of tokens per iteration, however tight the SLO; decode nodes, whose only prompts
are those of preempted requests, get no larger one."""

FILLED_FRAC = 0.1
"""A gap of up to this share of a batch in a pipeline of prefill is left: one more batch under way delays all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A batch of mean lengths: what it costs and what it holds. `size` is tokens for prefill, requests otherwise."""

    size: float
    tokens: float
    rows: float
    kept_tokens: float
    pairs: float
    held_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """One node of a template: internal layout, timing, weight within its stage, and its largest batch per replica."""

    config: NodeConfig
    layers: int
    layout: Layout
    timing: NodeTiming
    weight: float
    batch: _Batch

    @property
    def iteration_s(self) -> float:
        """Time of the largest batch."""
        return _iteration_s(self.timing, self.batch)


def sim_instance(
    name: str,
    template: ServingTemplate,
    table: CapacityTable,
    served: Served,
    configs: Mapping[str, NodeConfig],
    *,
    region: str = "",
    boot_s: float = 0.0,
    ready_at_start: bool = True,
    budget_frac: float = 1.0,
    block_tokens: int = 16,
) -> SimInstance:
    """An instance of a template, with the layouts of the capacity table that the template was made from.

    In every stage a batch of mean lengths takes at most `budget_frac` of the stage's share of the planned SLO, hop included; a
    node of several data-parallel replicas becomes that many, behind one NIC. Prefill has as many batches under way as it
    takes to keep the slowest stage busy; where tokens are generated, their number and size give the most tokens/s of
    those whose round through all stages keeps `budget_frac` of the SLO.
    Raises InputError for a configuration without capacity there, NoSolutionError where no KV fits.
    """
    stages = template.placement.stages
    planned = served.assumptions.planned_slo(template.phase, template.slo)
    slo_s = budget_frac * (planned.ttft_s if template.phase is Phase.PREFILL else planned.tpot_s)
    engines = [
        [
            _engine(served, table, configs.get(node), stage, node=node, stages=len(stages), slo_s=slo_s)
            for node in stage.nodes
        ]
        for stage in stages
    ]
    hop_s = served.assumptions.hop_latency_s if len(stages) > 1 else 0.0
    if template.phase is Phase.PREFILL:
        micro_batches, running = _micro_batches(served, engines, hop_s), math.inf
    else:
        micro_batches, size = _rounds(served, template.phase, engines, slo_s=slo_s, hop_s=hop_s)
        running = float(micro_batches * size)
    nodes = [
        _nodes(
            served, row, s, _batched_tokens(template.phase, engines, row), running=running, block_tokens=block_tokens
        )
        for s, row in enumerate(engines)
    ]
    return SimInstance(
        name=name,
        model=template.model,
        phase=template.phase,
        stages=tuple(SimStage(layers=stage.layers, nodes=row) for stage, row in zip(stages, nodes, strict=True)),
        weight=_requests_per_s(served, template),
        variant=template.variant,
        region=region,
        template=template.template_id,
        max_batched_tokens=max(node.max_batched_tokens for node in nodes[0]),
        max_running_requests=max(node.max_running_requests for node in nodes[0]),
        micro_batches=micro_batches,
        hop_s=hop_s,
        boot_s=boot_s,
        ready_at_start=ready_at_start,
    )


def prompt_times_s(served: Served, instances: Sequence[SimInstance]) -> tuple[float, float]:
    """What a prompt takes by itself on an instance that is its alone: seconds, and seconds per token.

    The weighted mean of `instances`: all stages one after another for a prompt of mean length, and for what a prompt has
    beyond it the slowest stage, since its chunks go through the stages side by side.
    """
    tokens = served.lengths.mean_input_tokens
    total = sum(instance.weight for instance in instances)
    fixed_s = token_s = 0.0
    for instance in instances:
        once = [_slowest_s(served, stage.nodes, tokens) for stage in instance.stages]
        twice = [_slowest_s(served, stage.nodes, 2 * tokens) for stage in instance.stages]
        slope_s = max(b - a for a, b in zip(once, twice, strict=True)) / tokens
        token_s += instance.weight / total * slope_s
        fixed_s += instance.weight / total * max(sum(once) - slope_s * tokens, 0.0)
    return fixed_s, token_s


def _slowest_s(served: Served, nodes: Sequence[SimNode], tokens: float) -> float:
    pairs = tokens * served.pairs_per_prompt_token
    return max(node.timing.depth * node.timing.iteration_s(tokens=tokens, rows=1.0, pairs=pairs) for node in nodes)


def _engine(
    served: Served,
    table: CapacityTable,
    config: NodeConfig | None,
    stage: Stage,
    *,
    node: str,
    stages: int,
    slo_s: float,
) -> _Engine:
    where = f"template stage of {stage.layers} layers on {node}"
    if node not in table.configs or config is None:
        raise InputError(f"no capacity of configuration {node!r}", where=where, fix="use the table it was made from")
    weight, layout = _capacity(table, stage, table.configs.index(node), stages, where)
    timing = node_timing(served, config, stage.layers, layout)
    budget_s = slo_s * (stage.budget_frac or 1 / stages)
    return _Engine(
        config=config,
        layers=stage.layers,
        layout=layout,
        timing=timing,
        weight=weight,
        batch=_largest_batch(
            served, table.phase, config, stage.layers, layout=layout, timing=timing, budget_s=budget_s, hops=stages > 1
        ),
    )


def _capacity(table: CapacityTable, stage: Stage, column: int, stages: int, where: str) -> tuple[float, Layout]:
    """Throughput of a node of the stage, and the layout that gives it."""
    source: CapacityTable | BudgetTable = table
    row = min(stages, table.max_stages) - 1
    if stage.budget_frac is not None and stages > 1:
        if table.budgets is None:
            raise InputError("the table has no capacities over free stage budgets", where=where)
        source, row = table.budgets, max(round(stage.budget_frac * table.budgets.grid), 1) - 1
    chosen = int(source.layout[row, column, stage.layers - 1])
    if chosen < 0:
        raise InputError("the configuration has no capacity there", where=where)
    return float(source.throughput[row, column, stage.layers - 1]), Layout.parse(source.layouts[chosen])


def _largest_batch(
    served: Served,
    phase: Phase,
    config: NodeConfig,
    layers: int,
    *,
    layout: Layout,
    timing: NodeTiming,
    budget_s: float,
    hops: bool,
) -> _Batch:
    """The largest batch of mean lengths within the stage's time and a replica's memory; at least the smallest one."""
    assumptions = served.assumptions
    token_hop_s = _token_hop_s(served, config, layout)

    def fits(size: int) -> bool:
        batch = _batch(served, phase, size)
        hop_s = assumptions.hop_latency_s + batch.tokens * token_hop_s if hops else 0.0
        inner_s = (timing.depth - 1) * (timing.inner_hop_s + batch.tokens * timing.inner_hop_token_s)
        if timing.depth * _iteration_s(timing, batch) + inner_s + hop_s > budget_s:
            return False
        room = kv_blocks(served, config, layers, layout, batch_tokens=batch.tokens, rows=batch.rows, block_tokens=1)
        return batch.held_tokens <= room

    limit = assumptions.max_prefill_tokens if phase is Phase.PREFILL else assumptions.max_batch_requests
    return _batch(served, phase, max(_last_true(fits, limit), 1))


def _last_true(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which a condition holds that never returns once lost; 0 where none."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _batch(served: Served, phase: Phase, size: float) -> _Batch:
    """Prefill: `size` tokens of prompts. Decode: `size` requests. Aggregated: also their balanced share of prompts."""
    tokens_in, tokens_out = served.lengths.mean_input_tokens, served.lengths.mean_output_tokens
    kept_per_prompt = model_math.kept_tokens_per_layer(served.shape, tokens_in)
    decodes = 0 if phase is Phase.PREFILL else size
    prompts = {Phase.PREFILL: size / tokens_in, Phase.DECODE: 0.0, Phase.AGGREGATED: size / tokens_out}[phase]
    kept_tokens = decodes * served.kept_tokens
    return _Batch(
        size=size,
        tokens=decodes + prompts * tokens_in,
        rows=decodes + prompts,
        kept_tokens=kept_tokens,
        pairs=prompts * tokens_in * served.pairs_per_prompt_token,
        held_tokens=kept_tokens + PREFILL_KV_BATCHES * prompts * kept_per_prompt,
    )


def _iteration_s(timing: NodeTiming, batch: _Batch) -> float:
    return timing.iteration_s(tokens=batch.tokens, rows=batch.rows, kept_tokens=batch.kept_tokens, pairs=batch.pairs)


def _batched_tokens(phase: Phase, engines: Sequence[Sequence[_Engine]], stage: Sequence[_Engine]) -> list[int]:
    """Budgets of tokens per iteration of a stage's replicas; for decode, room for every batch."""
    if phase is Phase.DECODE:
        tokens = [max(engine.batch.tokens for row in engines for engine in row)] * len(stage)
    elif len(engines) == 1:
        tokens = [engine.batch.tokens for engine in stage]
    else:
        tokens = [_step_tokens(engines) * share for share in _shares(stage)]
    return [max(math.ceil(count), LEAST_CHUNK_TOKENS) for count in tokens]


def _step_tokens(engines: Sequence[Sequence[_Engine]]) -> float:
    """Tokens of a pipeline's step that give no replica, which gets its share of them, more than its largest batch."""
    return min(
        engine.batch.tokens / share for stage in engines for engine, share in zip(stage, _shares(stage), strict=True)
    )


def _shares(stage: Sequence[_Engine]) -> list[float]:
    """The share of a stage's work that one replica of each of its nodes gets."""
    weights = sum(engine.weight for engine in stage)
    return [engine.weight / weights / engine.layout.dp for engine in stage]


def _rounds(
    served: Served, phase: Phase, engines: Sequence[Sequence[_Engine]], *, slo_s: float, hop_s: float
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
    served: Served, phase: Phase, engines: Sequence[Sequence[_Engine]], *, size: int, under_way: int, hop_s: float
) -> float:
    """Time of a round with so many micro-batches of `size` requests; infinite where their KV does not fit."""
    way_s = slowest_s = 0.0
    for stage in engines:
        weights = sum(engine.weight for engine in stage)
        stage_s = 0.0
        for engine in stage:
            batch = _batch(served, phase, size * engine.weight / weights / engine.layout.dp)
            room = kv_blocks(
                served,
                engine.config,
                engine.layers,
                engine.layout,
                batch_tokens=batch.tokens,
                rows=batch.rows,
                block_tokens=1,
            )
            if under_way * batch.held_tokens > room:
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


def _micro_batches(served: Served, engines: Sequence[Sequence[_Engine]], hop_s: float) -> int:
    """As many as fill the way round, stage by stage and hop by hop, while the slowest node computes one after another."""
    steps_s = [[engine.iteration_s for engine in stage] for stage in engines]
    if len(engines) > 1:
        tokens = _step_tokens(engines)
        steps_s = [
            [
                _iteration_s(engine.timing, _batch(served, Phase.PREFILL, tokens * share))
                for engine, share in zip(stage, _shares(stage), strict=True)
            ]
            for stage in engines
        ]
    round_s = sum(
        max(engine.timing.depth * step_s for engine, step_s in zip(stage, row, strict=True)) + hop_s
        for stage, row in zip(engines, steps_s, strict=True)
    )
    return max(len(engines), math.ceil(round_s / max(map(max, steps_s)) - FILLED_FRAC))


def _nodes(
    served: Served,
    engines: Sequence[_Engine],
    s: int,
    batched_tokens: Sequence[int],
    *,
    running: float,
    block_tokens: int,
) -> tuple[SimNode, ...]:
    """The replicas of a stage's nodes; of the `running` requests each has its share, in whole ones, at least one."""
    nodes: list[SimNode] = []
    limit = served.assumptions.max_batch_requests
    for k, (engine, share, tokens) in enumerate(zip(engines, _shares(engines), batched_tokens, strict=True)):
        blocks = kv_blocks(
            served,
            engine.config,
            engine.layers,
            engine.layout,
            batch_tokens=tokens,
            rows=engine.batch.rows,
            block_tokens=block_tokens,
        )
        if blocks < 1:
            raise NoSolutionError(f"{engine.layers} layers of {served.shape.name} leave no KV on {engine.config.name}")
        node = SimNode(
            timing=engine.timing,
            kv_blocks=blocks,
            weight=engine.weight / engine.layout.dp,
            max_batched_tokens=tokens,
            max_running_requests=limit if math.isinf(running) else max(math.ceil(running * share), 1),
            nic_bytes_per_s=engine.config.nic_bytes_per_s * served.assumptions.nic_usable_frac,
            machine=f"stage{s}/node{k}",
        )
        nodes.extend([node] * engine.layout.dp)
    return tuple(nodes)


def _requests_per_s(served: Served, template: ServingTemplate) -> float:
    if template.phase is Phase.AGGREGATED:
        return template.throughput
    if template.phase is Phase.PREFILL:
        return template.throughput / served.lengths.mean_input_tokens
    return template.throughput / served.lengths.mean_output_tokens
