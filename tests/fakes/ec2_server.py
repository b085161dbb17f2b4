"""An EC2 API on loopback: moto behind a wrapper that adds what it lacks, and faults.

moto's EC2 has no idempotency by client token, no placement groups, no spot notices, no capacity, no prices and no
quotas. The wrapper answers these itself, the last two from small JSON files in the shape of the API's answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ACCOUNT = "123456789012"
RECORDED = Path(__file__).with_name("ec2_recorded")
TEMPLATE = "coral-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The next `times` requests of `action` whose parameters contain `match` (after `skip` of them) go wrong.

    `code` empty: the request works, its answer comes `delay_s` later. "*" matches every action.
    """

    action: str
    code: str = ""
    status: int = 400
    match: dict[str, str] = field(default_factory=dict)
    times: int = 1
    skip: int = 0
    delay_s: float = 0.0


@dataclass(slots=True)
class Ec2Server:
    """What a test sees and sets: rules, capacity, prices, quotas, and the log of requests (action, parameters)."""

    endpoint: str = ""
    rules: list[Rule] = field(default_factory=list)
    log: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    capacity: dict[tuple[str, str], int] = field(default_factory=dict)
    quota_vcpus: dict[tuple[str, str], float] = field(default_factory=dict)
    price_factor: dict[tuple[str, str], float] = field(default_factory=dict)
    noticed: dict[str, str] = field(default_factory=dict)
    tokens: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    groups: dict[tuple[str, str], str] = field(default_factory=dict)
    moto: Any = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def count(self, action: str) -> int:
        return sum(name == action for name, _ in self.log)

    def quotas(self, region: str) -> dict[str, float]:
        """vCPUs by quota code."""
        return {**_recorded("quotas.json"), **{c: v for (r, c), v in self.quota_vcpus.items() if r == region}}

    def machines(self, region: str) -> list[Any]:
        """moto's own records of instances that are not terminated."""
        from moto.backends import get_backend

        found = get_backend("ec2")[ACCOUNT][region].all_instances()
        return [m for m in found if m.state not in {"terminated", "shutting-down"}]

    def clear(self) -> None:
        """As if nothing had ever been asked: no instances, rules or settings; launch templates stay."""
        for region in ("us-east-1", "us-west-2"):
            from moto.backends import get_backend

            backend = get_backend("ec2")[ACCOUNT][region]
            backend.reservations.clear()
            backend.tags.clear()
        for setting in (self.rules, self.log, self.capacity, self.quota_vcpus, self.price_factor):
            setting.clear()
        for state in (self.noticed, self.tokens, self.groups):
            state.clear()

    # The application ---------------------------------------------------------------------------------------------

    def __call__(self, environ, start_response):
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        parameters = {} if target else dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
        action = target.partition(".")[2] or parameters.get("Action", "")
        region = environ.get("HTTP_AUTHORIZATION", "///").split("/")[2] if action else ""
        with self.lock:
            self.log.append((action, {**parameters, "region": region}))
            rule = self._next_rule(action, parameters)
        if rule is not None and rule.code:
            return _answer(start_response, _error(rule.code, "as ruled"), rule.status)
        with self.lock:
            status, text, kind = self._do(action, region, parameters, body, environ)
        if rule is not None:
            time.sleep(rule.delay_s)
        return _answer(start_response, text, status, kind)

    def _next_rule(self, action: str, parameters: dict[str, str]) -> Rule | None:
        for index, rule in enumerate(self.rules):
            if rule.action in {action, "*"} and rule.match.items() <= parameters.items():
                if rule.skip:
                    self.rules[index] = replace(rule, skip=rule.skip - 1)
                    return None
                self.rules[index : index + 1] = [replace(rule, times=rule.times - 1)] if rule.times > 1 else []
                return rule
        return None

    def _do(self, action, region, parameters, body, environ):
        own = getattr(self, f"_own_{action}", None)
        if own is not None:
            answer = own(region, parameters, json.loads(body) if not parameters else {})
            if answer is not None:
                return answer
        status, text = self._forward(environ, body)
        if action == "RunInstances" and status == 200:
            key = (region, parameters["ClientToken"])
            self.tokens[key] = (_without_signature(parameters), text)
        return status, text, "text/xml"

    def _forward(self, environ, body: bytes) -> tuple[int, bytes]:
        import io

        seen: list[int] = []
        chunks = self.moto(
            {**environ, "wsgi.input": io.BytesIO(body)}, lambda status, *_: seen.append(int(status.split()[0]))
        )
        text = b"".join(chunks)
        return seen[0], text

    # What moto lacks -------------------------------------------------------------------------------------------

    def _own_RunInstances(self, region, parameters, _json):  # noqa: N802  # the API's name
        token = parameters.get("ClientToken", "")
        known = self.tokens.get((region, token))
        if known is not None:
            if known[0] != _without_signature(parameters):
                return 400, _error("IdempotentParameterMismatch", "the token was used by another request"), "text/xml"
            return 200, known[1], "text/xml"
        zone, kind = parameters.get("Placement.AvailabilityZone", ""), parameters.get("InstanceType", "")
        machines = self.machines(region)
        held = sum((m.placement.zone, m.instance_type) == (zone, kind) for m in machines)
        if held >= self.capacity.get((zone, kind), held + 1):
            return 500, _error("InsufficientInstanceCapacity", f"no {kind} in {zone}"), "text/xml"
        spot = parameters.get("InstanceMarketOptions.MarketType") == "spot"
        used = sum(_VCPUS[m.instance_type] for m in machines if (m.lifecycle == "spot") == spot)
        if used + _VCPUS[kind] > self.quotas(region)["L-3819A6DF" if spot else "L-DB2E81BA"]:
            code = "MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded"
            return 400, _error(code, f"{used} vCPUs are in use"), "text/xml"
        group = parameters.get("Placement.GroupName")
        if group and (region, group) not in self.groups:
            return 400, _error("InvalidPlacementGroup.Unknown", group), "text/xml"
        return None

    def _own_CreatePlacementGroup(self, region, parameters, _json):  # noqa: N802  # the API's name
        key = (region, parameters["GroupName"])
        if key in self.groups:
            return 400, _error("InvalidPlacementGroup.Duplicate", key[1]), "text/xml"
        self.groups[key] = parameters["TagSpecification.1.Tag.1.Value"]
        return 200, _xml("CreatePlacementGroup", "<return>true</return>"), "text/xml"

    def _own_DescribePlacementGroups(self, region, parameters, _json):  # noqa: N802  # the API's name
        fleet = parameters["Filter.1.Value.1"]
        names = [name for (where, name), owner in self.groups.items() if (where, owner) == (region, fleet)]
        items = "".join(f"<item><groupName>{escape(name)}</groupName></item>" for name in names)
        return 200, _xml("DescribePlacementGroups", f"<placementGroupSet>{items}</placementGroupSet>"), "text/xml"

    def _own_DeletePlacementGroup(self, region, parameters, _json):  # noqa: N802  # the API's name
        name = parameters["GroupName"]
        if (region, name) not in self.groups:
            return 400, _error("InvalidPlacementGroup.Unknown", name), "text/xml"
        del self.groups[region, name]
        return 200, _xml("DeletePlacementGroup", "<return>true</return>"), "text/xml"

    def _own_DescribeSpotInstanceRequests(self, region, parameters, _json):  # noqa: N802  # the API's name
        names = [name for name, where in self.noticed.items() if where == region]
        items = "".join(f"<item><instanceId>{name}</instanceId></item>" for name in names)
        text = f"<spotInstanceRequestSet>{items}</spotInstanceRequestSet>"
        return 200, _xml("DescribeSpotInstanceRequests", text), "text/xml"

    def _own_DescribeSpotPriceHistory(self, region, parameters, _json):  # noqa: N802  # the API's name
        kinds = {value for name, value in parameters.items() if name.startswith("InstanceType")}
        changed = datetime.now(UTC).strftime("%Y-%m-%dT%H:00:00.000Z")
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{usd * self.price_factor.get((region, kind), 1.0):.6f}</spotPrice>"
            f"<timestamp>{changed}</timestamp><availabilityZone>{zone}</availabilityZone></item>"
            for kind, zones in _recorded("spot.json").get(region, {}).items()
            for zone, usd in zones.items()
            if kind in kinds
        )
        text = f"<spotPriceHistorySet>{items}</spotPriceHistorySet>"
        return 200, _xml("DescribeSpotPriceHistory", text), "text/xml"

    def _own_GetProducts(self, _region, _parameters, wish):  # noqa: N802  # the API's name
        asked = {item["Field"]: item["Value"] for item in wish["Filters"]}
        kind, region = asked["instanceType"], asked["regionCode"]
        usd = _recorded("on_demand.json").get(region, {}).get(kind)
        factor = self.price_factor.get((region, kind), 1.0)
        products = [] if usd is None else [json.dumps(_product(kind, region, usd * factor))]
        text = json.dumps({"FormatVersion": "aws_v1", "PriceList": products}).encode()
        return 200, text, "application/x-amz-json-1.1"

    def _own_ListServiceQuotas(self, region, _parameters, _json):  # noqa: N802  # the API's name
        quotas = [{"ServiceCode": "ec2", "QuotaCode": code, "Value": v} for code, v in self.quotas(region).items()]
        return 200, json.dumps({"Quotas": quotas}).encode(), "application/x-amz-json-1.1"


_VCPUS = {"g5.xlarge": 4, "g6.xlarge": 4, "g6e.xlarge": 4, "g5.12xlarge": 48}
"""All types here count in the same pool of quotas: running G and VT instances."""


def _product(kind: str, region: str, usd_per_h: float) -> dict[str, Any]:
    price = {"unit": "Hrs", "pricePerUnit": {"USD": f"{usd_per_h:.10f}"}}
    return {
        "product": {"attributes": {"instanceType": kind, "regionCode": region}},
        "terms": {"OnDemand": {"sku.term": {"priceDimensions": {"sku.term.rate": price}}}},
    }


def _recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / name).read_text(encoding="utf-8"))["values"]


def _without_signature(parameters: dict[str, str]) -> str:
    return json.dumps({k: v for k, v in parameters.items() if not k.startswith("X-Amz")}, sort_keys=True)


def _xml(action: str, inner: str) -> bytes:
    name = f"{action}Response"
    return f'<{name} xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>{inner}</{name}>'.encode()


def _error(code: str, message: str) -> bytes:
    inner = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    return f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>r</RequestID></Response>".encode()


def _answer(start_response, text: bytes, status: int, kind: str = "text/xml"):
    start_response(f"{status} -", [("Content-Type", kind), ("Content-Length", str(len(text)))])
    return [text]


@contextlib.contextmanager
def ec2_server() -> Iterator[Ec2Server]:
    """The server on a free loopback port, with the launch template in two regions; moto's state is cleared first."""
    os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # 12 s of 1,301 images that nobody here reads
    import boto3
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    for name in ("ec2", "sts"):
        get_backend(name).reset()
    server = Ec2Server(moto=DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, server, threaded=True)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        for region in ("us-east-1", "us-west-2"):
            client = boto3.client(
                "ec2",
                region_name=region,
                endpoint_url=server.endpoint,
                aws_access_key_id="testing",
                aws_secret_access_key="testing",
            )
            client.create_launch_template(
                LaunchTemplateName=TEMPLATE, LaunchTemplateData={"ImageId": "ami-12345678", "KeyName": "none"}
            )
            client.close()
        server.log.clear()
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
