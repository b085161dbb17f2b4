"""`coral coordinator`: brings instances up on their nodes, watches over them, and keeps the gateway right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.errors import InputError

if TYPE_CHECKING:
    from coral_core.config.coordinator import CoordinatorSpec
    from coral_core.serving.control.coordinator import CoordinatorPlan

app = App(name="coordinator", help="Brings serving instances up on their nodes and watches over them.")

Config = Annotated[Path, Parameter(help="The coordinator's YAML file (docs/control-plane.md).")]
_STALE_S = 10.0


@app.command
def run(
    *,
    config: Config,
    check: Annotated[bool, Parameter(negative="", help="Only read the files and say what they say.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Coordinate until SIGTERM or Ctrl-C; what serves serves on, and the next coordinator takes it over.

    With --json each thing that happens is one JSON line on stdout, the first one with the endpoint.
    """
    import asyncio

    from coral_core.cli.serve_extra import Teller, refuse_without

    refuse_without("coordinators", "aiohttp", "msgspec", "zmq")
    from coral_core.clock import SystemClock
    from coral_core.config.coordinator import load_coordinator_file
    from coral_core.serving.control.coordinator import coordinate
    from coral_core.serving.signals import on_signals

    spec = load_coordinator_file(config)
    plan = _plan(spec, store)
    if check:
        if as_json:
            print_json({"gateway": plan.gateway_url, "scenario": spec.scenario, "folder": str(plan.folder)})
        else:
            print_text(f"{config} is right: scenario {spec.scenario}, gateway {plan.gateway_url}")
        return
    say = Teller(as_json=as_json)

    async def go() -> None:
        stop = asyncio.Event()
        with on_signals(stop):
            await coordinate(
                plan,
                SystemClock(),
                stop=stop,
                say=say,
                started=lambda endpoint: say("started", f"agents are met on {endpoint}", endpoint=endpoint),
            )

    asyncio.run(go())
    say("stopped", "stopped: what serves serves on")


@app.command
def status(*, config: Config, as_json: AsJson = False) -> None:
    """Instances and agents as the coordinator last wrote them down, at most 2 s ago while it runs."""
    from coral_core.cli.serve_extra import refuse_without

    refuse_without("coordinators", "msgspec")
    from datetime import datetime

    from coral_core.clock import SystemClock
    from coral_core.config.coordinator import load_coordinator_file
    from coral_core.serving.control.state_file import read_state

    document = read_state(load_coordinator_file(config).folder)
    age_s = (SystemClock().now() - datetime.fromisoformat(document["at"])).total_seconds()
    if as_json:
        print_json({**document, "age_s": round(age_s, 1), "running": age_s < _STALE_S})
        return
    _show(document, age_s)


def _plan(spec: CoordinatorSpec, store: str | None) -> CoordinatorPlan:
    """What the files say, as the coordinator takes it."""
    from coral_core.cli.work import open_configured_store
    from coral_core.config.engine import load_engine_file
    from coral_core.config.resolve import resolve_scenario
    from coral_core.config.scenario import load_scenario
    from coral_core.config.settings import load_settings
    from coral_core.serving.control.coordinator import CoordinatorPlan
    from coral_core.serving.control.curve import AllowedKeys
    from coral_core.serving.control.held import ControlTerms
    from coral_core.serving.control.wire import read_matching
    from tasks.coordinator import launcher

    pair = read_matching(spec.keys_file)
    resolved = resolve_scenario(load_scenario(spec.scenario), user_models=load_settings().models)
    return CoordinatorPlan(
        host=spec.listen.host,
        port=spec.listen.port,
        pair=pair,
        allowed=AllowedKeys(spec.agents_file),
        gateway_url=spec.gateway.url,
        gateway_token=_token(spec.gateway.token_file),
        folder=spec.folder,
        terms=ControlTerms(**spec.patience.model_dump(exclude_none=True)),
        launch=launcher(open_configured_store(store), resolved, load_engine_file(spec.engine_file)),
    )


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the gateway's admin token: {error}", where=str(path)) from None


def _weight(one: dict[str, Any]) -> str:
    """The weight, beside it the share of a degraded instance that is left."""
    left = one.get("weight_frac", 1.0)
    return f"{one['weight'] or 0:g}{f' x {left:.2g}' if left < 1 else ''}{', draining' if one['draining'] else ''}"


def _show(document: dict[str, Any], age_s: float) -> None:
    rows = [
        (
            one["instance"],
            one["model"],
            one["stage"],
            f"{len(one['agents'])} of {one['nodes']}",
            _weight(one),
            one["reason"],
        )
        for one in document["instances"]
    ]
    if rows:
        print_table("Instances", ("instance", "model", "stage", "agents", "weight", "since"), rows)
        agents = [
            (
                one["instance"],
                agent["node"],
                agent["node_id"],
                agent["state"],
                agent.get("reason") or agent.get("doing", ""),
                "gone" if agent["gone"] else f"{agent['heard_s_ago']:g} s ago",
            )
            for one in document["instances"]
            for agent in one["agents"]
        ]
        if agents:
            print_table("Agents", ("instance", "node", "node id", "state", "what", "heard"), agents)
    else:
        print_text("no agent has registered")
    counts = ("refused_keys", "withdrawn_keys", "other_versions", "garbage")
    if any(document[name] for name in counts):
        print_text("turned away: " + ", ".join(f"{document[name]} {name.replace('_', ' ')}" for name in counts))
    for trouble in (document["gateway_trouble"], document["agents_file_trouble"]):
        if trouble:
            print_note(f"note: {trouble}")
    if age_s >= _STALE_S:
        print_note(f"note: the coordinator has not written for {age_s:.0f} s: it does not run")
