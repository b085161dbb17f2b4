"""A gateway on loopback, in this process, in front of fake engines; what the tests of serving stand on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from coral_core.clock import SystemClock
from coral_core.domain.workload import Phase, Slo
from coral_core.serving.gateway import Gateway
from coral_core.serving.keys import KeyRecord, KeyRing, hash_key
from coral_core.serving.limits import KeyTerms
from coral_core.serving.listener import bound_socket
from coral_core.serving.run import GatewayPlan, serve
from coral_core.serving.table import InstanceSpec, ModelTerms
from coral_core.serving.terms import GatewayTerms
from tests.fakes.fake_engine import FakeEngine, fake_engine
from tests.fakes.waiting import PATIENT_S

MODEL = "tiny"
TOKEN = "an-admin-token-of-more-than-32-characters"
KEY = "sk-coral-abcdefghijklmnopqrstuvwxyz0123456789"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TERMS = GatewayTerms(
    probe_s=3600.0,
    header_s=60.0,
    body_s=60.0,
    connect_s=60.0,
    first_byte_s=60.0,
    stall_s=60.0,
    request_s=PATIENT_S,
    drain_s=60.0,
)
"""Nothing is over its time, however slow the machine; a test about such a limit says its own."""


def terms_of(model: str = MODEL, *, ttft_s: float = 1e6, tpot_s: float = 1e6, **facts: Any) -> ModelTerms:
    return ModelTerms(
        name=model,
        slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        **{"mean_input_tokens": 10.0, "mean_output_tokens": 10.0, **facts},
    )


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 4, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A running gateway: its addresses, the application, the engines by name, and a client session."""

    url: str
    admin_url: str
    gateway: Gateway
    engines: dict[str, FakeEngine]
    session: aiohttp.ClientSession
    stop: asyncio.Event
    served: asyncio.Task[None]

    async def post(self, document: object, path: str = CHAT, **more: Any) -> tuple[int, dict[str, str], Any]:
        """Status, headers and the JSON answer."""
        async with self.session.post(self.url + path, json=document, **more) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, headers, json.loads(await response.read())

    async def events(self, document: dict[str, Any], path: str = CHAT) -> list[Any]:
        """The events of a stream, JSON but for the last [DONE]."""
        async with self.session.post(self.url + path, json={**document, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"].startswith("text/event-stream")
            return events_in(await response.read())

    async def admin(self, method: str, path: str, document: object = None, *, token: str = TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.request(method, self.admin_url + path, json=document, headers=headers) as response:
            return response.status, json.loads(await response.read())


def events_in(data: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def spoken(events: Sequence[Any]) -> str:
    """The text of a stream's events."""
    pieces = [e["choices"][0] for e in events if isinstance(e, dict) and e.get("choices")]
    return "".join(piece["delta"]["content"] if "delta" in piece else piece["text"] for piece in pieces)


@asynccontextmanager
async def gateway_case(
    phases: dict[str, Phase] | None = None,
    *,
    terms: GatewayTerms = TERMS,
    models: tuple[ModelTerms, ...] = (),
    weights: dict[str, float] | None = None,
    regions: dict[str, str] | None = None,
    key: KeyTerms | None = None,
    sink: Callable[[Any], object] | None = None,
    **changes: Any,
) -> AsyncIterator[Case]:
    """Engines of these phases (default: one aggregated, `a`) behind a gateway; `changes` to its terms.

    Short limits on engines hold on a machine that stands still now and then: the gateway looks for it often.
    """
    phases = phases or {"a": Phase.AGGREGATED}
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("coral_core.serving.patience.LOOK_S", 0.1)
        engines = {
            name: await stack.enter_async_context(fake_engine(name, MODEL, produces=phase is Phase.PREFILL))
            for name, phase in phases.items()
        }
        records = [] if key is None else [KeyRecord(name="one", key_hash=hash_key(KEY), terms=key)]
        plan = GatewayPlan(
            models=models or (terms_of(),),
            instances=tuple(
                InstanceSpec(
                    name=name,
                    model=MODEL,
                    phase=phase,
                    url=engines[name].url,
                    weight=(weights or {}).get(name, 10.0),
                    region=(regions or {}).get(name, "local"),
                )
                for name, phase in phases.items()
            ),
            terms=replace(terms, **changes),
            keys=KeyRing(records),
            admin_token=TOKEN,
            demand_sink=sink,
        )
        public, admin = bound_socket("127.0.0.1", 0), bound_socket("127.0.0.1", 0)
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (public, admin)]
        stop = asyncio.Event()
        begun: asyncio.Future[Gateway] = asyncio.get_running_loop().create_future()
        served = asyncio.create_task(serve(plan, public, admin, SystemClock(), stop=stop, started=begun.set_result))
        try:
            gateway = await asyncio.wait_for(begun, PATIENT_S)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENT_S)) as session:
                yield Case(
                    url=urls[0],
                    admin_url=urls[1],
                    gateway=gateway,
                    engines=engines,
                    session=session,
                    stop=stop,
                    served=served,
                )
        finally:
            for engine in engines.values():
                engine.release.set()
            stop.set()
            await served
