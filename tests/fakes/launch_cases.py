"""Chains of nodes to launch: layers and layout of each, on hosts of their own."""

from __future__ import annotations

from dataclasses import replace

from coral_core.catalog.models import package_models
from coral_core.domain.launch import Device, EngineTerms, ModelTerms, NodePlace
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Phase, Slo
from coral_core.engine.launch import launch_plan
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.search import Layout

MODEL = "qwen3-32b"


def shape(layers, **changes):
    return replace(package_models()[MODEL], layers=layers, **changes)


def terms(device=Device.CUDA, model=None, **changes):
    return EngineTerms(device=device, models={(MODEL, "bf16"): model or ModelTerms(path="/models/q")}, **changes)


def template(phase, stages):
    """A template of stages (layers, node names)."""
    aggregated = phase is Phase.AGGREGATED
    return ServingTemplate(
        template_id="t",
        model=MODEL,
        variant="bf16",
        phase=phase,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        placement=Placement(stages=tuple(Stage(layers=layers, nodes=tuple(nodes)) for layers, nodes in stages)),
        throughput_tokens_per_s=None if aggregated else 100.0,
        throughput_requests_per_s=1.0 if aggregated else None,
        method="lattice",
        source=CapacitySource.ESTIMATED,
    )


def places(configs, **changes):
    return [
        replace(
            NodePlace(
                node=f"n{i}", config=config, host=f"10.0.0.{i}", first_port=8000, ports=16, cpus=(2 * i, 2 * i + 1)
            ),
            **changes,
        )
        for i, config in enumerate(configs)
    ]


def plan_of(phase, chain, **changes):
    """The launch plan of a chain of nodes, (layers, layout) each."""
    given = {
        "instance_id": "i-1",
        "template": template(phase, [(layers, [f"c{i}"]) for i, (layers, _) in enumerate(chain)]),
        "layouts": [[layout] for _, layout in chain],
        "shape": shape(sum(layers for layers, _ in chain)),
        "terms": terms(),
        "assumptions": CapacityAssumptions(),
        "places": places([f"c{i}" for i in range(len(chain))]),
    }
    return launch_plan(**{**given, **changes})


ONE: Layout = Layout(tp=1, pp=1, dp=1)
