"""`coral agent`: what runs on every node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson
from coral_core.cli.output import print_json, print_text
from coral_core.errors import InputError

app = App(name="agent", help="A node's agent: registers with the coordinator and runs the node's engine.")


@app.command
def run(
    *,
    config: Annotated[Path, Parameter(help="The agent's YAML file (docs/control-plane.md).")],
    check: Annotated[bool, Parameter(negative="", help="Only read the files and say what they say.")] = False,
    as_json: AsJson = False,
) -> None:
    """Attend to this node until SIGTERM: then requests run out, the engine ends, and so does the agent.

    A second signal ends the engine at once. With --json each thing that happens is one JSON line on stdout.
    """
    import asyncio

    from coral_core.cli.serve_extra import Teller, refuse_without

    refuse_without("agents", "msgspec", "zmq")
    from coral_core.clock import SystemClock
    from coral_core.config.agent import load_agent_file
    from coral_core.config.settings import Settings, load_settings
    from coral_core.serving.control.agent import AgentTerms, Ending, agent_keys, attend
    from coral_core.serving.control.state_file import alone_in
    from coral_core.serving.signals import on_signals
    from tasks.engine_runner import EngineRunner
    from tasks.node_agent import hello_of, take_share, who_am_i

    spec = load_agent_file(config)
    agent_keys(spec.keys_file)
    settings: Settings = load_settings()
    if spec.engine_python is not None:
        settings = settings.model_copy(update={"engine_python": spec.engine_python})
    try:
        interpreter = settings.engine_interpreter()
    except InputError as error:
        where = error.where if spec.engine_python is None else f"{config}: engine_python"
        raise InputError(error.what, where=where, fix=error.fix) from None
    try:
        take_share(spec)
    except InputError as error:
        raise InputError(error.what, where=f"{config}: {error.where}", fix=error.fix) from None
    if check:
        if spec.node is not None:
            who_am_i(spec)
        facts = {"coordinator": spec.coordinator, "engine_python": str(interpreter), "folder": str(spec.folder)}
        if as_json:
            print_json(facts)
        else:
            print_text(f"{config} is right: agent of {spec.coordinator}, engines by {interpreter}")
        return
    who = who_am_i(spec)
    say = Teller(as_json=as_json)
    name = f"node {who.tags.node} of {who.tags.instance_id} ({who.node_id})"

    async def go() -> None:
        ending = Ending(asked=asyncio.Event(), at_once=asyncio.Event())
        with on_signals(ending.asked, ending.at_once.set):
            await attend(
                hello_of(spec, who),
                EngineRunner(interpreter=interpreter, folder=spec.folder),
                endpoint=spec.coordinator,
                keys_file=spec.keys_file,
                terms=AgentTerms(heartbeat_s=spec.heartbeat_s, drain_s=spec.drain_s, stop_grace_s=spec.stop_grace_s),
                clock=SystemClock(),
                ending=ending,
                say=say,
                started=lambda: say("started", f"agent of {name}", node_id=who.node_id, instance=who.tags.instance_id),
            )

    with alone_in(spec.folder, "agent"):
        asyncio.run(go())
    say("stopped", "stopped: the engine has ended")
