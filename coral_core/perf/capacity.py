"""Stage capacities T^ of node configurations for one (model, variant, phase, SLO): DESIGN 3.1.

Units: tokens/s for prefill (prompt tokens) and decode (generated tokens), requests/s for aggregated. Times come from a
measured profile where there is one; all others are analytic (`CapacitySource.ESTIMATED`), with the error bars of the ledger,
None for GPUs it knows nothing of.

Why a stage of S may take l/S although requests wait for one another: a pipeline computes in steps, S of them under way, each
split over the nodes of a stage by their throughput and each node waiting for all of its part. Then every part takes at most
b = l/S, a stage is through with a step when the next one comes, and a round takes at most S b = l: nobody waits for an iteration
that it is no part of. (`coral_core.sim.steps` is that; tests/oracles/test_sim_steps.py loads replicas of up to four stages.)
Nodes that compute whatever has come instead would make a request wait for half an iteration at each stage, 3/2 S b in all, and
split steps into smaller batches: there b <= 2 l / (3 S), and even that only for stages of like nodes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain import model_math
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import Gpu, NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import DataGapError, InputError
from coral_core.perf import memory
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.errors import capacity_error_fracs, pessimistic_factor
from coral_core.perf.factors import FULL_BITS, Factors, load_factors
from coral_core.perf.measured import measured_source
from coral_core.perf.profile import Profile
from coral_core.perf.search import (
    ANY_LAYOUT,
    Best,
    Budgets,
    Layout,
    LayoutLimits,
    Question,
    ReplicaSteps,
    best_batch,
    layouts,
    replica_steps,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORMULA_VERSION = 3
"""Raise when a formula of this package changes: capacities with other versions are not the same inputs."""

NO_PROFILES: Final[Mapping[str, Profile]] = {}

_DEFAULTS = CapacityAssumptions()


def capacity_table(
    *,
    shape: ModelShape,
    variant: str,
    phase: Phase,
    slo: Slo,
    lengths: Lengths,
    configs: Sequence[NodeConfig],
    max_stages: int,
    assumptions: CapacityAssumptions = _DEFAULTS,
    factors: Factors | None = None,
    limits: LayoutLimits = ANY_LAYOUT,
    profiles: Mapping[str, Profile] = NO_PROFILES,
) -> CapacityTable:
    """T^ of every configuration for S = 1..max_stages and j = 1..L, at the published split's budget, a 1/S of the planned SLO.

    `throughput` is (S, C, L), non-increasing in j (a node that may hold more layers at a throughput may hold fewer;
    the layout is then that of the larger j). Prefill's budget is the TTFT, decode's the TPOT, aggregated has both.
    Only the layouts within `limits` count. Configurations with measured `profiles` of the phase take their times from them.

    Raises InputError for values that make no sense and DataGapError where a GPU's efficiency is not known, or where
    estimates are not allowed and a configuration has no profile.
    """
    check_inputs(shape, lengths, slo, configs, max_stages)
    question = estimate_question(
        shape,
        variant,
        phase,
        lengths,
        configs,
        assumptions=assumptions,
        factors=factors,
        limits=limits,
        profiles=profiles,
    )
    budgets = published_budgets(phase, assumptions.planned_slo(phase, slo), max_stages)
    names: dict[str, int] = {}
    throughput = np.zeros((max_stages, len(configs), shape.layers))
    layout = np.full(throughput.shape, -1, dtype=np.int16)
    tabulated: dict[tuple[str, int], ReplicaSteps] = {}
    for index, config in enumerate(configs):
        node = node_capacity(question, config, budgets, tabulated)
        throughput[:, index] = node.rate * assumptions.max_utilization_frac[phase]
        codes = np.array([names.setdefault(str(item), len(names)) for item in node.layouts], dtype=np.int16)
        layout[:, index] = np.where(node.rate > 0, codes[node.layout], -1)
    return CapacityTable(
        model=shape.name,
        variant=variant,
        phase=phase,
        slo=slo,
        configs=tuple(config.name for config in configs),
        layers=shape.layers,
        throughput=throughput,
        layout=layout,
        layouts=tuple(names),
        sources=tuple(_source(question, config) for config in configs),
        error_frac=_error_fracs(question, configs),
        memory_bytes=np.array([float(config.memory_bytes) for config in configs]),
        usable_memory_bytes=np.array(
            [config.gpu_count * memory.usable_bytes(config.gpu, assumptions) for config in configs]
        ),
        model_bytes=model_math.weight_bytes(shape, variant),
        inputs_hash=_inputs_hash(question, slo, configs, max_stages),
    )


def _source(question: Question, config: NodeConfig) -> CapacitySource:
    profile = question.profile_of(config)
    if profile is None:
        return CapacitySource.ESTIMATED
    return measured_source(profile, question.phase, question.lengths)


def _error_fracs(question: Question, configs: Sequence[NodeConfig]) -> tuple[float | None, ...]:
    """A profile's own variation, else the ledger's error of the GPU's estimates."""
    estimated = capacity_error_fracs([config.gpu.name for config in configs], question.phase)
    profiles = [question.profile_of(config) for config in configs]
    return tuple(
        error if profile is None else profile.error_frac for profile, error in zip(profiles, estimated, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """T^ of one node before utilisation, (S, L), and how it comes about.

    `layout` indexes `layouts`, `batch` is per replica, `layers` the number of layers j' >= j of the operating point
    that the suffix maximum took. All three are meaningless where `rate` is 0.
    """

    rate: Floats
    layout: Ints
    batch: Ints
    layers: Ints
    layouts: tuple[Layout, ...]


def node_capacity(
    question: Question,
    config: NodeConfig,
    budgets: Budgets,
    tabulated: dict[tuple[str, int], ReplicaSteps] | None = None,
) -> NodeCapacity:
    """The best of all internal layouts, non-increasing in layers; 0 where the GPU cannot run the variant.

    `tabulated` keeps what nodes of one GPU share.
    """
    known = {} if tabulated is None else tabulated
    candidates = layouts(question, config)
    if not candidates:
        return _nothing(len(budgets.stage_s), question.shape.layers)
    results: list[Best] = []
    for layout in candidates:
        key = (config.gpu.name if question.profile_of(config) is None else config.name, layout.tp)
        if key not in known:
            known[key] = replica_steps(question, config, layout.tp)
        results.append(best_batch(question, config, layout, known[key], budgets))
    rates = np.stack([result.rate for result in results]) * runs_variant(question.shape, question.variant, config.gpu)
    chosen = rates.argmax(axis=0)
    rate = np.take_along_axis(rates, chosen[None], axis=0)[0]
    batch = np.take_along_axis(np.stack([result.batch for result in results]), chosen[None], axis=0)[0]
    source = _suffix_argmax(rate)
    return NodeCapacity(
        rate=np.take_along_axis(rate, source, axis=1),
        layout=np.take_along_axis(chosen, source, axis=1),
        batch=np.take_along_axis(batch, source, axis=1),
        layers=source + 1,
        layouts=tuple(candidates),
    )


def _nothing(stages: int, layers: int) -> NodeCapacity:
    """A node without a layout that counts."""
    none = np.zeros((stages, layers), dtype=np.int64)
    only = Layout(tp=1, pp=1, dp=1)
    return NodeCapacity(rate=none.astype(np.float64), layout=none, batch=none, layers=none, layouts=(only,))


def runs_variant(shape: ModelShape, variant: str, gpu: Gpu) -> bool:
    """Whether kernels exist for the variant on this GPU, in its own dtype or widened to 16 bit as it is read.

    Those that widen 8-bit floats and MXFP4 to bf16 are there for GPUs that have bf16 (Ampere and later); of older ones
    only some run fp8 that way (Turing, from compute capability 7.5), and none MXFP4: they are left out. 4-bit integers
    are widened to fp16, which all have. Source: vLLM's documentation of quantisation, supported hardware, 2026-11.
    """
    chosen = model_math.variant_of(shape, variant)
    parts = [(chosen.weight_bits, chosen.compute_dtype)]
    if shape.moe is not None:
        parts.append((chosen.expert_bits, chosen.expert_compute_dtype))
    known = gpu.compute_flops_per_s
    return all(bits >= FULL_BITS or dtype in known or "bf16" in known for bits, dtype in parts)


def estimate_question(
    shape: ModelShape,
    variant: str,
    phase: Phase,
    lengths: Lengths,
    configs: Sequence[NodeConfig],
    *,
    assumptions: CapacityAssumptions,
    factors: Factors | None,
    limits: LayoutLimits = ANY_LAYOUT,
    profiles: Mapping[str, Profile] = NO_PROFILES,
) -> Question:
    """What is asked of measured profiles and estimates, with the shipped factors where none are given.

    Raises DataGapError where estimates are not allowed, and a configuration has no measured profile.
    """
    question = Question(
        shape=shape,
        variant=variant,
        phase=phase,
        lengths=lengths,
        assumptions=assumptions,
        factors=load_factors() if factors is None else factors,
        limits=limits,
        profiles=profiles,
    )
    missing = [config.name for config in configs if question.profile_of(config) is None]
    if missing and not assumptions.allow_estimates:
        raise DataGapError(
            f"no measured profile of model {shape.name} on {', '.join(missing)}",
            fix="allow estimates, or profile these configurations",
        )
    return question


def published_budgets(phase: Phase, slo: Slo, max_stages: int) -> Budgets:
    """Every one of S stages gets SLO/S."""
    stages = np.arange(1.0, max_stages + 1)
    total = slo.ttft_s if phase is Phase.PREFILL else slo.tpot_s
    first = slo.ttft_s / stages if phase is Phase.AGGREGATED else np.full(max_stages, np.inf)
    return Budgets(stage_s=total / stages, rest_s=total * (stages - 1) / stages, first_token_s=first, hops=stages > 1)


def _suffix_argmax(rate: Floats) -> Ints:
    """For each j the index of the largest rate at j or beyond, the nearest one where several are equal."""
    backwards = rate[:, ::-1]
    running = np.maximum.accumulate(backwards, axis=1)
    positions = np.where(backwards >= running, np.arange(rate.shape[1]), 0)
    nearest = np.maximum.accumulate(positions, axis=1)
    source: Ints = rate.shape[1] - 1 - nearest[:, ::-1]
    return source


def check_inputs(shape: ModelShape, lengths: Lengths, slo: Slo, configs: Sequence[NodeConfig], max_stages: int) -> None:
    """Raise InputError for a value that makes no sense; names its place."""
    positive = {
        "slo.ttft_s": slo.ttft_s,
        "slo.tpot_s": slo.tpot_s,
        "lengths.mean_input_tokens": lengths.mean_input_tokens,
        "lengths.mean_output_tokens": lengths.mean_output_tokens,
        "max_stages": max_stages,
        "shape.layers": shape.layers,
    }
    for config in configs:
        where = f"configs[{config.name}]"
        positive[f"{where}.gpu_count"] = config.gpu_count
        positive[f"{where}.nic_bytes_per_s"] = config.nic_bytes_per_s
        positive[f"{where}.gpu.memory_bytes"] = config.gpu.memory_bytes
        positive[f"{where}.gpu.memory_bandwidth_bytes_per_s"] = config.gpu.memory_bandwidth_bytes_per_s
        positive[f"{where}.gpu.link_bytes_per_s"] = config.gpu.link_bytes_per_s
        for dtype, peak in config.gpu.compute_flops_per_s.items():
            positive[f"{where}.gpu.compute_flops_per_s[{dtype}]"] = peak
    for where, value in positive.items():
        if not math.isfinite(value) or value <= 0:
            raise InputError(f"{value!r} is not a positive, finite number", where=where)
    context = lengths.mean_input_tokens + lengths.mean_output_tokens
    if context > shape.max_context_tokens:
        raise InputError(
            f"mean input and output are {context:g} tokens, model {shape.name} takes {shape.max_context_tokens}",
            where="lengths",
        )
    names = [config.name for config in configs]
    if not names:
        raise InputError("no node configuration is given", where="configs")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"configurations given twice: {', '.join(twice)}", where="configs")


def _inputs_hash(question: Question, slo: Slo, configs: Sequence[NodeConfig], max_stages: int) -> str:
    """What T^ depends on, and nothing else: no prices, sources, dates or published figures."""
    shape = asdict(question.shape)
    for key in ("source", "as_of", "published_params", "default_variant", "variants"):
        del shape[key]
    by_name = {config.gpu.name: config.gpu for config in configs}
    gpus = set(by_name)
    facts: dict[str, object] = {
        "version": FORMULA_VERSION,
        "shape": shape,
        "variant": asdict(model_math.variant_of(question.shape, question.variant)),
        "phase": question.phase.value,
        "slo": asdict(slo),
        "lengths": [question.lengths.mean_input_tokens, question.lengths.mean_output_tokens],
        "max_stages": max_stages,
        "configs": [
            [
                config.name,
                config.gpu_count,
                config.nic_bytes_per_s,
                config.gpu.name,
                config.gpu.memory_bytes,
                config.gpu.memory_bandwidth_bytes_per_s,
                sorted(config.gpu.compute_flops_per_s.items()),
                config.gpu.link_bytes_per_s,
            ]
            for config in configs
        ],
        "efficiency": sorted([*key, asdict(row)] for key, row in question.factors.efficiency.items() if key[0] in gpus),
        "experts": sorted([*key, asdict(row)] for key, row in question.factors.experts.items() if key[0] in gpus),
        "all_reduce": sorted([*key, asdict(row)] for key, row in question.factors.all_reduce.items() if key[0] in gpus),
        "errors": _error_fracs(question, configs),
        "assumptions": question.assumptions.facts(question.phase),
    }
    idle = [name for name, gpu in by_name.items() if not runs_variant(question.shape, question.variant, gpu)]
    measured = {config.name: profile.content_hash for config in configs if (profile := question.profile_of(config))}
    if measured:
        facts["profiles"] = measured
    if question.assumptions.pessimistic:
        facts["stretched"] = {name: pessimistic_factor(name, question.phase) for name in sorted(gpus)}
    if question.limits != ANY_LAYOUT:
        facts["layouts"] = asdict(question.limits)
    if idle:
        facts["gpus_without_the_variant"] = sorted(idle)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
