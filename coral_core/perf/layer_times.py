"""Measured times of one layer by batch: read them, and turn them into capacities.

The table has one row per (model, node, phase, x): the milliseconds that one layer takes on that node for a batch x,
which is tokens for phase `prompt` and requests for `decode`. Times are read between neighbouring points linearly; below
the first point its time holds, beyond the last nothing is known and no batch goes there.

What the table does not say is counted as in the analytic estimates (`search`): weights with embeddings and LM head as
layer equivalents, KV of live requests, hops, NIC, headroom. A node of several GPUs was measured as one, so it has no
internal layout to choose. A decode time holds for the context at which it was measured, which the table does not state.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain import model_math
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import DataGapError, InputError, unknown_name
from coral_core.perf import memory, network
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import check_inputs, published_budgets
from coral_core.perf.roofline import mean_context_tokens
from coral_core.perf.search import PREFILL_KV_BATCHES, Budgets, Layout
from coral_core.units import MS

Floats = NDArray[np.float64]

COLUMNS: Final = ("model", "node", "phase", "x", "time_ms_per_layer", "x_meaning")
FORMULA_VERSION: Final = 1
AS_MEASURED: Final = "as measured"
"""The layout inside a node of several GPUs: a table of times does not say which it was measured with."""
_PHASES: Final = {"prompt": Phase.PREFILL, "decode": Phase.DECODE}
_DEFAULTS: Final = CapacityAssumptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of one layer of one model. `points` by (node, phase): batches, rising, and seconds, both (n,); `lines` in the file."""

    model: str
    source: str
    points: Mapping[tuple[str, Phase], tuple[Floats, Floats]]
    lines: Mapping[tuple[str, Phase], tuple[int, ...]]

    def time_s(self, node: str, phase: Phase, batch: Floats) -> Floats:
        """Seconds of one layer at each batch, none of which may exceed `largest_batch`."""
        x, seconds = self._of(node, phase)
        assert batch.max(initial=0.0) <= x[-1]
        return np.interp(batch, x, seconds)

    def largest_batch(self, node: str, phase: Phase) -> float:
        """The largest batch with a known time. DataGapError for a node or phase without rows."""
        return float(self._of(node, phase)[0][-1])

    def _of(self, node: str, phase: Phase) -> tuple[Floats, Floats]:
        if (node, phase) not in self.points:
            known = ", ".join(sorted({name for name, _ in self.points}))
            raise DataGapError(
                f"no {phase} times of {self.model} on node {node!r}", where=self.source, fix=f"known: {known}"
            )
        return self.points[node, phase]


def read_layer_times(file: Path, model: str) -> LayerTimes:
    """The rows of `model` in a CSV with COLUMNS. InputError names file and line, or the unknown model."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=file.name) from None
    reader = csv.reader(text.splitlines(), strict=True)
    header = next(reader, [])
    if header != list(COLUMNS):
        raise InputError(f"columns are {','.join(header)}", where=f"{file.name}:1", fix=f"due: {','.join(COLUMNS)}")
    found: dict[tuple[str, Phase], dict[float, tuple[float, int]]] = {}
    models: dict[str, None] = {}
    for cells in reader:
        where = f"{file.name}:{reader.line_num}"
        if len(cells) != len(COLUMNS):
            raise InputError(f"{len(cells)} cells, {len(COLUMNS)} are due", where=where)
        models[cells[0]] = None
        if cells[2] not in _PHASES:
            raise unknown_name("phase", cells[2], _PHASES, where=where)
        batch, time_ms = _positive(cells[3], "x", where), _positive(cells[4], "time_ms_per_layer", where)
        if cells[0] == model:
            curve = found.setdefault((cells[1], _PHASES[cells[2]]), {})
            if batch in curve:
                raise InputError(f"{cells[1]} has two rows of phase {cells[2]} at x = {batch:g}", where=where)
            curve[batch] = (time_ms * MS, reader.line_num)
    if model not in models:
        raise unknown_name("model", model, models, where=file.name)
    points = {
        key: (np.array(sorted(curve)), np.array([curve[x][0] for x in sorted(curve)])) for key, curve in found.items()
    }
    lines = {key: tuple(curve[x][1] for x in sorted(curve)) for key, curve in found.items()}
    return LayerTimes(model=model, source=file.name, points=points, lines=lines)


def _positive(text: str, column: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{column} is {text!r}, must be a number above 0", where=where)
    return value


def capacity_table_from_times(
    *,
    times: LayerTimes,
    nodes: Mapping[str, str],
    shape: ModelShape,
    variant: str,
    phase: Phase,
    slo: Slo,
    lengths: Lengths,
    configs: Sequence[NodeConfig],
    max_stages: int,
    assumptions: CapacityAssumptions = _DEFAULTS,
) -> CapacityTable:
    """T^ at the published split, as `capacity_table` gives it, from measured times; `nodes` maps configurations to theirs.

    Prefill batches whole prompts of the mean length. Raises InputError for values that make no sense, DataGapError for
    phase `aggregated` and for configurations without times.
    """
    check_inputs(shape, lengths, slo, configs, max_stages)
    if phase is Phase.AGGREGATED:
        raise DataGapError(
            f"layer times of {times.model} are of prompts or of decode steps, not of both", where="phases"
        )
    missing = [config.name for config in configs if config.name not in nodes]
    if missing:
        raise DataGapError(f"no layer times are named for {', '.join(missing)}", where="capacity.layer_times.nodes")
    budgets = published_budgets(phase, assumptions.planned_slo(phase, slo), max_stages)
    question = _Question(
        times=times, shape=shape, variant=variant, phase=phase, lengths=lengths, assumptions=assumptions
    )
    rates = np.stack([_node_rates(question, config, nodes[config.name], budgets) for config in configs], axis=1)
    throughput = rates * assumptions.max_utilization_frac[phase]
    alone = np.array([config.gpu_count == 1 for config in configs], dtype=np.int16)
    return CapacityTable(
        model=shape.name,
        variant=variant,
        phase=phase,
        slo=slo,
        configs=tuple(config.name for config in configs),
        layers=shape.layers,
        throughput=throughput,
        layout=np.where(throughput > 0, alone[:, None], -1).astype(np.int16),
        layouts=(AS_MEASURED, str(Layout(tp=1, pp=1, dp=1))),
        sources=(CapacitySource.INTERPOLATED,) * len(configs),
        error_frac=(None,) * len(configs),
        memory_bytes=np.array([float(config.memory_bytes) for config in configs]),
        usable_memory_bytes=np.array([_usable_bytes(config, assumptions) for config in configs]),
        model_bytes=model_math.weight_bytes(shape, variant),
        inputs_hash=_inputs_hash(question, slo, configs, nodes, max_stages),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    times: LayerTimes
    shape: ModelShape
    variant: str
    phase: Phase
    lengths: Lengths
    assumptions: CapacityAssumptions


def _node_rates(question: _Question, config: NodeConfig, node: str, budgets: Budgets) -> Floats:
    """(S, L) tokens/s, non-increasing in layers: the best batch within latency, memory and NIC."""
    shape, assumptions, lengths = question.shape, question.assumptions, question.lengths
    prefill = question.phase is Phase.PREFILL
    tokens = _batches(question, node)
    layers = np.arange(1.0, shape.layers + 1)
    step_s = np.multiply.outer(layers, question.times.time_s(node, question.phase, tokens))
    hop_s = network.hop_time(shape=shape, config=config, dp=1, tokens=tokens, assumptions=assumptions)
    left_bytes = _usable_bytes(config, assumptions) - layers * memory.weight_bytes_per_gpu_layer(
        shape, question.variant, 1
    )
    context = lengths.mean_input_tokens if prefill else mean_context_tokens(lengths)
    kv_bytes = memory.kv_bytes_per_gpu_layer(shape, question.variant, 1, context)
    request_tokens = lengths.mean_input_tokens if prefill else 1.0
    batch = tokens / request_tokens
    sent = (PREFILL_KV_BATCHES - 1) * batch if prefill else 0.0
    rates = np.zeros((len(budgets.stage_s), shape.layers))
    for s, hops in enumerate(budgets.hops):
        nic_bytes = network.nic_bytes_per_unit(
            shape=shape,
            variant=question.variant,
            phase=question.phase,
            lengths=lengths,
            hops=bool(hops),
            layers=layers,
            assumptions=assumptions,
        )
        limit = network.nic_limit(config, nic_bytes, assumptions)[:, None]
        latency_s = step_s + (hop_s if hops else 0.0)
        rate = np.minimum(tokens / step_s, limit)
        # Little's law, the other stages taking at most what they may; where that is too much, the node idles between steps
        holds = np.maximum(left_bytes[:, None], 0.0) / (kv_bytes * layers[:, None]) - sent
        rate = np.minimum(rate, holds * request_tokens / (latency_s + budgets.rest_s[s]))
        rate = np.where((holds >= batch) & (latency_s <= budgets.stage_s[s]), rate, 0.0)
        rates[s] = rate.max(axis=1, initial=0.0)
    return np.maximum.accumulate(rates[:, ::-1], axis=1)[:, ::-1]


def _batches(question: _Question, node: str) -> Floats:
    """Tokens of the batches to choose from: whole prompts, or every number of requests."""
    largest = question.times.largest_batch(node, question.phase)
    if question.phase is Phase.DECODE:
        return np.arange(1.0, min(math.floor(largest), question.assumptions.max_batch_requests) + 1)
    prompt = _known_prompt(question.times, node, question.lengths)
    most = max(min(largest, question.assumptions.max_prefill_tokens) / prompt, 1.0)
    return np.arange(1.0, math.floor(most) + 1) * prompt


def _known_prompt(times: LayerTimes, node: str, lengths: Lengths) -> float:
    """The mean prompt, if its time is known."""
    largest = times.largest_batch(node, Phase.PREFILL)
    if lengths.mean_input_tokens > largest:
        raise DataGapError(
            f"a mean prompt of {lengths.mean_input_tokens:g} tokens exceeds the {largest:g} measured on node {node!r}",
            where=times.source,
        )
    return lengths.mean_input_tokens


def pool_capacity(
    *,
    times: LayerTimes,
    node: str,
    config: NodeConfig,
    max_layers: int,
    shape: ModelShape,
    variant: str,
    lengths: Lengths,
    kv_memory_frac: float = 1.0,
    assumptions: CapacityAssumptions = _DEFAULTS,
) -> Floats:
    """(max_layers,) requests/s of a node that holds k layers of a fixed pool and serves both phases; 0 where k do not fit.

    A layer spends t_p(in) on a request's prompt, alone in its batch, and out x t_d(B) / B on its tokens. B is what
    `kv_memory_frac` of the memory left by the weights holds at the mean context, spread over the L / k nodes that a token
    passes; at least 1, at most the largest measured. No latency bound enters, as in the method that this serves. Raises
    DataGapError where the mean prompt exceeds the measured ones.
    """
    prompt = _known_prompt(times, node, lengths)
    layers = np.arange(1.0, max_layers + 1)
    left_bytes = _usable_bytes(config, assumptions) - layers * memory.weight_bytes_per_gpu_layer(shape, variant, 1)
    kv_bytes = memory.kv_bytes_per_gpu_layer(shape, variant, 1, mean_context_tokens(lengths))
    live = np.floor(kv_memory_frac * left_bytes / (kv_bytes * layers))
    batch = np.clip(live * layers / shape.layers, 1.0, times.largest_batch(node, Phase.DECODE))
    prompt_s = times.time_s(node, Phase.PREFILL, np.array([prompt]))[0]
    decode_s = lengths.mean_output_tokens * times.time_s(node, Phase.DECODE, batch) / batch
    return np.where(live >= 1, 1.0 / (layers * (prompt_s + decode_s)), 0.0)


def _usable_bytes(config: NodeConfig, assumptions: CapacityAssumptions) -> float:
    return config.gpu_count * memory.usable_bytes(config.gpu, assumptions)


def _inputs_hash(
    question: _Question, slo: Slo, configs: Sequence[NodeConfig], nodes: Mapping[str, str], max_stages: int
) -> str:
    """What T^ depends on, and nothing else."""
    shape, variant = question.shape, question.variant
    curves = [question.times.points[nodes[config.name], question.phase] for config in configs]
    facts = {
        "version": FORMULA_VERSION,
        "kind": "layer times",
        "curves": [hashlib.sha256(x.tobytes() + seconds.tobytes()).hexdigest() for x, seconds in curves],
        "configs": [
            [config.name, config.gpu_count, config.gpu.memory_bytes, config.nic_bytes_per_s] for config in configs
        ],
        "model": [shape.name, shape.layers, shape.hidden, variant, question.phase.value],
        "bytes_per_layer": model_math.weight_bytes_per_layer(shape, variant),
        "kv_bytes_per_token": model_math.kv_bytes_per_request_per_layer(shape, variant, 1.0),
        "slo": asdict(slo),
        "lengths": [question.lengths.mean_input_tokens, question.lengths.mean_output_tokens],
        "max_stages": max_stages,
        "assumptions": question.assumptions.facts(question.phase),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
