"""From hardware, models and templates to the simulator's instances: the same layer times that capacities T^ rest on.

A node's timing splits `perf.roofline`'s layer time by what each kernel depends on: the LM head on sampled rows, attention
on KV read and on attended pairs, all others (GEMMs, experts, all-reduce, ...) on the tokens of a batch. Batches of the planner's
mean lengths take the planner's time (to the tables' interpolation); other batches take theirs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coral_core.domain import model_math
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import ServingTemplate, Stage
from coral_core.domain.workload import Lengths, Phase
from coral_core.errors import DataGapError, InputError, NoSolutionError
from coral_core.perf import memory
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.factors import Factors
from coral_core.perf.network import activation_bytes_per_token
from coral_core.perf.roofline import LayerTime, Step, attended_tokens_per_prompt_token, layer_time, mean_context_tokens
from coral_core.perf.search import Layout
from coral_core.sim.inputs import UNLIMITED, NodeTiming, SimInstance, SimModel, SimNode, SimStage

GRID = np.concatenate([[0.0], np.unique(np.rint(np.geomspace(1, 32768, 96)))])
"""Batch sizes in tokens at which layer times are tabulated: steps of at most 12%."""
LEAST_CHUNK_TOKENS = 256
"""An engine never gets a smaller budget per iteration, however tight the SLO."""
RECOMPUTE_CHUNK_TOKENS = 2048
"""Budget of decode nodes, whose only prompts are those of preempted requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as it is served and asked for, and what estimates assume."""

    shape: ModelShape
    variant: str
    lengths: Lengths
    assumptions: CapacityAssumptions
    factors: Factors

    @property
    def kept_tokens(self) -> float:
        """KV tokens a decoding request of mean lengths reads in a mean layer."""
        return model_math.kept_tokens_per_layer(self.shape, mean_context_tokens(self.lengths))

    @property
    def pairs_per_prompt_token(self) -> float:
        """Attended tokens per token of a mean prompt in a mean layer."""
        return attended_tokens_per_prompt_token(self.shape, self.lengths.mean_input_tokens)


def sim_model(served: Served, *, max_wait_s: float = math.inf) -> SimModel:
    """What the simulator must know of the model itself."""
    window = served.shape.sliding_window
    return SimModel(
        name=served.shape.name,
        kv_bytes_per_token=model_math.kv_bytes_per_token_per_layer(served.shape, served.variant),
        activation_bytes_per_token=activation_bytes_per_token(served.shape, served.assumptions),
        window_tokens=math.inf if window is None else window.window_tokens,
        window_frac=0.0 if window is None else window.layers / served.shape.layers,
        max_wait_s=max_wait_s,
    )


def node_timing(served: Served, config: NodeConfig, layers: int, layout: Layout) -> NodeTiming:
    """Timing of one data-parallel replica of a node that holds `layers` in `layout`.

    Raises DataGapError where a GPU's efficiency is not known.
    """

    def times(step: Step) -> LayerTime:
        return layer_time(
            shape=served.shape,
            variant=served.variant,
            gpu=config.gpu,
            tp=layout.tp,
            step=step,
            lengths=served.lengths,
            factors=served.factors,
            layer_overhead_s=served.assumptions.layer_overhead_s,
        )

    one, none, tokens = np.ones(1), np.zeros(1), GRID[1:]
    batch = times(Step(decode_requests=tokens, prefill_tokens=0 * tokens, prompts=0 * tokens, produced=tokens))
    decode = times(Step(decode_requests=one, prefill_tokens=none, prompts=none, produced=one))
    prompt = times(Step(decode_requests=none, prefill_tokens=one, prompts=none, produced=one))
    held = -(-layers // layout.pp)
    # Whatever kernel is neither attention nor LM head depends on the tokens of the batch alone.
    token_s = held * (batch.total_s - batch.attention_s - batch.lm_head_s - batch.overhead_s)
    row_s = held * batch.lm_head_s
    link_s = activation_bytes_per_token(served.shape, served.assumptions) / config.gpu.link_bytes_per_s
    return NodeTiming(
        grid=tuple(GRID.tolist()),
        token_s=(float(token_s[0]), *token_s.tolist()),
        row_s=(0.0, *row_s.tolist()),
        fixed_s=held * served.assumptions.layer_overhead_s + served.assumptions.step_overhead_s,
        kept_token_s=held * float(decode.attention_s[0]) / served.kept_tokens,
        pair_s=held * float(prompt.attention_s[0]) / served.pairs_per_prompt_token,
        depth=layout.pp,
        inner_hop_s=served.assumptions.inner_hop_latency_s,
        inner_hop_token_s=link_s,
    )


def kv_blocks(
    served: Served, config: NodeConfig, layers: int, layout: Layout, *, batch_tokens: int, rows: int, block_tokens: int
) -> int:
    """KV blocks of one replica beside weights and the activations of its largest batch; 0 where they do not fit."""
    held = -(-layers // layout.pp)
    size = np.array([float(batch_tokens)])
    step = Step(decode_requests=0 * size, prefill_tokens=size, prompts=0 * size + rows, produced=size)
    free_bytes = memory.usable_bytes(config.gpu, served.assumptions)
    free_bytes -= held * memory.weight_bytes_per_gpu_layer(served.shape, served.variant, layout.tp)
    free_bytes -= float(memory.activation_bytes_per_gpu(served.shape, layout.tp, step)[0])
    token_bytes = held * memory.kv_bytes_per_gpu_layer(served.shape, served.variant, layout.tp, 1.0)
    return max(int(free_bytes / (token_bytes * block_tokens)), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """One node of a template: its configuration, internal layout, timing and weight within its stage."""

    config: NodeConfig
    layers: int
    layout: Layout
    timing: NodeTiming
    weight: float


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

    Engine limits come from the SLO, as in T^: a batch of mean lengths may take at most `budget_frac` of SLO / stages in
    every stage, hop included. Micro-batches are as many as it takes to keep the slowest stage busy.
    Raises InputError for a configuration without capacity there, NoSolutionError where no KV fits.
    """
    stages = template.placement.stages
    engines = [
        [_engine(served, table, configs.get(node), stage, stages=len(stages), node=node) for node in stage.nodes]
        for stage in stages
    ]
    slo_s = template.slo.ttft_s if template.phase is Phase.PREFILL else template.slo.tpot_s
    hop_s = served.assumptions.hop_latency_s if len(stages) > 1 else 0.0
    budget_s = budget_frac * slo_s / len(stages)
    sizes = [
        [_largest_batch(served, template.phase, engine, budget_s, hops=len(stages) > 1) for engine in stage]
        for stage in engines
    ]
    batch = min(
        sum(size * e.layout.dp for size, e in zip(*pair, strict=True)) for pair in zip(sizes, engines, strict=True)
    )
    micro_batches = _micro_batches(served, template.phase, engines, sizes, hop_s)
    tokens = _batched_tokens(served, template.phase, sizes)
    replicas = sum(engine.layout.dp for engine in engines[0])
    running = max(batch * micro_batches // replicas, 1)
    if template.phase is Phase.PREFILL:
        running = served.assumptions.max_batch_requests
    return SimInstance(
        name=name,
        model=template.model,
        phase=template.phase,
        stages=tuple(
            SimStage(
                layers=stage.layers,
                nodes=_nodes(served, row, s, batch_tokens=tokens, rows=running, block_tokens=block_tokens),
            )
            for s, (stage, row) in enumerate(zip(stages, engines, strict=True))
        ),
        weight=_requests_per_s(served, template),
        region=region,
        template=template.template_id,
        max_batched_tokens=tokens,
        max_running_requests=running,
        micro_batches=micro_batches,
        hop_s=hop_s,
        boot_s=boot_s,
        ready_at_start=ready_at_start,
    )


def _engine(
    served: Served, table: CapacityTable, config: NodeConfig | None, stage: Stage, *, stages: int, node: str
) -> _Engine:
    where = f"template stage of {stage.layers} layers on {node}"
    if node not in table.configs or config is None:
        raise InputError(f"no capacity of configuration {node!r}", where=where, fix="use the table it was made from")
    column = table.configs.index(node)
    chosen = int(table.layout[min(stages, table.max_stages) - 1, column, stage.layers - 1])
    if chosen < 0:
        raise InputError(f"configuration {node!r} has no capacity at {stages} stages", where=where)
    layout = parsed_layout(table.layouts[chosen])
    return _Engine(
        config=config,
        layers=stage.layers,
        layout=layout,
        timing=node_timing(served, config, stage.layers, layout),
        weight=float(table.throughput[min(stages, table.max_stages) - 1, column, stage.layers - 1]),
    )


def parsed_layout(text: str) -> Layout:
    """`tp2 pp1 dp4`, as capacity tables write it."""
    match = re.fullmatch(r"tp(\d+) pp(\d+) dp(\d+)", text)
    if match is None:
        raise DataGapError(f"layout {text!r} is not of the form 'tp2 pp1 dp4'")
    tp, pp, dp = map(int, match.groups())
    return Layout(tp=tp, pp=pp, dp=dp)


def _largest_batch(served: Served, phase: Phase, engine: _Engine, budget_s: float, *, hops: bool) -> int:
    """Tokens (prefill) or requests of the largest batch of mean lengths that takes at most the budget; at least 1."""
    assumptions = served.assumptions
    token_hop_s = activation_bytes_per_token(served.shape, assumptions) * engine.layout.dp
    token_hop_s /= engine.config.nic_bytes_per_s * assumptions.nic_usable_frac

    def fits(size: int) -> bool:
        tokens = float(size) if phase is not Phase.AGGREGATED else size * _tokens_per_decode(served)
        hop_s = assumptions.hop_latency_s + tokens * token_hop_s if hops else 0.0
        return engine.timing.depth * _batch_s(served, phase, engine.timing, size) + hop_s <= budget_s

    limit = assumptions.max_prefill_tokens if phase is Phase.PREFILL else assumptions.max_batch_requests
    return max(_last_true(fits, limit), 1)


def _last_true(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which a condition holds that never returns once lost; 0 where none."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _tokens_per_decode(served: Served) -> float:
    """Tokens in a balanced aggregated batch per decoding request: its own and its share of prompts."""
    return 1 + served.lengths.mean_input_tokens / served.lengths.mean_output_tokens


def _batch_s(served: Served, phase: Phase, timing: NodeTiming, size: int) -> float:
    """Iteration time of a batch of `size` (tokens for prefill, requests otherwise) of mean lengths."""
    if phase is Phase.PREFILL:
        rows, pairs = size / served.lengths.mean_input_tokens, size * served.pairs_per_prompt_token
        return timing.iteration_s(tokens=size, rows=rows, pairs=pairs)
    if phase is Phase.DECODE:
        return timing.iteration_s(tokens=size, rows=size, kept_tokens=size * served.kept_tokens)
    tokens = size * _tokens_per_decode(served)
    return timing.iteration_s(
        tokens=tokens,
        rows=size * (1 + 1 / served.lengths.mean_output_tokens),
        kept_tokens=size * served.kept_tokens,
        pairs=(tokens - size) * served.pairs_per_prompt_token,
    )


def _batched_tokens(served: Served, phase: Phase, sizes: Sequence[Sequence[int]]) -> int:
    """The engines' budget of tokens per iteration: that of the tightest node."""
    if phase is Phase.DECODE:
        return max(RECOMPUTE_CHUNK_TOKENS, *(size for stage in sizes for size in stage))
    least = min(size for stage in sizes for size in stage)
    tokens = least if phase is Phase.PREFILL else int(least * _tokens_per_decode(served))
    return max(tokens, LEAST_CHUNK_TOKENS)


def _micro_batches(
    served: Served, phase: Phase, engines: Sequence[Sequence[_Engine]], sizes: Sequence[Sequence[int]], hop_s: float
) -> int:
    """As many as fill the way round, stage by stage and hop by hop, while the slowest node computes one after another."""
    times = [
        [
            (engine.timing.depth, _batch_s(served, phase, engine.timing, size))
            for engine, size in zip(*pair, strict=True)
        ]
        for pair in zip(engines, sizes, strict=True)
    ]
    round_s = sum(max(depth * time_s for depth, time_s in stage) + hop_s for stage in times)
    slowest_s = max(time_s for stage in times for _, time_s in stage)
    return max(len(engines), math.ceil(round_s / slowest_s - 1e-6))


def _nodes(
    served: Served, engines: Sequence[_Engine], s: int, *, batch_tokens: int, rows: int, block_tokens: int
) -> tuple[SimNode, ...]:
    """A stage's nodes; a node of several replicas becomes that many, behind one NIC."""
    nodes: list[SimNode] = []
    for k, engine in enumerate(engines):
        blocks = kv_blocks(
            served,
            engine.config,
            engine.layers,
            engine.layout,
            batch_tokens=batch_tokens,
            rows=min(rows, batch_tokens),
            block_tokens=block_tokens,
        )
        if blocks < 1:
            raise NoSolutionError(f"{engine.layers} layers of {served.shape.name} leave no KV on {engine.config.name}")
        nic = engine.config.nic_bytes_per_s * served.assumptions.nic_usable_frac
        node = SimNode(
            timing=engine.timing,
            kv_blocks=min(blocks, UNLIMITED),
            weight=engine.weight / engine.layout.dp,
            nic_bytes_per_s=nic,
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
