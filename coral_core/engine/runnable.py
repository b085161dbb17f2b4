"""Which runtimes can run a template as its capacity assumed it, and why others cannot (DESIGN 8).

What vLLM 0.32 can do by itself: tensor, pipeline and data parallelism inside a node; a pipeline over nodes with one node
per stage, all of them with the same number of GPUs and the same layout, without data parallelism; KV from prefill to
decode with NIXL, between engines that are no pipelines. Replicas of a mixture of experts share out their experts and step
together, which is not the independent replicas that capacities count.

Our own runtime adds a stage executor (any number of nodes per stage, each one replica whose GPUs share every layer) and a KV
connector, which also joins vLLM's own pipelines of equal nodes. Prefill and decode of a model exchange KV in one of
the two ways only: where our runtime is used, all of them by our connector.
Source: vLLM's source, release 0.32.0, and runs of its CPU build, 2026-11.

All is decided on arrays, for as many templates at once as there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.launch import Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import ServingTemplate
from coral_core.domain.workload import Phase
from coral_core.perf.search import Layout

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Obstacle(IntFlag):
    """What keeps a runtime from running a template."""

    LAYOUT_UNKNOWN = 1
    HEADS = 2
    NODES_IN_STAGE = 4
    GPUS_DIFFER = 8
    LAYOUTS_DIFFER = 16
    REPLICAS_IN_PIPELINE = 32
    REPLICAS_OF_EXPERTS = 64
    KV_OF_PIPELINE = 128
    PIPELINE_IN_UNLIKE_NODES = 256
    REPLICAS_IN_NODE = 512
    WINDOWS = 1024
    PARTS_WITHOUT_LAYERS = 2048


_TEXTS: Final = {
    Obstacle.LAYOUT_UNKNOWN: "the library does not say how its nodes are laid out inside; build it again",
    Obstacle.HEADS: "the model's attention heads cannot be divided over the GPUs of a tensor-parallel group",
    Obstacle.NODES_IN_STAGE: "a stage has several nodes",
    Obstacle.GPUS_DIFFER: "its stages' nodes have different numbers of GPUs",
    Obstacle.LAYOUTS_DIFFER: "its stages' nodes split a layer over different numbers of GPUs",
    Obstacle.REPLICAS_IN_PIPELINE: "a node of its pipeline holds several replicas",
    Obstacle.REPLICAS_OF_EXPERTS: "a node holds several replicas of a mixture of experts",
    Obstacle.KV_OF_PIPELINE: "a pipeline passes or takes KV between prefill and decode",
    Obstacle.PIPELINE_IN_UNLIKE_NODES: "a node is a pipeline inside, and its stages' nodes are several or unlike",
    Obstacle.REPLICAS_IN_NODE: "a node holds several replicas",
    Obstacle.WINDOWS: "the model has layers with a sliding window, whose KV is not kept as capacities assume",
    Obstacle.PARTS_WITHOUT_LAYERS: "a node has fewer layers than parts of its inner pipeline",
}
_ALWAYS: Final = Obstacle.LAYOUT_UNKNOWN | Obstacle.HEADS | Obstacle.PARTS_WITHOUT_LAYERS
_OF_RUNTIME: Final = {
    Runtime.VLLM: _ALWAYS
    | Obstacle.NODES_IN_STAGE
    | Obstacle.GPUS_DIFFER
    | Obstacle.LAYOUTS_DIFFER
    | Obstacle.REPLICAS_IN_PIPELINE
    | Obstacle.REPLICAS_OF_EXPERTS
    | Obstacle.KV_OF_PIPELINE,
    Runtime.CORAL: _ALWAYS | Obstacle.PIPELINE_IN_UNLIKE_NODES | Obstacle.REPLICAS_IN_NODE | Obstacle.WINDOWS,
}
"""Which obstacles count for a runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """n templates: what decides about their runtimes.

    Template i has the stages stage_start[i] up to stage_start[i+1], stage s the nodes node_start[s] up to
    node_start[s+1]; both start at 0. `layers` are per stage, `tp`, `pp` and `dp` per node, 0 where not known. `passes_kv` (n,):
    prefill or decode; `experts` (n,): a mixture of experts; `heads` and `kv_heads` (n,), the latter 0 where KV is not split (MLA);
    `windows` (n,): some layers attend to a sliding window.
    """

    stage_start: Ints
    node_start: Ints
    layers: Ints
    tp: Ints
    pp: Ints
    dp: Ints
    passes_kv: Bools
    experts: Bools
    heads: Ints
    kv_heads: Ints
    windows: Bools

    def __len__(self) -> int:
        return len(self.passes_kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What of a model decides about runtimes; `kv_heads` is 0 where KV is not split over GPUs (MLA)."""

    experts: bool
    heads: int
    kv_heads: int
    windows: bool = False

    @classmethod
    def of(cls, shape: ModelShape) -> ModelFacts:
        """Those of a shape."""
        kv_heads = shape.kv_heads if shape.mla is None else 0
        windows = shape.sliding_window is not None
        return cls(experts=shape.moe is not None, heads=shape.heads, kv_heads=kv_heads, windows=windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """The first runtime that can run a template (None: there is none), and why each other one cannot."""

    runtime: Runtime | None
    reasons: Mapping[Runtime, tuple[str, ...]]


def obstacles(laid: LaidOut) -> NDArray[np.int64]:
    """What stands in the way of each template, as bits of `Obstacle`; (n,)."""
    stages = np.diff(laid.stage_start)
    nodes_of_stage = np.diff(laid.node_start)
    first_node = laid.node_start[laid.stage_start]
    nodes = np.diff(first_node)
    found = np.zeros(len(laid), dtype=np.int64)
    if not len(laid):
        return found

    def over_nodes(ufunc: np.ufunc, values: NDArray[np.generic]) -> NDArray[np.int64]:
        result: NDArray[np.int64] = ufunc.reduceat(values, first_node[:-1])
        return result

    def differ(values: Ints) -> Bools:
        different: Bools = over_nodes(np.minimum, values) != over_nodes(np.maximum, values)
        return different

    tp = np.maximum(laid.tp, 1)
    heads, kv_heads = np.repeat(laid.heads, nodes), np.repeat(laid.kv_heads, nodes)
    splits = (heads % tp == 0) & ((kv_heads % tp == 0) | (tp % np.maximum(kv_heads, 1) == 0))
    replicas = over_nodes(np.maximum, laid.dp) > 1
    ranks = over_nodes(np.add, laid.pp)
    several: Bools = np.maximum.reduceat(nodes_of_stage, laid.stage_start[:-1]) > 1
    gpus_differ, tp_differs = differ(laid.tp * laid.pp * laid.dp), differ(laid.tp)
    for obstacle, there in (
        (Obstacle.LAYOUT_UNKNOWN, over_nodes(np.minimum, laid.tp) < 1),
        (Obstacle.HEADS, over_nodes(np.minimum, splits.astype(np.int64)) < 1),
        (Obstacle.NODES_IN_STAGE, several),
        (Obstacle.GPUS_DIFFER, gpus_differ),
        (Obstacle.LAYOUTS_DIFFER, tp_differs),
        (Obstacle.REPLICAS_IN_PIPELINE, replicas & (stages > 1)),
        (Obstacle.REPLICAS_OF_EXPERTS, replicas & laid.experts),
        (Obstacle.KV_OF_PIPELINE, laid.passes_kv & (ranks > 1)),
        (
            Obstacle.PIPELINE_IN_UNLIKE_NODES,
            (over_nodes(np.maximum, laid.pp) > 1) & (several | gpus_differ | tp_differs),
        ),
        (Obstacle.REPLICAS_IN_NODE, replicas),
        (Obstacle.WINDOWS, laid.windows),
        (
            Obstacle.PARTS_WITHOUT_LAYERS,
            over_nodes(np.maximum, (laid.pp > np.repeat(laid.layers, nodes_of_stage)).astype(np.int64)) > 0,
        ),
    ):
        found |= np.where(there, int(obstacle), 0)
    return found


def runs_on(found: NDArray[np.int64], runtime: Runtime) -> Bools:
    """Which templates a runtime can run, by their `obstacles`."""
    result: Bools = (found & int(_OF_RUNTIME[runtime])) == 0
    return result


def reasons(found: int, runtime: Runtime) -> tuple[str, ...]:
    """Why a runtime cannot run a template; empty where it can."""
    counted = Obstacle(found) & _OF_RUNTIME[runtime]
    return tuple(text for obstacle, text in _TEXTS.items() if obstacle in counted)


def runnable(
    template: ServingTemplate,
    layouts: Sequence[Sequence[Layout | None]],
    shape: ModelShape,
    *,
    runtimes: Sequence[Runtime] = tuple(Runtime),
) -> Runnable:
    """Which of `runtimes`, tried in that order, can run a template.

    `layouts` are those inside the nodes, stage by stage in the order of the stage's nodes; None where not known.
    """
    found = int(obstacles(_laid_out(template, layouts, shape))[0])
    why = {runtime: reasons(found, runtime) for runtime in runtimes}
    return Runnable(
        runtime=next((runtime for runtime, against in why.items() if not against), None),
        reasons={runtime: against for runtime, against in why.items() if against},
    )


def is_chain(template: ServingTemplate, layouts: Sequence[Sequence[Layout | None]], shape: ModelShape) -> bool:
    """Whether vLLM's own executor can run a template, KV transfers apart."""
    found = Obstacle(int(obstacles(_laid_out(template, layouts, shape))[0]))
    return not found & _OF_RUNTIME[Runtime.VLLM] & ~Obstacle.KV_OF_PIPELINE


def _laid_out(template: ServingTemplate, layouts: Sequence[Sequence[Layout | None]], shape: ModelShape) -> LaidOut:
    stages, facts = template.placement.stages, ModelFacts.of(shape)
    flat = [layout for row in layouts for layout in row]
    sizes = [len(stage.nodes) for stage in stages]
    if [len(row) for row in layouts] != sizes:
        raise ValueError(f"template {template.template_id}: layouts are not one per node")
    known = [layout or Layout(tp=0, pp=0, dp=0) for layout in flat]
    return LaidOut(
        stage_start=np.array([0, len(stages)]),
        node_start=np.concatenate(([0], np.cumsum(sizes))),
        layers=np.array([stage.layers for stage in stages]),
        tp=np.array([layout.tp for layout in known]),
        pp=np.array([layout.pp for layout in known]),
        dp=np.array([layout.dp for layout in known]),
        passes_kv=np.array([template.phase is not Phase.AGGREGATED]),
        experts=np.array([facts.experts]),
        heads=np.array([facts.heads]),
        kv_heads=np.array([facts.kv_heads]),
        windows=np.array([facts.windows]),
    )
