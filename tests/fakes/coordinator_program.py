"""A coordinator as a program, whose instances run fake engines: `coordinator_program.py FOLDER PORT GATEWAY-URL LOST-S`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from coral_core.clock import SystemClock
from coral_core.domain.launch import LaunchPlan, NodeLaunch, Runtime
from coral_core.errors import InputError
from coral_core.serving.control.coordinator import CoordinatorPlan, coordinate
from coral_core.serving.control.curve import AllowedKeys, read_private
from coral_core.serving.control.held import AskPlan, ControlTerms
from coral_core.serving.signals import on_signals
from tests.fakes.gateway_case import TOKEN

FAKES = Path(__file__).resolve().parent


def fake_launch(question: AskPlan) -> LaunchPlan:
    """Node 0 answers HTTP; the others are processes that say they have loaded. Template `none` has no plan."""
    if question.template_id == "none":
        raise InputError("no such template", where="library x")
    nodes = tuple(
        NodeLaunch(
            node=place.node,
            argv=(str(FAKES / ("engine_program.py" if number else "control_engine.py")), str(place.first_port)),
            env={"FAKE_OF": question.instance_id},
            ports=(place.first_port,),
            serves=number == 0,
        )
        for number, place in enumerate(question.places)
    )
    return LaunchPlan(
        instance_id=question.instance_id,
        model=question.model,
        phase=question.phase,
        runtime=Runtime.VLLM,
        url=f"http://127.0.0.1:{question.places[0].first_port}",
        nodes=nodes,
    )


def say(event: str, text: str, **facts: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "text": text, **facts}) + "\n")
    sys.stdout.flush()


async def main(folder: Path, port: int, gateway_url: str, lost_s: float) -> None:
    plan = CoordinatorPlan(
        host="127.0.0.1",
        port=port,
        pair=read_private(folder / "keys" / "coordinator.keys"),
        allowed=AllowedKeys(folder / "keys" / "agents.allowed"),
        gateway_url=gateway_url,
        gateway_token=TOKEN,
        folder=folder / "coordinator",
        terms=ControlTerms(lost_s=lost_s, unheard_grace_s=4.0, resend_s=1.0),
        launch=fake_launch,
    )
    stop = asyncio.Event()
    with on_signals(stop):
        await coordinate(
            plan, SystemClock(), stop=stop, say=say, started=lambda endpoint: say("started", "", endpoint=endpoint)
        )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
