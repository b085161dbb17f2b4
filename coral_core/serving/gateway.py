"""The gateway as an ASGI application: OpenAI's API in front of the instances of a routing table.

Order of the checks: key (401), the key's limits (429), body (408, 413, 415, 400), the key's limits on several answers (400,
429), model (404), an instance that is ready (503), the model's queue (429). Nothing is sent to a client before an engine has given something to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import uuid
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import msgspec

from coral_core.clock import Clock
from coral_core.serving.asgi import (
    JSON,
    ClientGoneError,
    Receive,
    Scope,
    Send,
    answer,
    header,
    lifespan,
    read_body,
    refuse,
    start,
    while_connected,
)
from coral_core.serving.demand_meter import DemandMeter
from coral_core.serving.dispatch import Answer, Dispatcher
from coral_core.serving.keys import KeyRing
from coral_core.serving.limits import KeyLimiter
from coral_core.serving.metrics import CONTENT_TYPE, GatewayMetrics
from coral_core.serving.patience import Patience
from coral_core.serving.refusals import RefusedError, bad_request, not_ready, unknown_model
from coral_core.serving.request import CHAT, TEXT, CompletionRequest, parse_request
from coral_core.serving.sparing_log import spare
from coral_core.serving.table import RoutingTable
from coral_core.serving.terms import GatewayTerms
from coral_core.serving.upstream import RejectedError, UpstreamError
from coral_core.serving.waiting import Ticket, Waiting

_METHODS: Final = {CHAT: "POST", TEXT: "POST", "/v1/models": "GET", "/health": "GET", "/metrics": "GET"}
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_STREAM: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_FAREWELL_S: Final = 1.0
_GRAIN_FRAC: Final = 0.05
"""Of the stall limit: by how much later than said a stall may be noticed."""
_log = logging.getLogger(__name__)
spare(__name__)


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One request on its way. `status` is what the metrics say of it, `begun` whether anything has been sent, `served` all.

    `counts`: as how many its key's limits count it.
    """

    send: Send
    request_id: str
    arrived_s: float
    model: str = ""
    status: str = ""
    begun: bool = False
    served: bool = False
    counts: int = 1

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-request-id", self.request_id.encode())]


@dataclass(slots=True, kw_only=True)
class Gateway:
    """The application. `draining`: nothing new is taken, what runs is finished; `running` counts that.

    `coordinated_s`: when a coordinator last asked what there is.
    """

    table: RoutingTable
    session: aiohttp.ClientSession
    keys: KeyRing
    clock: Clock
    terms: GatewayTerms
    metrics: GatewayMetrics
    meter: DemandMeter
    draining: bool = False
    running: int = 0
    coordinated_s: float | None = None
    patience: Patience = field(default_factory=Patience)
    _waiting: dict[str, Waiting] = field(init=False)
    _dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = {
            name: Waiting(pool, unknown_s=self.terms.retry_after_s) for name, pool in self.table.pools.items()
        }
        self._dispatcher = Dispatcher(
            table=self.table,
            session=self.session,
            metrics=self.metrics,
            clock=self.clock,
            terms=self.terms,
            patience=self.patience,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks HTTP, not {scope['type']}")
        given = header(scope, b"x-request-id") or b""
        exchange = _Exchange(
            send=send,
            request_id=given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
            arrived_s=self.clock.monotonic_s(),
        )
        try:
            await self._route(scope, receive, exchange)
        except RefusedError as error:
            await self._refuse(exchange, error)
        except ClientGoneError:
            exchange.status = "499"
        except asyncio.CancelledError:
            if not self.draining:
                raise
            await self._refuse_at_the_end(exchange)
        except RejectedError as error:
            exchange.status = str(error.status)
            await answer(send, error.status, _shaped(error.body, error.status), [JSON, *exchange.headers])
        except Exception:  # noqa: BLE001 - logged whole; the client gets an error of the API's shape, not a cut line
            _log.exception("request %s failed by a bug", exchange.request_id)
            bug = RefusedError("the gateway failed", status=500, error_type="server_error", code="internal_error")
            await self._refuse(exchange, bug)
        finally:
            if exchange.status:
                self.metrics.ended(exchange.model, exchange.status)

    async def _route(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        path, method = scope["path"], scope["method"]
        wanted = "GET" if path.startswith("/v1/models/") else _METHODS.get(path)
        if wanted is None:
            raise RefusedError(f"there is nothing at {path[:100]!r}", status=404, code="not_found")
        if method != wanted:
            raise RefusedError(f"{path[:100]} takes {wanted}", status=405, code="method_not_allowed")
        if path == "/health":
            state = b'{"status":"draining"}' if self.draining else b'{"status":"ok"}'
            await answer(exchange.send, 503 if self.draining else 200, state, [JSON, *exchange.headers])
            return
        limiter = self.keys.limiter(header(scope, b"authorization"))
        if path == "/metrics":
            kind = (b"content-type", CONTENT_TYPE.encode())
            await answer(exchange.send, 200, self.metrics.text(), [kind, *exchange.headers])
        elif method == "GET":
            models = self._models(path.removeprefix("/v1/models").removeprefix("/"))
            await answer(exchange.send, 200, models, [JSON, *exchange.headers])
        else:
            if self.draining or self.running >= self.terms.max_requests:
                why = "shuts down" if self.draining else f"has {self.running} requests running, as many as it may"
                raise not_ready(f"the gateway {why}", self.terms.retry_after_s, code="gateway_unavailable")
            limiter.enter(exchange.arrived_s)
            self.running += 1
            try:
                await self._complete(scope, receive, exchange, limiter)
            finally:
                self.running -= 1
                limiter.leave(exchange.counts)

    async def _complete(self, scope: Scope, receive: Receive, exchange: _Exchange, limiter: KeyLimiter) -> None:
        terms = self.terms
        body = await read_body(
            scope, receive, most_bytes=terms.max_body_bytes, limit_s=terms.body_s, limit=self.patience.limit
        )
        request = parse_request(scope["path"], body)
        if request.computed > terms.max_choices:
            what = (
                f"the request is for {request.computed} answers (prompts times n), at most {terms.max_choices} may be"
            )
            raise bad_request(what, param="n", fix="split it into several")
        limiter.widen(request.computed)
        exchange.counts = request.computed
        if request.model not in self.table.pools:
            raise unknown_model(request.model)
        exchange.model = request.model
        self.meter.asked(request.model)
        now_s = self.clock.monotonic_s()
        ttft_s = self.table.pools[request.model].terms.slo.ttft_s
        waiting = self._waiting[request.model]
        heard_by_s = math.inf if request.stream else now_s + ttft_s
        ticket = waiting.admit(now_s, heard_by_s=heard_by_s, count=request.computed)
        try:
            async with (
                while_connected(receive, served=lambda: exchange.served),
                self.patience.limit(terms.request_s),
                self._dispatcher.answer(request, ticket, exchange.request_id) as found,
            ):
                await self._pass_on(request, found, ticket, exchange)
        except TimeoutError:
            raise RefusedError(
                f"the answer took longer than {terms.request_s:g} s",
                status=504,
                error_type="server_error",
                code="timeout",
            ) from None
        finally:
            ticket.heard()

    async def _pass_on(self, request: CompletionRequest, found: Answer, ticket: Ticket, exchange: _Exchange) -> None:
        ticket.heard()
        exchange.begun = True
        decode_s = None
        if request.stream:
            first_s = self.clock.monotonic_s()
            self.metrics.first_token(request.model, found.member.spec.name, first_s - exchange.arrived_s)
            await self._stream(found, exchange)
            decode_s = self.clock.monotonic_s() - first_s
        else:
            await answer(exchange.send, 200, found.first, [JSON, *exchange.headers])
            exchange.served = True
        exchange.status = "200"
        found.member.failures = 0
        if found.input_tokens is not None and found.output_tokens is not None:
            tokens = (found.input_tokens, found.output_tokens)
            self.metrics.finished(request.model, found.member.spec.name, *tokens, decode_s)
            self.meter.finished(request.model, *tokens)

    async def _stream(self, found: Answer, exchange: _Exchange) -> None:
        """All events. RefusedError where the engine breaks off or stalls, ClientGoneError where the client does not read."""
        send, stall_s, time_s = exchange.send, self.terms.stall_s, asyncio.get_running_loop().time
        sending = True
        renew_at_s = -math.inf

        def renew() -> None:
            """Put the limit off; not for every event, since the timer costs as much as passing the event on."""
            nonlocal renew_at_s
            if (now_s := time_s()) >= renew_at_s:
                grain_s = stall_s * _GRAIN_FRAC
                renew_at_s = now_s + grain_s
                limit.reschedule(now_s + stall_s + grain_s)

        def hurry() -> None:
            nonlocal stall_s, renew_at_s
            if limit.expired():  # at this moment: its task has not seen it yet
                return
            stall_s = min(stall_s, self.terms.gone_stall_s)
            renew_at_s = -math.inf
            limit.reschedule(min(limit.when() or math.inf, time_s() + stall_s))

        found.member.on_gone.add(hurry)
        try:
            async with self.patience.limit(stall_s) as limit:
                await start(send, 200, [*_STREAM, *exchange.headers])
                await send({"type": "http.response.body", "body": found.first, "more_body": True})
                exchange.served = found.whole
                sending = False
                renew()
                async for events in found.rest():
                    sending = True
                    renew()
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    exchange.served = found.whole
                    sending = False
        except UpstreamError as error:
            self._dispatcher.failed(found.member, error)
            raise _broken_off(error.what) from None
        except TimeoutError:
            if sending:
                raise ClientGoneError from None
            stalled = UpstreamError(f"the engine gave nothing for {stall_s:g} s", cause="timeout")
            self._dispatcher.failed(found.member, stalled)
            raise _broken_off(stalled.what) from None
        finally:
            found.member.on_gone.discard(hurry)
        await send({"type": "http.response.body", "body": b""})

    async def _refuse(self, exchange: _Exchange, error: RefusedError) -> None:
        """An error instead of an answer; in a stream that has begun, as its last event."""
        if not exchange.begun:
            exchange.status = str(error.status)
            await refuse(exchange.send, error, exchange.headers)
            return
        exchange.status = "cut"
        event = b"data: " + error.body + b"\n\n"
        await exchange.send({"type": "http.response.body", "body": event, "more_body": False})

    async def _refuse_at_the_end(self, exchange: _Exchange) -> None:
        """The gateway's own time is up: its client learns that much, if it listens."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                why = "the gateway shuts down"
                await self._refuse(exchange, not_ready(why, self.terms.retry_after_s, code="gateway_unavailable"))

    def _models(self, name: str) -> bytes:
        """The list of models, or one of them."""
        if name and name not in self.table.pools:
            raise unknown_model(name)
        found = [{"id": one, "object": "model", "created": 0, "owned_by": "coral"} for one in self.table.pools]
        if name:
            return msgspec.json.encode(next(one for one in found if one["id"] == name))
        return msgspec.json.encode({"object": "list", "data": found})


def _broken_off(what: str) -> RefusedError:
    return RefusedError(what, status=502, error_type="server_error", code="engine_failed")


def _shaped(body: bytes, status: int) -> bytes:
    """An engine's own error, as it is where it has OpenAI's shape."""
    try:
        error = msgspec.json.decode(body).get("error")
    except (msgspec.MsgspecError, AttributeError, RecursionError):
        error = None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return msgspec.json.encode({"error": {"type": None, "param": None, **error, "code": error.get("code")}})
    return RefusedError(f"the engine refused the request ({status})", status=status).body
