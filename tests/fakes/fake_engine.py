"""An engine with OpenAI's API on loopback that answers as it is told: late, wrongly, partly, or not at all.

Each completion request takes the next `Turn` of the script; without one it is answered well. What was asked is kept.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web


class Way(StrEnum):
    """How a request is answered."""

    WELL = "as it should be"
    STATUS = "an error status"
    RESET = "connection reset before the headers"
    SILENT = "headers of a stream, then nothing for a long time"
    STALLS = "some tokens, then nothing for a long time"
    CUT = "some tokens, then the connection is reset"
    ENDS = "some tokens, then a regular end with [DONE], without finish_reason"
    ABORTS = "some tokens, then finish_reason abort"
    ERROR_EVENT = "some tokens, then an error event"
    GARBAGE = "some tokens, then an event that is no JSON"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer. `after`: tokens before the fault; `delay_s`: before the answer begins; `pause_s`: between tokens; `linger_s`: after [DONE]."""

    way: Way = Way.WELL
    after: int = 0
    delay_s: float = 0.0
    pause_s: float = 0.0
    linger_s: float = 0.0
    status: int = 500
    body: bytes = b'{"error":{"message":"as told","type":"server_error","code":500}}'
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """A running engine: its address, its script and what it has seen. `produces`: it answers with a KV cache's place."""

    name: str
    model: str
    url: str = ""
    produces: bool = False
    healthy: bool = True
    script: deque[Turn] = field(default_factory=deque)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    clients: set[object] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    aborted: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, way: Way = Way.WELL, *, times: int = 1, **facts: Any) -> None:
        self.script.extend([Turn(way=way, **facts)] * times)

    @property
    def peers(self) -> int:
        """How many connections completions came on."""
        return len(self.clients)

    async def models(self, _request: web.Request) -> web.Response:
        found = [{"id": self.model, "object": "model"}] if self.healthy else []
        return web.json_response({"object": "list", "data": found})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        document = await request.json()
        self.asked.append(document)
        self.clients.add(request.transport.get_extra_info("peername") if request.transport else None)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        turn = self.script.popleft() if self.script else Turn()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._wait(turn.delay_s)
            if turn.way is Way.STATUS:
                return web.Response(status=turn.status, body=turn.body, content_type="application/json")
            if turn.way is Way.RESET:
                _reset(request)
            chat = request.path.endswith("chat/completions")
            if document.get("stream"):
                return await self._stream(request, document, turn, chat=chat)
            return await self._whole(request, document, turn, chat=chat)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _whole(
        self, request: web.Request, document: dict[str, Any], turn: Turn, *, chat: bool
    ) -> web.StreamResponse:
        count = turn.tokens or int(document.get("max_tokens") or 4)
        if turn.way in (Way.SILENT, Way.STALLS):
            await self._wait(3600.0)
        if turn.way is Way.CUT:
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"id": "x", ')
            await asyncio.sleep(0.02)
            _reset(request)
        reason = {Way.ENDS: None, Way.ABORTS: "abort"}.get(turn.way, "length")
        text = "".join(f"t{number} " for number in range(count))
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        prompt = document.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        answer: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": self.model,
            "choices": [
                {"index": i, "finish_reason": reason, **choice} for i in range(prompts * (document.get("n") or 1))
            ],
            "usage": {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count},
        }
        if self.produces and (document.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "remote_engine_id": self.name}
        if turn.way is Way.GARBAGE:
            return web.Response(body=b"{", content_type="application/json")
        return web.json_response(answer)

    async def _stream(
        self, request: web.Request, document: dict[str, Any], turn: Turn, *, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if turn.way is Way.SILENT:
            await self._wait(3600.0)
        count = turn.tokens or int(document.get("max_tokens") or 4)
        for number in range(count):
            if turn.way is not Way.WELL and number == turn.after:
                return await self._fault(request, response, turn, chat=chat)
            await response.write(self._event(number, "length" if number == count - 1 else None, chat=chat))
            if turn.pause_s:
                await self._wait(turn.pause_s)
        if (document.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
            await response.write(_line({**self._frame(chat=chat), "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await self._wait(turn.linger_s)
        return response

    async def _fault(
        self, request: web.Request, response: web.StreamResponse, turn: Turn, *, chat: bool
    ) -> web.StreamResponse:
        match turn.way:
            case Way.STALLS:
                await self._wait(3600.0)
            case Way.CUT:
                _reset(request)
            case Way.ENDS:
                await response.write(b"data: [DONE]\n\n")
            case Way.ABORTS:
                await response.write(self._event(turn.after, "abort", chat=chat) + b"data: [DONE]\n\n")
            case Way.ERROR_EVENT:
                await response.write(_line({"error": {"message": "engine died", "code": 500}}) + b"data: [DONE]\n\n")
            case Way.GARBAGE:
                await response.write(b"data: {nonsense\n\n")
        return response

    def _event(self, number: int, reason: str | None, *, chat: bool) -> bytes:
        text = f"t{number} "
        piece = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
        return _line({**self._frame(chat=chat), "choices": [{"index": 0, "finish_reason": reason, **piece}]})

    def _frame(self, *, chat: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": "x", "object": kind, "created": 1, "model": self.model}

    async def _wait(self, delay_s: float) -> None:
        """Sleep, or until the test lets go."""
        if delay_s:
            try:
                await asyncio.wait_for(self.release.wait(), delay_s)
            except TimeoutError:
                return


def _line(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _reset(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("as told")


@asynccontextmanager
async def fake_engine(name: str, model: str, *, produces: bool = False) -> AsyncIterator[FakeEngine]:
    """An engine on a free port of loopback."""
    engine = FakeEngine(name=name, model=model, produces=produces)
    app = web.Application()
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/chat/completions", engine.complete)
    app.router.add_post("/v1/completions", engine.complete)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        engine.release.set()
        await runner.cleanup()
