"""`Provisioner` on Google Compute Engine (extra `gcp`): **untried on the real cloud**.

Tested against a stand-in for the API, with the client's own messages and wire format.

The fleet is the label `coral-fleet`; the other tags are a JSON document in the instance's description, because labels
hold neither capitals nor dots. The name of a machine is its token: GCE refuses a second machine of the same name, which
makes starts idempotent and proves whose it is. (Ids of requests are not used: an order that failed, or whose machine is gone,
would not be tried again under the same id.) Placement groups are not made here, and the API announces no
preemption (a machine learns of it inside).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

from coral_core.cloud.provisioner import CloudBusyError, Listing, NodeOrder, Refusal, Refused, Started, StartOutcome
from coral_core.cloud.tags import FLEET_TAG, client_token, known_state, read_tags, write_tags
from coral_core.domain.fleet import FleetId, ForeignNode, Node, NodeState
from coral_core.domain.hardware import Market
from coral_core.errors import ProvisionError, unknown_name

_STATES: Final[Mapping[str, NodeState]] = {
    "PROVISIONING": NodeState.PENDING,
    "STAGING": NodeState.PENDING,
    "RUNNING": NodeState.RUNNING,
    "REPAIRING": NodeState.HALTED,
    "STOPPING": NodeState.HALTED,  # on its way to be stopped or deleted: the list does not say which
    "SUSPENDING": NodeState.HALTED,
    "SUSPENDED": NodeState.HALTED,
    "TERMINATED": NodeState.HALTED,  # GCE's word for stopped: a deleted machine is not listed at all
    "PENDING_STOP": NodeState.HALTED,
    "DEPROVISIONING": NodeState.ENDING,
}
_OPERATION_CODES: Final[Mapping[str, Refusal]] = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": Refusal.CAPACITY,
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": Refusal.CAPACITY,
    "RESOURCE_POOL_EXHAUSTED": Refusal.CAPACITY,
    "QUOTA_EXCEEDED": Refusal.QUOTA,
    "RATE_LIMIT_EXCEEDED": Refusal.THROTTLED,
    "INTERNAL_ERROR": Refusal.UNKNOWN,
}
"""Codes of a failed operation that are outcomes (GCE, "Troubleshooting VM creation")."""
_REASONS: Final[Mapping[str, Refusal]] = {
    "quotaExceeded": Refusal.QUOTA,
    "rateLimitExceeded": Refusal.THROTTLED,
    "userRateLimitExceeded": Refusal.THROTTLED,
}
_LABEL: Final = "coral-fleet"
_GONE_FIX: Final = "check the name and that the API is enabled in the project"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpLaunch:
    """How machines are launched: a global instance template of the project, and the zones of each region to be used."""

    project: str
    instance_template: str
    zones: Mapping[str, tuple[str, ...]]
    call_timeout_s: float = 60.0


@cache
def _compute() -> Any:  # noqa: ANN401  # a module that is only there with the extra, and too large to be type-checked
    """The client library, imported on first use."""
    try:
        return importlib.import_module("google.cloud.compute_v1")
    except ImportError as error:
        raise ProvisionError(
            "google-cloud-compute is not installed", where="provider gcp", fix="install the extra `gcp`"
        ) from error


def _clients() -> tuple[Any, Any]:
    """The real ones, with the credentials of the environment."""
    compute = _compute()
    try:
        return compute.InstancesClient(), compute.ZoneOperationsClient()
    except importlib.import_module("google.auth.exceptions").GoogleAuthError as error:
        raise ProvisionError(
            f"no usable credentials: {' '.join(str(error).split())[:200]}",
            where="provider gcp",
            fix="log in (`gcloud auth application-default login`), or run where a service account gives them",
        ) from error


class GcpProvisioner:
    """A fleet on GCE; a node configuration's name is the machine type. `clients` replaces the real ones in tests."""

    def __init__(self, launch: GcpLaunch, *, clients: tuple[Any, Any] | None = None) -> None:
        self._launch = launch
        self._instances, self._operations = clients or _clients()

    @property
    def call_timeout_s(self) -> float:
        """A start is an insert, a wait for its operation and a look at the machine, each within a third of this."""
        return self._launch.call_timeout_s

    def account(self) -> str:
        """The project: every request names it."""
        return self._launch.project

    def describe(self, fleet: FleetId, region: str) -> Listing:
        """All machines with the fleet's label in the zones of the region."""
        nodes: list[Node] = []
        foreign: list[ForeignNode] = []
        for zone in self._zones(region):
            wish = _compute().ListInstancesRequest(
                project=self._launch.project, zone=zone, filter=f"labels.{_LABEL}={fleet.name}"
            )
            try:
                with _Errors(region):
                    found = list(self._instances.list(request=wish, timeout=self._part_s, retry=None))
            except _RefusedError as error:
                raise _as_failure(error, region) from error
            for machine in found:
                node = _node(fleet, region, zone, machine, project=self._launch.project)
                (nodes if isinstance(node, Node) else foreign).append(node)  # type: ignore[arg-type]  # sorted by type
        return Listing(nodes=tuple(nodes), foreign=tuple(foreign))

    def start(self, fleet: FleetId, order: NodeOrder) -> StartOutcome:
        """Insert one machine and wait for the operation; a machine of this name is looked at, not made again."""
        name = client_token(fleet, order.tags.instance_id, order.tags.node)
        request = _compute().InsertInstanceRequest(
            project=self._launch.project,
            zone=order.zone,
            source_instance_template=f"global/instanceTemplates/{self._launch.instance_template}",
            instance_resource=_machine(fleet, order, name),
        )
        try:
            with _Errors(order.region):
                operation = self._instances.insert_unary(request=request, timeout=self._part_s, retry=None)
                self._wait(order, operation)
        except _RefusedError as error:
            if error.code == "alreadyExists":
                return self._existing(fleet, order, name)
            if error.refusal is None:
                raise ProvisionError(f"start: {error.code}: {error.message}", where=order.region) from error
            return Refused(refusal=error.refusal, code=error.code, message=error.message)
        return self._existing(fleet, order, name)

    def stop(self, fleet: FleetId, region: str, nodes: Iterable[Node]) -> None:
        """Delete machines, one request each; the operations go on by themselves."""
        nodes = tuple(nodes)
        for node in nodes:
            request = _compute().DeleteInstanceRequest(
                project=self._launch.project,
                zone=node.zone,
                instance=client_token(fleet, node.tags.instance_id, node.tags.node),
            )
            try:
                with _Errors(region):
                    self._instances.delete_unary(request=request, timeout=self.call_timeout_s / len(nodes), retry=None)
            except _RefusedError as error:
                if error.code != "notFound":
                    raise _as_failure(error, region) from error

    def release_group(self, fleet: FleetId, region: str, instance_id: str) -> bool:  # noqa: ARG002  # there are none
        """True: no groups are made here."""
        return True

    @property
    def _part_s(self) -> float:
        return self._launch.call_timeout_s / 3

    def _zones(self, region: str) -> tuple[str, ...]:
        if region not in self._launch.zones:
            wrong = unknown_name("region", region, self._launch.zones, where="regions")
            raise ProvisionError(wrong.what, where=wrong.where, fix=wrong.fix)
        return self._launch.zones[region]

    def _wait(self, order: NodeOrder, operation: Any) -> None:  # noqa: ANN401  # the client's message
        """Wait for the operation; _RefusedError where it fails or goes on for too long."""
        done = _compute().Operation.Status.DONE
        if operation.status != done:
            request = _compute().WaitZoneOperationRequest(
                project=self._launch.project, zone=order.zone, operation=operation.name
            )
            operation = self._operations.wait(request=request, timeout=self._part_s, retry=None)
        if operation.status != done:
            raise _RefusedError(Refusal.UNKNOWN, "notDone", f"operation {operation.name} goes on")
        for error in operation.error.errors:
            raise _RefusedError(_OPERATION_CODES.get(error.code), error.code, error.message)

    def _existing(self, fleet: FleetId, order: NodeOrder, name: str) -> StartOutcome:
        """The machine of this name: that of the order, or one that another request has made."""
        request = _compute().GetInstanceRequest(project=self._launch.project, zone=order.zone, instance=name)
        try:
            with _Errors(order.region):
                machine = self._instances.get(request=request, timeout=self._part_s, retry=None)
        except _RefusedError as error:  # it may have gone again, or the cloud may be busy: ask once more
            return Refused(refusal=Refusal.UNKNOWN, code=error.code, message=error.message)
        node = _node(fleet, order.region, order.zone, machine, project=self._launch.project)
        if isinstance(node, ForeignNode) or (node.tags, node.market) != (order.tags, order.market):
            return Refused(
                refusal=Refusal.CONFLICT, code="alreadyExists", message=f"{name} was made by another request"
            )
        return Started(node=node)


def _machine(fleet: FleetId, order: NodeOrder, name: str) -> Any:  # noqa: ANN401  # the client's message
    compute = _compute()
    spot = order.market is Market.SPOT
    scheduling = compute.Scheduling(
        provisioning_model="SPOT" if spot else "STANDARD",
        instance_termination_action="DELETE" if spot else None,
        on_host_maintenance="TERMINATE",  # machines with GPUs cannot be moved
        automatic_restart=not spot,
    )
    return compute.Instance(
        name=name,
        machine_type=f"zones/{order.zone}/machineTypes/{order.tags.config}",
        labels={_LABEL: fleet.name},
        description=json.dumps(write_tags(fleet, order.tags), sort_keys=True),
        scheduling=scheduling,
    )


def _node(fleet: FleetId, region: str, zone: str, machine: Any, *, project: str) -> Node | ForeignNode:  # noqa: ANN401  # as above
    found = {**_description(machine.description), FLEET_TAG: machine.labels.get(_LABEL, "")}
    tags = read_tags(fleet, found, account=project, token=machine.name)
    if isinstance(tags, str):
        return ForeignNode(node_id=machine.name, region=region, reason=tags)
    return Node(
        node_id=machine.name,
        region=region,
        zone=zone,
        market=Market.SPOT if machine.scheduling.provisioning_model == "SPOT" else Market.ON_DEMAND,
        state=known_state(_STATES, machine.status, where=region),
        launched_at=datetime.fromisoformat(machine.creation_timestamp).astimezone(UTC),
        tags=tags,
    )


def _description(text: str) -> dict[str, str]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


class _RefusedError(Exception):
    """A failed request: what it means for a start (None: nothing that passes), its reason and message."""

    def __init__(self, refusal: Refusal | None, code: str, message: str) -> None:
        super().__init__(code, message)
        self.refusal, self.code, self.message = refusal, code, " ".join(message.split())[:300]


class _Errors:
    """Maps the client's exceptions: outcomes and passing trouble to _RefusedError, the rest to ProvisionError."""

    def __init__(self, region: str) -> None:
        self._region = region

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, _RefusedError | ProvisionError):
            return
        mapped = _mapped(error, self._region)
        if mapped is not None:
            raise mapped from error


def _mapped(error: BaseException, region: str) -> Exception | None:
    api = importlib.import_module("google.api_core.exceptions")
    auth = importlib.import_module("google.auth.exceptions")
    if isinstance(error, auth.RefreshError | auth.DefaultCredentialsError):
        return ProvisionError(str(error), where=region, fix="renew the Google credentials (log in again)")
    if isinstance(error, auth.TransportError | ConnectionError | TimeoutError | api.RetryError):
        return _RefusedError(Refusal.UNKNOWN, type(error).__name__, str(error))
    if not isinstance(error, api.GoogleAPICallError):
        return None
    reasons = [detail.get("reason", "") for detail in error.errors if isinstance(detail, dict)]
    reason = reasons[0] if reasons else type(error).__name__
    refusal = next((_REASONS[r] for r in reasons if r in _REASONS), None)
    if isinstance(error, api.TooManyRequests):
        refusal = Refusal.THROTTLED
    elif isinstance(error, api.ServerError):
        refusal = Refusal.UNKNOWN
    elif isinstance(error, api.NotFound) and "machineTypes" in error.message:
        refusal = Refusal.NOT_OFFERED
    if refusal is not None or isinstance(error, api.NotFound | api.Conflict):
        code = "notFound" if isinstance(error, api.NotFound) else reason
        return _RefusedError(refusal, "alreadyExists" if isinstance(error, api.Conflict) else code, error.message)
    fixes = {401: "check the Google credentials", 403: "grant the flow's service account this permission"}
    return ProvisionError(f"{reason}: {error.message}", where=region, fix=fixes.get(int(error.code or 0), _GONE_FIX))


def _as_failure(error: _RefusedError, region: str) -> ProvisionError:
    text = f"{error.code}: {error.message}"
    if error.refusal is not None and error.refusal.passing:
        return CloudBusyError(text, where=region)
    return ProvisionError(text, where=region, fix=_GONE_FIX)
