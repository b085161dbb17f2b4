"""The gateway's admin side as the coordinator calls it."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import aiohttp

from coral_core.errors import ServingError
from coral_core.serving.control.gateway_calls import rows_of
from coral_core.serving.control.held import GatewayCall, GatewayRow

BY_COORDINATOR: Final = "X-Coral-Coordinator"
"""Header of a coordinator's calls: the gateway tells whoever asks when one was last there, who would name every instance."""
_TIMEOUT_S: Final = 3.0


class RejectedError(ServingError):
    """The gateway answers, and will not do this: a model that it does not serve, a name that is none."""


class GatewaySide:
    """`url` of the admin listener and its token; every call ends after 3 s."""

    def __init__(self, session: aiohttp.ClientSession, *, url: str, token: str) -> None:
        self._session, self._url = session, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", BY_COORDINATOR: "yes"}

    async def rows(self) -> list[GatewayRow]:
        """Its instances. Raises ServingError where it does not answer."""
        return rows_of(await self.call(GatewayCall(method="GET", path="/instances")))

    async def call(self, call: GatewayCall) -> Any:  # noqa: ANN401 - JSON
        """The answer. Raises RejectedError, and ServingError where the gateway does not answer or let us in."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._session.request(
                call.method, self._url + call.path, json=call.body, headers=self._headers, timeout=timeout
            ) as response:
                if response.status == 200:
                    return await response.json()
                said = await _said(response)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ServingError(f"the gateway does not answer: {str(error) or 'timed out'}", where=self._url) from None
        kind = RejectedError if response.status in (400, 404) else ServingError
        raise kind(f"the gateway answered {response.status}: {said}", where=call.path)


async def _said(response: aiohttp.ClientResponse) -> str:
    with contextlib.suppress(aiohttp.ClientError, ValueError, KeyError, TypeError):
        return str((await response.json())["error"]["message"])
    return "no reason given"
