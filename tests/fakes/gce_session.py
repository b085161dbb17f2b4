"""Google Compute Engine in memory, below the client library: its real messages, JSON and errors pass through here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

PROJECT = "demo-project"
ZONES = {"us-central1": ("us-central1-a", "us-central1-b")}


@dataclass(eq=False)
class Gce:
    """Machines by (zone, name) as the API's JSON; `faults` is a list of (operation, kind, times)."""

    machines: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[list[Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    by_request_id: dict[str, str] = field(default_factory=dict)

    def clients(self) -> tuple[Any, Any]:
        """The library's own clients over this session."""
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import compute_v1
        from google.cloud.compute_v1.services.instances.transports import InstancesRestTransport
        from google.cloud.compute_v1.services.instances.transports.base import DEFAULT_CLIENT_INFO
        from google.cloud.compute_v1.services.zone_operations.transports import ZoneOperationsRestTransport

        made = []
        for client, transport in (
            (compute_v1.InstancesClient, InstancesRestTransport),
            (compute_v1.ZoneOperationsClient, ZoneOperationsRestTransport),
        ):
            wire = transport(credentials=AnonymousCredentials())
            wire._session.close()
            wire._session = self
            wire._prep_wrapped_messages(DEFAULT_CLIENT_INFO)  # the session is part of the methods' keys
            made.append(client(transport=wire))
        return made[0], made[1]

    # What the library calls ------------------------------------------------------------------------------------

    def get(self, url, **given):
        return self._answer("get", url, given)

    def post(self, url, **given):
        return self._answer("post", url, given)

    def delete(self, url, **given):
        return self._answer("delete", url, given)

    def close(self) -> None:
        pass

    def _answer(self, method: str, url: str, given: dict[str, Any]) -> Any:
        match = re.search(r"/projects/([^/]+)/zones/([^/]+)/(instances|operations)(?:/([^/]+))?(/wait)?$", url)
        assert match, url
        _, zone, kind, name, wait = match.groups()
        operation = {
            ("get", "instances", False): "list",
            ("get", "instances", True): "look",
            ("post", "instances", False): "insert",
            ("delete", "instances", True): "delete",
            ("post", "operations", True): "wait",
        }[method, kind, bool(name)]
        self.requests.append(operation)
        self.timeouts_s.append(given["timeout"])
        assert bool(wait) == (operation == "wait")
        fault = self._fault(operation)
        if fault in _HTTP:
            return _response(method, url, *_HTTP[fault])
        if fault == "no_answer":
            raise ConnectionError("no answer")
        answer = getattr(self, f"_{operation}")(zone, name, given, fault)
        if fault == "lost":
            raise ConnectionError("the answer was lost")
        return _response(method, url, *answer)

    def _fault(self, operation: str) -> str:
        for fault in self.faults:
            if fault[0] == operation and fault[2] > 0:
                fault[2] -= 1
                return str(fault[1])
        return ""

    def _list(self, zone, _name, given, _fault):
        wish = dict(given["params"])["filter"]
        label, value = re.fullmatch(r"labels\.([\w-]+)=([\w-]+)", wish).groups()
        found = [m for (where, _), m in self.machines.items() if where == zone and m["labels"].get(label) == value]
        return 200, {"items": found}

    def _look(self, zone, name, _given, _fault):
        machine = self.machines.get((zone, name))
        return (
            (200, machine) if machine else (404, _error("notFound", f"The resource 'instances/{name}' was not found"))
        )

    def _insert(self, zone, _name, given, fault):
        machine = json.loads(given["data"])
        assert dict(given["params"])["sourceInstanceTemplate"] == "global/instanceTemplates/coral-node"
        key = (zone, machine["name"])
        request_id = dict(given["params"]).get("requestId", "")
        if request_id in self.by_request_id:  # ignored: the answer is the first one's operation, whatever came of it
            return 200, {"name": self.by_request_id[request_id], "status": "RUNNING"}
        if key in self.machines:
            return 409, _error("alreadyExists", "The resource already exists")
        number = f"operation-{len(self.operations)}"
        failure = {"error": {"errors": [{"code": fault, "message": "as scripted"}]}} if fault.isupper() else {}
        self.operations[number] = {"name": number, "status": "DONE", **failure}
        if request_id:
            self.by_request_id[request_id] = number
        if not failure:
            created = {"status": "RUNNING", "creationTimestamp": "2026-11-29T12:00:00.000-08:00"}
            self.machines[key] = {"labels": {}, **machine, **created}
        return 200, {"name": number, "status": "RUNNING"}

    def _wait(self, _zone, name, _given, fault):
        return 200, {**self.operations[name], **({"status": "RUNNING"} if fault == "slow" else {})}

    def _delete(self, zone, name, _given, _fault):
        if (zone, name) not in self.machines:
            return 404, _error("notFound", "The resource was not found")
        del self.machines[zone, name]
        return 200, {"name": "operation-delete", "status": "RUNNING"}


def _error(reason: str, message: str, code: int = 404) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "errors": [{"reason": reason, "message": message}]}}


_HTTP = {
    "denied": (403, _error("forbidden", "Required 'compute.instances' permission", 403)),
    "expired": (401, _error("authError", "Invalid Credentials", 401)),
    "throttled": (403, _error("rateLimitExceeded", "Rate Limit Exceeded", 403)),
    "too_many": (429, _error("tooMany", "Too many", 429)),
    "unavailable": (503, _error("backendError", "Backend Error", 503)),
    "not_offered": (404, _error("notFound", "The resource 'zones/z/machineTypes/x' was not found")),
}


def _response(method: str, url: str, status: int, content: dict[str, Any]) -> Any:
    import requests

    response = requests.Response()
    response.status_code = status
    response._content = json.dumps(content).encode()
    response.headers["Content-Type"] = "application/json"
    response.request = requests.Request(method.upper(), url).prepare()
    return response
