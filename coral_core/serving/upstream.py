"""HTTP to the engines: one connection pool, and every way in which an engine can fail as one error with its cause."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from coral_core.errors import ServingError

_IDLE_S: Final = 4.0
"""Engines close idle connections after 5 s (vLLM's default); a request sent on one that is being closed is lost."""
_BUSY: Final = frozenset({408, 425, 429})
_MISPLACED: Final = frozenset({401, 403, 404, 405})
"""Refusals that are about the gateway's own doing: its client cannot help them."""
_OWN_LACK: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Connections that fail for want of something here: no engine is gone for that."""


class UpstreamError(ServingError):
    """An engine failed a request. `cause` is one of a few words (a metric's label).

    `gone`: there is no connection to it; `answered`: it is there and refused or failed this request; `status`: with what, if by one.
    """

    kind = "upstream"

    def __init__(
        self, what: str, *, cause: str = "", gone: bool = False, status: int = 0, where: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.cause = cause
        self.gone = gone
        self.status = status

    @property
    def answered(self) -> bool:
        """Whether the same engine may do better with another way of asking."""
        return self.cause in {"status", "broken"}

    @property
    def is_timeout(self) -> bool:
        """Whether time ran out."""
        return self.cause == "timeout"


class RejectedError(ServingError):
    """The engine finds the request wrong (4xx): its own answer is for the client, and no other engine is asked."""

    kind = "rejected"

    def __init__(self, what: str, *, status: int = 400, body: bytes = b"", where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.status = status
        self.body = body


def new_session(*, connect_s: float) -> aiohttp.ClientSession:
    """A session for engines: no limit of its own on connections, no cookies, no proxies, no time limit but on connecting."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        read_bufsize=1 << 18,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


@asynccontextmanager
async def posted(
    session: aiohttp.ClientSession, url: str, body: bytes, request_id: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The engine's answer, its status 200; leaving before its end closes the connection, which aborts the request there.

    Raises UpstreamError and RejectedError.
    """
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    try:
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                await _refuse(response)
            yield response
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise _as_upstream(error) from None


async def read_all(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The whole body; UpstreamError where it is longer than `most_bytes`, or breaks off."""
    parts, size = [], 0
    while part := await read_some(response):
        size += len(part)
        if size > most_bytes:
            raise UpstreamError(f"the engine's answer is longer than {most_bytes} bytes", cause="broken")
        parts.append(part)
    return b"".join(parts)


async def read_some(response: aiohttp.ClientResponse) -> bytes:
    """The next bytes, none at the end; UpstreamError where the connection breaks off."""
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise _as_upstream(error) from None


async def lists_model(session: aiohttp.ClientSession, url: str, model: str, *, timeout_s: float) -> bool | None:
    """Whether the engine answers and serves the model; None where it gives no answer in time."""
    try:
        async with asyncio.timeout(timeout_s), session.get(f"{url}/v1/models") as response:
            listed = await response.json() if response.status == 200 else {}
            return any(one.get("id") == model for one in listed.get("data", ()))
    except TimeoutError:
        return None
    except (aiohttp.ClientError, OSError, ValueError, AttributeError, TypeError) as error:
        return None if _lacks_own(error) else False


async def _refuse(response: aiohttp.ClientResponse) -> None:
    status = response.status
    body = await read_all(response, 1 << 16)
    if 400 <= status < 500 and status not in _BUSY | _MISPLACED:
        raise RejectedError(f"the engine answered {status}", status=status, body=body)
    cause = "busy" if status in _BUSY | {503} else "status"
    raise UpstreamError(f"the engine answered {status}", cause=cause, status=status)


def _lacks_own(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _OWN_LACK


def _as_upstream(error: Exception) -> UpstreamError:
    if _lacks_own(error):
        return UpstreamError("the gateway has no more connections to give", cause="busy")
    if isinstance(error, TimeoutError):  # of connecting: aiohttp has no other limit here
        return UpstreamError("the engine does not accept connections", cause="connect", gone=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamError("the engine cannot be reached", cause="connect", gone=True)
    return UpstreamError("the engine broke the connection", cause="reset")
