"""`coral plan launch`: the commands that start an instance of a recorded plan, for starting it by hand."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter, validators

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_text
from coral_core.cli.plan import At, Fleet, recorded_plan
from coral_core.cli.work import open_configured_store
from coral_core.config.settings import load_settings
from coral_core.errors import InputError, unknown_name

if TYPE_CHECKING:
    from coral_core.domain.launch import LaunchPlan, NodePlace

PORTS_EACH = 16
"""Ports of each node, one after another where several are on one host."""
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")


def launch(
    *,
    engine: Annotated[Path, Parameter(help="The engine's terms (engine.yaml): device, models and their paths.")],
    template: Annotated[str | None, Parameter(help="Whose instance; may be left out where the plan has one.")] = None,
    host: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", help="Address of each node, in the order of the template's stages; one address is for all."
        ),
    ] = ("127.0.0.1",),
    first_port: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65535), help="Of each host.")] = 8000,
    at: At = "latest",
    fleet: Fleet = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the command, environment and ports of every node of an instance, in start order. Nothing is started."""
    from coral_core.config.engine import load_engine_file
    from coral_core.config.resolve import resolve_scenario
    from coral_core.config.scenario import Scenario
    from coral_core.domain.workload import Phase
    from coral_core.serving.control.held import AskPlan
    from tasks.coordinator import launcher

    opened = open_configured_store(store)
    record = recorded_plan(opened, fleet, at)
    item = _instance(record.plan["instances"], template)
    settings = load_settings()
    resolved = resolve_scenario(Scenario.model_validate(record.decision["scenario"]), user_models=settings.models)
    name = item["template"].partition("@")[0]
    question = AskPlan(
        instance_id=f"{name}-by-hand",
        template_id=name,
        model=item["model"],
        phase=Phase(item["phase"]),
        places=_places(item["stages"], host, first_port),
    )
    plan = launcher(opened, resolved, load_engine_file(engine))(question)
    if as_json:
        print_json(_document(plan))
    else:
        _show(plan, settings.engine_python)


def _instance(instances: Sequence[Mapping[str, Any]], template: str | None) -> Mapping[str, Any]:
    names = list(dict.fromkeys(item["template"] for item in instances))
    if template is None and len(names) != 1:
        raise InputError(f"the plan has {len(names)} templates", where="--template", fix=f"one of {', '.join(names)}")
    if template is not None and template not in names:
        raise unknown_name("template of the plan", template, names, where="--template")
    return next(item for item in instances if template in {None, item["template"]})


def _places(stages: Sequence[Mapping[str, Any]], hosts: Sequence[str], first_port: int) -> tuple[NodePlace, ...]:
    from coral_core.domain.launch import NodePlace

    configs = [config for stage in stages for config in sorted(stage["nodes"])]
    addresses = list(hosts) * len(configs) if len(hosts) == 1 else list(hosts)
    if len(addresses) != len(configs):
        raise InputError(
            f"the template has {len(configs)} nodes ({', '.join(configs)}), and {len(addresses)} addresses are given",
            where="--host",
            fix="give one for each node, or one for all",
        )
    if wrong := [address for address in hosts if not _HOST.fullmatch(address)]:
        raise InputError(
            f"{wrong[0][:100]!r} is no address", where="--host", fix="a name or an IP address, without a port"
        )
    on_host: Counter[str] = Counter()
    places = []
    for number, (config, address) in enumerate(zip(configs, addresses, strict=True)):
        port = first_port + PORTS_EACH * on_host[address]
        places.append(NodePlace(node=f"node-{number}", config=config, host=address, first_port=port, ports=PORTS_EACH))
        on_host[address] += 1
    return tuple(places)


def _document(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "instance_id": plan.instance_id,
        "model": plan.model,
        "phase": plan.phase.value,
        "runtime": plan.runtime.value,
        "url": plan.url,
        "nodes": [
            {
                "node": node.node,
                "argv": list(node.argv),
                "env": dict(node.env),
                "ports": list(node.ports),
                "serves": node.serves,
            }
            for node in plan.nodes
        ],
    }


def _show(plan: LaunchPlan, python: Path) -> None:
    print_text(f"{plan.model} {plan.phase} on runtime {plan.runtime}; it answers at {plan.url}")
    print_text("PYTHONPATH must name the folder that holds coral_core. In this order:")
    for node in plan.nodes:
        ports = f", ports {', '.join(map(str, node.ports))}" if node.ports else ""
        print_text(f"\n# {node.node}{' (answers)' if node.serves else ''}{ports}")
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in node.env.items())
        print_text(f"{given} {python} {shlex.join(node.argv)}")
