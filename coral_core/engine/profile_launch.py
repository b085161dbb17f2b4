"""The launch of the program that measures steps on a node: the flags are those of serving, less where it answers and its layout.

So a profile is of the engine as it will serve, and its key can say which flags that was. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from coral_core.domain.launch import Device, EngineTerms, LaunchPlan, NodePlace, Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Phase, Slo
from coral_core.engine.launch import launch_plan
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.search import Layout

PROGRAM: Final = ("-m", "coral_core.engine.plugin.profile_server")
_OF_SERVING: Final = (
    "--host",
    "--port",
    "--served-model-name",
    "--shutdown-timeout",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--distributed-executor-backend",
)
"""Flags with a value that measuring does not take over."""
_ALONE: Final = ("--disable-uvicorn-access-log",)
_NODE: Final = "0"


def profile_launch(
    *,
    instance_id: str,
    place: NodePlace,
    shape: ModelShape,
    variant: str,
    terms: EngineTerms,
    assumptions: CapacityAssumptions | None = None,
) -> LaunchPlan:
    """What a node runs that measures; `url` of the plan is where it answers. Raises as `launch_plan` does."""
    plan = launch_plan(
        instance_id=instance_id,
        template=_whole_model(shape, variant, place.config),
        layouts=[[Layout(tp=1, pp=1, dp=1)]],
        shape=shape,
        terms=replace(terms, runtimes=(Runtime.VLLM,)),
        assumptions=assumptions or CapacityAssumptions(),
        places=[replace(place, node=_NODE)],
    )
    (node,) = plan.nodes
    path, *flags = node.argv[node.argv.index("serve") + 1 :]
    # A CPU's engine computes in a process of its own; without this flag the measured one would not.
    backend = ("--distributed-executor-backend", "mp") if terms.device is Device.CPU else ()
    where = ("--host", place.host, "--port", str(place.first_port))
    launch = replace(node, argv=(*PROGRAM, *where, path, *_kept(flags), *backend))
    return replace(plan, nodes=(launch,))


def profile_flags(
    shape: ModelShape, variant: str, config: str, terms: EngineTerms, assumptions: CapacityAssumptions | None = None
) -> tuple[str, ...]:
    """Flags and variables of the engine that its times may depend on: what a profile's key holds, the same on every node."""
    anywhere = NodePlace(node=_NODE, config=config, host="127.0.0.1", first_port=8000, ports=1, cpus=())
    plan = profile_launch(
        instance_id="key", place=anywhere, shape=shape, variant=variant, terms=terms, assumptions=assumptions
    )
    argv = plan.nodes[0].argv
    model = terms.models[shape.name, variant]
    variables = [f"{name}={value}" for name, value in sorted(model.env.items())]
    return (*argv[argv.index(model.path) + 1 :], *variables)


def _kept(flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for flag in flags:
        if skip:
            skip = False
        elif flag in _OF_SERVING:
            skip = True
        elif flag not in _ALONE:
            kept.append(flag)
    return kept


def _whole_model(shape: ModelShape, variant: str, config: str) -> ServingTemplate:
    """All layers on one node, which is all that a launch plan asks of a template."""
    return ServingTemplate(
        template_id="profile",
        model=shape.name,
        variant=variant,
        phase=Phase.AGGREGATED,
        slo=Slo(ttft_s=1.0, tpot_s=1.0),
        placement=Placement(stages=(Stage(layers=shape.layers, nodes=(config,)),)),
        throughput_tokens_per_s=None,
        throughput_requests_per_s=1.0,
        method="profile",
        source=CapacitySource.ESTIMATED,
    )
