"""The little of ASGI that the gateway and its admin side share: bodies with limits, answers, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from coral_core.serving.refusals import RefusedError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
_DISCARDED: Final = 16
"""Times the longest body that are read and thrown away."""


class ClientGoneError(Exception):
    """The client has closed the connection, or does not take what it is sent: there is nobody to answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    most_bytes: int,
    limit_s: float,
    limit: Callable[[float], AbstractAsyncContextManager[object]] = asyncio.timeout,
) -> bytes:
    """The request's JSON body. RefusedError for another type (415), too much (413) or too slow (408); ClientGoneError.

    `limit` bounds the time, by a TimeoutError.
    What is too long is read on for a while and thrown away: a client that is cut off while it sends sees no answer.
    """
    kind = (header(scope, b"content-type") or b"application/json").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise RefusedError(
            f"the content type is {kind[:80].decode('latin-1')!r}", status=415, fix="send application/json"
        )
    too_long = RefusedError(f"the request is longer than {most_bytes} bytes", status=413, code="request_too_large")
    stated = header(scope, b"content-length")
    if stated is not None and stated.isdigit() and int(stated) > _DISCARDED * most_bytes:
        raise too_long
    parts, size, more = [], 0, True
    try:
        async with limit(limit_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > _DISCARDED * most_bytes:
                    raise too_long
                if size <= most_bytes:
                    parts.append(part)
                more = message.get("more_body", False)
    except TimeoutError:
        if size > most_bytes:
            raise too_long from None
        raise RefusedError(f"the request did not arrive within {limit_s:g} s", status=408, code="timeout") from None
    if size > most_bytes:
        raise too_long
    return b"".join(parts)


async def start(send: Send, status: int, headers: Headers) -> None:
    """Status and headers."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def answer(send: Send, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
    """A whole answer."""
    await start(send, status, [*headers, (b"content-length", str(len(body)).encode())])
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, error: RefusedError, headers: Headers = ()) -> None:
    """An error in OpenAI's shape; a body that was not read is not waited for."""
    unread = [(b"connection", b"close")] if error.status in {408, 413} else []
    await answer(send, error.status, error.body, [JSON, *error.headers, *unread, *headers])


@asynccontextmanager
async def while_connected(receive: Receive, *, served: Callable[[], bool]) -> AsyncIterator[None]:
    """Ends what runs inside when the client leaves, unless it is `served` by then; ClientGoneError then."""
    task = asyncio.current_task()
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        if task is not None and not served():
            left = True
            task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left or task is None:
            raise
        task.uncancel()
        raise ClientGoneError from None
    finally:
        watcher.cancel()


async def lifespan(receive: Receive, send: Send) -> None:
    """Nothing starts or ends with the listener."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
