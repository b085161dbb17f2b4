"""The admin side, on a listener of its own: whoever runs the fleet tells which instances there are and how to weigh them.

GET /instances, PUT and DELETE /instances/NAME, PUT /instances/NAME/weight, PUT /instances/NAME/readiness,
POST /instances/NAME/drain, POST /drain (the whole gateway), GET /metrics, GET /health. Every call may be repeated. All but
/health need the header Authorization: Bearer TOKEN.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from coral_core.domain.workload import Phase
from coral_core.errors import CoralError, InputError, ServingError
from coral_core.serving.asgi import ClientGoneError, Receive, Scope, Send, answer, header, lifespan, read_body, refuse
from coral_core.serving.control.gateway_side import BY_COORDINATOR
from coral_core.serving.gateway import Gateway
from coral_core.serving.keys import unauthorized
from coral_core.serving.metrics import CONTENT_TYPE
from coral_core.serving.refusals import RefusedError, bad_request
from coral_core.serving.table import InstanceSpec, Member

_MOST_BYTES: Final = 1 << 16
_LIMIT_S: Final = 10.0
_MOST_REASON: Final = 2000
T = TypeVar("T")


class _Instance(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    phase: Phase
    url: str
    region: str = "local"
    weight: float = 0.0


class _Weight(msgspec.Struct, forbid_unknown_fields=True):
    weight: float


class _Readiness(msgspec.Struct, forbid_unknown_fields=True):
    ready: bool
    failed: str = ""
    weight_frac: float = 1.0


def checked_token(token: str) -> str:
    """The token, if it is long enough and fits into a header. Raises InputError where not."""
    if len(token) < 32:
        raise InputError("the admin token has less than 32 characters", fix="make one: openssl rand -hex 32")
    if not re.fullmatch(r"[!-~]+", token):
        what = "the admin token is not one line of printable ASCII without blanks"
        raise InputError(what, fix="make one: openssl rand -hex 32")
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """The ASGI application of the admin listener. `token`: at least 32 characters, compared in constant time."""

    gateway: Gateway
    token: str

    def __post_init__(self) -> None:
        checked_token(self.token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        try:
            await self._route(scope, receive, send)
        except RefusedError as error:
            await refuse(send, error)
        except CoralError as error:
            status, code = (404, "unknown_instance") if isinstance(error, ServingError) else (400, "invalid_value")
            await refuse(send, RefusedError(str(error), status=status, code=code))
        except ClientGoneError:
            return

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await answer(send, 200, b'{"status":"ok"}')
            return
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self.token.encode()):
            raise unauthorized("the admin token is missing or not right")
        if (scope["method"], scope["path"]) == ("GET", "/metrics"):
            await answer(send, 200, self.gateway.metrics.text(), [(b"content-type", CONTENT_TYPE.encode())])
            return
        if header(scope, BY_COORDINATOR.lower().encode()) is not None:
            self.gateway.coordinated_s = self.gateway.clock.monotonic_s()
        has_body = scope["method"] == "PUT"
        body = await read_body(scope, receive, most_bytes=_MOST_BYTES, limit_s=_LIMIT_S) if has_body else b""
        await answer(send, 200, msgspec.json.encode(self._done(scope["method"], scope["path"], body)))

    def _done(self, method: str, path: str, body: bytes) -> object:
        """What the call answers, when it has been carried out."""
        gateway = self.gateway
        match method, path.strip("/").split("/"):
            case "GET", ["instances"]:
                since_s = gateway.coordinated_s
                ago_s = None if since_s is None else gateway.clock.monotonic_s() - since_s
                return {"instances": [_row(one) for one in gateway.table.members], "coordinator_s_ago": ago_s}
            case "POST", ["drain"]:
                gateway.draining = True
                return {"drained": gateway.running == 0, "in_flight": gateway.running}
            case _, ["instances", name, *what] if len(what) < 2 and (call := _CALLS.get((method, "".join(what)))):
                return call(gateway, name, body)
        raise RefusedError(f"there is no {method} {path[:100]}", status=404, code="not_found")


def _register(gateway: Gateway, name: str, body: bytes) -> dict[str, object]:
    said = msgspec.structs.asdict(_parsed(body, _Instance))
    return _row(gateway.table.register(InstanceSpec(name=name, **said)))


def _remove(gateway: Gateway, name: str, _body: bytes) -> dict[str, object]:
    gateway.table.remove(name)
    gateway.metrics.forget(name)
    return {}


def _weigh(gateway: Gateway, name: str, body: bytes) -> dict[str, object]:
    gateway.table.set_weight(name, _parsed(body, _Weight).weight)
    return {}


def _report(gateway: Gateway, name: str, body: bytes) -> dict[str, object]:
    said = _parsed(body, _Readiness)
    gateway.table.report(name, ready=said.ready, failed=said.failed[:_MOST_REASON], weight_frac=said.weight_frac)
    return {}


def _drain(gateway: Gateway, name: str, _body: bytes) -> dict[str, object]:
    drained, member = gateway.table.drain(name), gateway.table.find(name)
    return {"drained": drained, "in_flight": member.in_flight if member else 0}


def _parsed(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise bad_request(str(error), code="invalid_json") from None


def _row(one: Member) -> dict[str, object]:
    return {
        "name": one.spec.name,
        "model": one.spec.model,
        "phase": one.spec.phase,
        "url": one.spec.url,
        "region": one.spec.region,
        "weight": one.weight,
        "weight_frac": one.weight_frac,
        "ready": one.ready,
        "answers": one.answers,
        "silent_probes": one.silent_probes,
        "reported": one.reported,
        "failed": one.failed,
        "draining": one.draining,
        "in_flight": one.in_flight,
    }


_CALLS: Final[Mapping[tuple[str, str], Callable[[Gateway, str, bytes], dict[str, object]]]] = {
    ("PUT", ""): _register,
    ("DELETE", ""): _remove,
    ("PUT", "weight"): _weigh,
    ("PUT", "readiness"): _report,
    ("POST", "drain"): _drain,
}
