"""From serving templates to the simulator's instances: internal layouts, engine limits and micro-batches.

An engine's batch of mean lengths is as large as its stage's share of the SLO (hop included) and its memory allow, by the
rules of T^ (`perf.search`); its limits follow from that batch. In a pipeline steps pass through all stages, split by the
nodes' weights, so the node of the first stage that counts most gets most of what a step may hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coral_core.domain.capacity import BudgetTable, CapacityTable
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.templates import ServingTemplate, Stage
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, NoSolutionError
from coral_core.perf.search import Layout
from coral_core.sim.inputs import SimInstance, SimNode, SimStage
from coral_core.sim.step_sizes import (
    Engine,
    batch_of,
    largest_batch,
    prefill_batches,
    prefill_step_tokens,
    rounds,
    shares,
)
from coral_core.sim.timing import Served, kv_blocks, measured_timing, node_timing

LEAST_CHUNK_TOKENS = 256
"""An engine never gets a smaller budget of tokens per iteration, however tight the SLO; decode nodes, whose only prompts
are those of preempted requests, get no larger one."""


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
            _engine(served, table, configs.get(node), stage, s, node=node, stages=len(stages), slo_s=slo_s)
            for node in stage.nodes
        ]
        for s, stage in enumerate(stages)
    ]
    hop_s = served.assumptions.hop_latency_s if len(stages) > 1 else 0.0
    if template.phase is Phase.PREFILL:
        step_tokens = prefill_step_tokens(served, engines, slo_s=slo_s, hop_s=hop_s)
        micro_batches, running = prefill_batches(served, engines, step_tokens, hop_s), math.inf
    else:
        micro_batches, size = rounds(served, template.phase, engines, slo_s=slo_s, hop_s=hop_s)
        step_tokens = batch_of(served, template.phase, size).tokens
        running = float(micro_batches * size)
    nodes = [
        _nodes(
            served,
            row,
            s,
            _batched_tokens(template.phase, engines, row, step_tokens),
            running=running,
            block_tokens=block_tokens,
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
    s: int,
    *,
    node: str,
    stages: int,
    slo_s: float,
) -> Engine:
    where = f"template stage of {stage.layers} layers on {node}"
    if node not in table.configs or config is None:
        raise InputError(f"no capacity of configuration {node!r}", where=where, fix="use the table it was made from")
    weight, layout = _capacity(table, stage, table.configs.index(node), stages, where)
    profile = served.measured.get((table.phase, node, layout.tp))
    timing = (
        node_timing(served, config, stage.layers, layout)
        if profile is None
        else measured_timing(served, config, stage.layers, layout, profile=profile, first=s == 0)
    )
    budget_s = slo_s * (stage.budget_frac or 1 / stages)
    return Engine(
        config=config,
        layers=stage.layers,
        layout=layout,
        timing=timing,
        weight=weight,
        batch=largest_batch(
            served,
            table.phase,
            config,
            stage.layers,
            layout=layout,
            timing=timing,
            profile=profile,
            budget_s=budget_s,
            hops=stages > 1,
        ),
        profile=profile,
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


def _batched_tokens(
    phase: Phase, engines: Sequence[Sequence[Engine]], stage: Sequence[Engine], step_tokens: float
) -> list[int]:
    """Budgets of tokens per iteration of a stage's replicas; for decode, room for every batch."""
    if phase is Phase.DECODE:
        tokens = [max(engine.batch.tokens for row in engines for engine in row)] * len(stage)
    elif len(engines) == 1:
        tokens = [engine.batch.tokens for engine in stage]
    else:
        tokens = [step_tokens * share for share in shares(stage)]
    return [max(math.ceil(count), LEAST_CHUNK_TOKENS) for count in tokens]


def _nodes(
    served: Served,
    engines: Sequence[Engine],
    s: int,
    batched_tokens: Sequence[int],
    *,
    running: float,
    block_tokens: int,
) -> tuple[SimNode, ...]:
    """The replicas of a stage's nodes; of the `running` requests each has its share, in whole ones, at least one."""
    nodes: list[SimNode] = []
    limit = served.assumptions.max_batch_requests
    for k, (engine, share, tokens) in enumerate(zip(engines, shares(engines), batched_tokens, strict=True)):
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
