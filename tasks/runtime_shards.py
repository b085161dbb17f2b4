"""Shards of the placements that a runtime can run: the same questions, limited to what it knows.

A combination's best placement is often one that a runtime cannot run while another, a little slower, it can. vLLM by itself
runs a node with any layout (prefill and decode without a pipeline inside; a mixture of experts as one replica) and, for
aggregated templates, chains of nodes that have one number of GPUs and one layout without replicas: one shard for each
such number and tensor-parallel size. Our own runtime takes any placement whose nodes each are one replica that
shares every layer, of models without sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.launch import Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Phase
from coral_core.perf import capacity_table
from coral_core.perf.budgets import budget_table
from coral_core.perf.search import LayoutLimits
from tasks.solve_shard import ShardSpec

if TYPE_CHECKING:
    from tasks.library import BuildSpec, ModelBuild

_WHOLE_NODE = LayoutLimits(whole_node=True)


def runtime_shards(spec: BuildSpec) -> list[ShardSpec]:
    """The shards made for `spec.runtimes`; none where layer times were measured, which are of one layout."""
    if spec.measured is not None:
        return []
    shards: list[ShardSpec] = []
    for model in spec.models:
        for phase in model.phases:
            if Runtime.VLLM in spec.runtimes:
                shards += _of_vllm(spec, model, phase)
            if Runtime.CORAL in spec.runtimes and model.shape.sliding_window is None:
                shards.append(_of_coral(spec, model, phase))
    return shards


def _of_vllm(spec: BuildSpec, model: ModelBuild, phase: Phase) -> Iterator[ShardSpec]:
    question = spec.question(model, phase)
    limits = _single_node_limits(model.shape, phase)
    yield _shard(spec, "vllm", capacity_table(max_stages=1, limits=limits, **question), n_max=1)
    if phase is not Phase.AGGREGATED or spec.n_max < 2:
        return
    for gpus in sorted({config.gpu_count for config in spec.configs}):
        configs = tuple(config for config in spec.configs if config.gpu_count == gpus)
        for tp in (size for size in range(1, gpus + 1) if gpus % size == 0):
            limits = LayoutLimits(tp=tp, max_dp=1)
            table = capacity_table(max_stages=spec.n_max, limits=limits, **{**question, "configs": configs})
            if table.throughput.any():
                yield replace(_shard(spec, f"vllm-tp{tp}-of-{gpus}", table, n_max=spec.n_max), chain=gpus // tp)


def _of_coral(spec: BuildSpec, model: ModelBuild, phase: Phase) -> ShardSpec:
    question = spec.question(model, phase)
    table = capacity_table(max_stages=spec.n_max, limits=_WHOLE_NODE, **question)
    if spec.method == "lattice-free":
        table = replace(table, budgets=budget_table(limits=_WHOLE_NODE, **question))
    return _shard(spec, "coral", table, n_max=spec.n_max)


def _single_node_limits(shape: ModelShape, phase: Phase) -> LayoutLimits:
    return LayoutLimits(
        max_pp=None if phase is Phase.AGGREGATED else 1,
        max_dp=None if shape.moe is None else 1,
    )


def _shard(spec: BuildSpec, made_for: str, table: CapacityTable, *, n_max: int) -> ShardSpec:
    free = spec.method == "lattice-free" and made_for == "coral"
    return ShardSpec(
        library=spec.library,
        table=table,
        n_max=n_max,
        rho=spec.rho,
        method="lattice-free" if free else "lattice",
        ilp_time_limit_s=spec.ilp_time_limit_s,
        keep_all=spec.keep_all,
        made_for=made_for,
    )
