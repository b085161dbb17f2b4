"""Launch plans: template, terms and places -> the exact command, environment and ports of every node (pure).

A chain of equal nodes, or a single one, is run by vLLM itself (`chain_commands`), any other placement by our stage executor
(`stage_commands`). Prefill and decode exchange KV with NIXL, or by our own connector where the nodes have our runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from coral_core.domain.fleet import spec_of
from coral_core.domain.launch import EngineTerms, LaunchPlan, NodePlace, Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import ServingTemplate
from coral_core.engine.chain_commands import KV_ROLES, Chain
from coral_core.engine.runnable import is_chain, runnable
from coral_core.engine.stage_commands import Stages
from coral_core.errors import InputError, NoSolutionError, unknown_name
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.search import Layout


def launch_plan(
    *,
    instance_id: str,
    template: ServingTemplate,
    layouts: Sequence[Sequence[Layout | None]],
    shape: ModelShape,
    terms: EngineTerms,
    assumptions: CapacityAssumptions,
    places: Sequence[NodePlace],
    throughputs: Sequence[float] | None = None,
) -> LaunchPlan:
    """How to start one instance of `template` on `places`, which are in the order of `spec_of(template).slots`.

    `layouts` are those inside the nodes, stage by stage in the order of the stage's nodes; None where not known.
    `throughputs` is each place's share of its stage's work, in one unit (what is left without a node follows from them);
    without, nodes of one configuration share alike, and stages are equally strong.
    Raises NoSolutionError where no runtime can run the template, InputError for terms or places that do not fit it.
    """
    model = terms.models.get((template.model, template.variant))
    if model is None:
        known = [f"{name} {variant}" for name, variant in terms.models]
        raise unknown_name(
            "model in the engine's terms",
            f"{template.model} {template.variant}",
            known,
            where="the engine file's `models`",
        )
    by_connector = Runtime.CORAL in terms.runtimes and template.phase in KV_ROLES
    can = runnable(template, layouts, shape, runtimes=[Runtime.CORAL] if by_connector else terms.runtimes)
    if can.runtime is None:
        why = "; ".join(f"{runtime}: {', '.join(against)}" for runtime, against in can.reasons.items())
        raise NoSolutionError(
            f"cannot be run: {why}",
            where=f"template {template.template_id}",
            fix="`runtimes` of the engine's terms says what the nodes have, that of a scenario plans with it (docs/launch.md)",
        )
    _check_places(template, places)
    nodes = [layout for row in layouts for layout in row if layout is not None]
    given = Chain if is_chain(template, layouts, shape) else Stages
    return given(
        instance_id=instance_id,
        template=template,
        runtime=can.runtime,
        layouts=nodes,
        shape=shape,
        terms=terms,
        model=model,
        assumptions=assumptions,
        places=places,
        throughputs=throughputs,
    ).plan()


def _check_places(template: ServingTemplate, places: Sequence[NodePlace]) -> None:
    """Raise InputError unless there is one place per node of the template, of its configuration, with ports of its own."""
    where = f"template {template.template_id}"
    wanted = [slot.config for slot in spec_of(template).slots]
    given = [place.config for place in places]
    if wanted != given:
        raise InputError(f"its nodes are {', '.join(wanted)}, the places are {', '.join(given) or 'none'}", where=where)
    names = [place.node for place in places]
    if len(set(names)) < len(names):
        raise InputError(f"a node is given twice: {', '.join(names)}", where=where)
    for place in places:
        if place.first_port < 1 or place.ports < 0 or place.first_port + place.ports > 65536:
            raise InputError(f"ports {place.first_port} to {place.first_port + place.ports - 1} are none", where=where)
    ordered = sorted(places, key=lambda place: (place.host, place.first_port))
    for one, other in pairwise(ordered):
        if one.host == other.host and one.first_port + one.ports > other.first_port:
            raise InputError(f"the ports of {one.node} and {other.node} overlap on {one.host}", where=where)
