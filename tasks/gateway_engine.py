"""The serving side of a reallocation: weights, readiness and draining, through the admin side of a running gateway."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.fleet_view import Instance
from coral_core.errors import ServingError
from tasks.direct_http import open_directly

_COORDINATED_S: Final = 10.0
"""A coordinator that has not asked for so long is taken to be away; it asks every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayEngine:
    """Implements `Engine`. `url` is the admin listener's, `token` its token; a call ends after `timeout_s`."""

    url: str
    token: str
    timeout_s: float = 10.0

    def ready(self, instance: Instance) -> Readiness:
        """What the gateway found when it last asked the engine, or was told of its failure.

        Unknown where it cannot be asked, and where it lacks the instance while no coordinator is there to name it: a gateway that
        has started anew knows nobody, and all may be well.
        """
        try:
            said = self._call("GET", "/instances")
        except ServingError:
            return Readiness.UNKNOWN
        row: dict[str, Any] = next((row for row in said["instances"] if row["name"] == instance.instance_id), {})
        ago_s = said.get("coordinator_s_ago")
        if not row and (ago_s is None or ago_s > _COORDINATED_S):
            return Readiness.UNKNOWN
        if row.get("failed"):
            return Readiness.FAILED
        # A degraded one may shortly get no requests, because those on the lost node failed: whoever watches over it knows better.
        if row.get("weight_frac", 1.0) < 1 and (row["ready"] or row["reported"]):
            return Readiness.DEGRADED
        if row.get("reported") is False:  # its coordinator gives it up once its engine's own limit is over
            return Readiness.STARTING
        return Readiness.READY if row.get("ready") else Readiness.NOT_READY

    def set_weight(self, instance: Instance, weight: float) -> None:
        """Route by this weight. ServingError for an instance above 0 that has not been registered with its address."""
        self._call("PUT", f"{_path(instance)}/weight", {"weight": weight})

    def drain(self, instance: Instance) -> bool:
        """Take no new requests; True once none is in flight."""
        return bool(self._call("POST", f"{_path(instance)}/drain")["drained"])

    def _call(self, method: str, path: str, document: Mapping[str, object] | None = None) -> Any:  # noqa: ANN401 - JSON
        body = None if document is None else json.dumps(document).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)  # noqa: S310 - configured
        try:
            with open_directly(request, timeout=self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise ServingError(f"the gateway answered {error.code}: {_said(error.read())}", where=path) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServingError(f"the gateway does not answer: {error}", where=self.url + path) from None


def _path(instance: Instance) -> str:
    return f"/instances/{quote(instance.instance_id, safe='')}"


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"
