"""The gateway as a process: its two listeners, the probes of the engines, the writer of demand, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import aiohttp

from coral_core.clock import Clock
from coral_core.serving.admin import Admin
from coral_core.serving.demand_meter import DemandMeter, DemandSink
from coral_core.serving.gateway import Gateway
from coral_core.serving.keys import KeyRing
from coral_core.serving.listener import Listener
from coral_core.serving.metrics import GatewayMetrics
from coral_core.serving.signals import on_signals
from coral_core.serving.table import InstanceSpec, Member, ModelTerms, RoutingTable
from coral_core.serving.terms import GatewayTerms
from coral_core.serving.upstream import lists_model, new_session

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlan:
    """All that a gateway is made of. Without an admin token there is no admin side; without a sink demand is not told."""

    models: tuple[ModelTerms, ...]
    instances: tuple[InstanceSpec, ...]
    terms: GatewayTerms
    keys: KeyRing
    admin_token: str | None = None
    demand_sink: DemandSink | None = None


def new_gateway(plan: GatewayPlan, session: aiohttp.ClientSession, clock: Clock) -> Gateway:
    """The application with its table filled; no instance is ready before it has been probed."""
    terms = plan.terms
    table = RoutingTable(plan.models, eject_s=terms.eject_s, eject_after=terms.eject_after)
    for spec in plan.instances:
        table.register(spec)
    return Gateway(
        table=table,
        session=session,
        keys=plan.keys,
        clock=clock,
        terms=terms,
        metrics=GatewayMetrics(table),
        meter=DemandMeter(models=table.pools, clock=clock),
    )


async def probe_all(gateway: Gateway) -> None:
    """Ask every engine once whether it answers and serves its model.

    But those that are given up for good: their nodes may be gone, and nobody is to wait for what never answers.
    """
    timeout_s = gateway.terms.probe_timeout_s

    async def probe(member: Member) -> None:
        answers = await lists_model(gateway.session, member.spec.url, member.spec.model, timeout_s=timeout_s)
        gateway.table.probed(member, answers=answers, now_s=gateway.clock.monotonic_s())

    await asyncio.gather(*(probe(member) for member in gateway.table.members if not member.failed))


async def serve(
    plan: GatewayPlan,
    public: socket.socket,
    admin: socket.socket | None,
    clock: Clock,
    *,
    stop: asyncio.Event | None = None,
    started: Callable[[Gateway], object] = lambda _: None,
) -> None:
    """Serve until `stop` is set (SIGTERM and SIGINT set it), then finish what runs, for `drain_s` at most.

    A second signal breaks off what runs. `started` is called once the engines have been probed.
    """
    stop = stop or asyncio.Event()
    terms = plan.terms
    async with new_session(connect_s=terms.connect_s) as session:
        gateway = new_gateway(plan, session, clock)
        listeners = [(Listener(gateway, header_s=terms.header_s, drain_s=terms.drain_s), public)]
        if admin is not None and plan.admin_token is not None:
            app = Admin(gateway=gateway, token=plan.admin_token)
            listeners.append((Listener(app, header_s=terms.header_s, drain_s=1.0), admin))
        gateway.patience.begin()
        await probe_all(gateway)
        with on_signals(stop, listeners[0][0].break_off):
            background = [asyncio.create_task(_every(terms.probe_s, lambda: probe_all(gateway)))]
            if plan.demand_sink is not None:
                sink = plan.demand_sink
                background.append(asyncio.create_task(_every(terms.demand_every_s, lambda: _tell(gateway, sink))))
            servers = [asyncio.create_task(server.serve(sockets=[where])) for server, where in listeners]
            started(gateway)
            ended = asyncio.create_task(stop.wait())
            await asyncio.wait([ended, *servers], return_when=asyncio.FIRST_COMPLETED)
            gateway.draining = True
            for (server, _), task in zip(listeners, servers, strict=True):
                server.should_exit = True
                if gateway.running == 0:  # else the admin side tells how much still runs
                    listeners[-1][0].should_exit = True
                await task
                await _left(server)
            await _end([ended, *background])
        gateway.patience.end()
        if plan.demand_sink is not None:
            await _tell(gateway, plan.demand_sink)


async def _left(server: Listener) -> None:
    """What was broken off says so to its client, and ends."""
    if server.force_exit:
        for task in server.server_state.tasks:
            task.cancel()
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=2.0)


async def _tell(gateway: Gateway, sink: DemandSink) -> None:
    samples = gateway.meter.take_untold()
    if samples:
        await asyncio.to_thread(gateway.meter.tell, samples, sink)


async def _every(interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await work()
        except Exception:  # noqa: BLE001 - logged whole; requests are served on, and the next round may do better
            _log.exception("background work failed by a bug")


async def _end(tasks: Iterable[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
