"""`Provisioner` on EC2: RunInstances from a launch template, one node a call, found again by tag.

The launch template (made by the infrastructure code, one of the same name in every region) holds the image, role,
security groups and user data, no secret. Each call adds what differs: type, zone, market, tags, placement group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import Any, Final

from coral_core.cloud.aws_codes import REFUSALS, AwsApi, AwsError, as_failure, pages
from coral_core.cloud.provisioner import Listing, NodeOrder, Refusal, Refused, Started, StartOutcome
from coral_core.cloud.tags import FLEET_TAG, client_token, known_state, read_tags, write_tags
from coral_core.domain.fleet import FleetId, ForeignNode, Node, NodeState
from coral_core.domain.hardware import Market
from coral_core.errors import ProvisionError, unknown_name

_STATES: Final[Mapping[str, NodeState]] = {
    "pending": NodeState.PENDING,
    "running": NodeState.RUNNING,
    "stopping": NodeState.HALTED,
    "stopped": NodeState.HALTED,
    "shutting-down": NodeState.ENDING,
    "terminated": NodeState.GONE,
}
_NOTICES: Final = ["marked-for-termination", "marked-for-stop"]
_NOT_FOUND: Final = "InvalidInstanceID.NotFound"
_GROUP_EXISTS: Final = "InvalidPlacementGroup.Duplicate"
_GROUP_IN_USE: Final = "InvalidPlacementGroup.InUse"
_GROUP_UNKNOWN: Final = "InvalidPlacementGroup.Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsLaunch:
    """How nodes are launched. `subnets` maps a zone to its subnet; a zone without one uses the default network.

    `home_region` answers questions that concern no region in particular.
    """

    launch_template: str
    launch_template_version: str = "$Default"
    subnets: Mapping[str, str] = field(default_factory=dict)
    home_region: str = "us-east-1"


class AwsProvisioner:
    """A fleet on EC2; a node configuration's name is the instance type."""

    def __init__(self, api: AwsApi, launch: AwsLaunch) -> None:
        self._api, self._launch = api, launch
        self._regions: frozenset[str] = frozenset()

    @property
    def call_timeout_s(self) -> float:
        """Three times the request timeout: a start may have to make a placement group and be asked again."""
        return 3 * self._api.request_timeout_s

    def account(self) -> str:
        """The account number of the credentials."""
        return str(self._call("sts", self._launch.home_region, "get_caller_identity")["Account"])

    def describe(self, fleet: FleetId, region: str) -> Listing:
        """All instances with the fleet's tag, terminated ones for about an hour."""
        self._check_region(region)
        nodes: list[Node] = []
        foreign: list[ForeignNode] = []
        mine = [{"Name": f"tag:{FLEET_TAG}", "Values": [fleet.name]}]
        try:
            for reservation in pages(self._api, "ec2", region, "describe_instances", "Reservations", Filters=mine):
                for found in reservation["Instances"]:
                    node = _node(fleet, region, found, account=reservation["OwnerId"])
                    (nodes if isinstance(node, Node) else foreign).append(node)  # type: ignore[arg-type]  # sorted by type
            noticed = (
                self._noticed(region) if any(node.market is Market.SPOT and node.live for node in nodes) else set()
            )
            groups = self._api.call("ec2", region, "describe_placement_groups", Filters=mine)["PlacementGroups"]
        except AwsError as error:
            raise as_failure(error, where=region) from error
        prefix = _group_name(fleet, "")
        return Listing(
            nodes=tuple(replace(node, interrupted=node.node_id in noticed) for node in nodes),
            foreign=tuple(foreign),
            groups=tuple(
                sorted(g["GroupName"].removeprefix(prefix) for g in groups if g["GroupName"].startswith(prefix))
            ),
        )

    def start(self, fleet: FleetId, order: NodeOrder) -> StartOutcome:
        """RunInstances for one instance with a token made of its identity."""
        try:
            answer = self._run(fleet, order)
        except AwsError as error:
            # A group that was made a moment ago may not be seen yet.
            refusal = Refusal.THROTTLED if error.code == _GROUP_UNKNOWN else REFUSALS.get(error.code)
            if refusal is not None:
                return Refused(refusal=refusal, code=error.code, message=error.message)
            raise as_failure(error, where=order.region) from error
        node = _node(fleet, order.region, answer["Instances"][0], account=answer["OwnerId"])
        if isinstance(node, ForeignNode):
            raise ProvisionError(
                f"{node.node_id} was started and {node.reason}",
                where=order.region,
                fix="end it by hand, and see what changes tags at launch (a tag policy?)",
            )
        return Started(node=node)

    def stop(self, fleet: FleetId, region: str, nodes: Iterable[Node]) -> None:  # noqa: ARG002  # nodes are proven already
        """TerminateInstances; where one id is unknown, the others one by one."""
        ids = [node.node_id for node in nodes]
        try:
            self._api.call("ec2", region, "terminate_instances", InstanceIds=ids)
        except AwsError as error:
            if error.code != _NOT_FOUND:
                raise as_failure(error, where=region) from error
            for name in ids if len(ids) > 1 else ():
                self._stop_one(region, name)

    def release_group(self, fleet: FleetId, region: str, instance_id: str) -> bool:
        """DeletePlacementGroup."""
        try:
            self._api.call("ec2", region, "delete_placement_group", GroupName=_group_name(fleet, instance_id))
        except AwsError as error:
            if error.code not in {_GROUP_IN_USE, _GROUP_UNKNOWN}:
                raise as_failure(error, where=region) from error
            return error.code == _GROUP_UNKNOWN
        return True

    def _run(self, fleet: FleetId, order: NodeOrder) -> Mapping[str, Any]:
        request = _request(fleet, order, self._launch)
        try:
            return self._api.call("ec2", order.region, "run_instances", **request)
        except AwsError as error:
            if error.code != _GROUP_UNKNOWN or not order.grouped:
                raise
        self._make_group(fleet, order)
        return self._api.call("ec2", order.region, "run_instances", **request)

    def _stop_one(self, region: str, node_id: str) -> None:
        try:
            self._api.call("ec2", region, "terminate_instances", InstanceIds=[node_id])
        except AwsError as error:
            if error.code != _NOT_FOUND:
                raise as_failure(error, where=region) from error

    def _make_group(self, fleet: FleetId, order: NodeOrder) -> None:
        tags = [{"Key": FLEET_TAG, "Value": fleet.name}]
        try:
            self._api.call(
                "ec2",
                order.region,
                "create_placement_group",
                GroupName=_group_name(fleet, order.tags.instance_id),
                Strategy="cluster",
                TagSpecifications=[{"ResourceType": "placement-group", "Tags": tags}],
            )
        except AwsError as error:
            if error.code != _GROUP_EXISTS:
                raise

    def _noticed(self, region: str) -> set[str]:
        """Ids of spot instances that EC2 has announced to take back."""
        wish = [{"Name": "status-code", "Values": _NOTICES}]
        found = pages(self._api, "ec2", region, "describe_spot_instance_requests", "SpotInstanceRequests", Filters=wish)
        return {request["InstanceId"] for request in found if request.get("InstanceId")}

    def _check_region(self, region: str) -> None:
        """An unknown or disabled region is named at once: its address would only never answer."""
        if not self._regions:
            answer = self._call("ec2", self._launch.home_region, "describe_regions", AllRegions=True)
            self._regions = frozenset(
                found["RegionName"] for found in answer["Regions"] if found.get("OptInStatus") != "not-opted-in"
            )
        if region not in self._regions:
            wrong = unknown_name("region, or one not enabled for this account,", region, self._regions, where="regions")
            raise ProvisionError(wrong.what, where=wrong.where, fix=wrong.fix)

    def _call(self, service: str, region: str, operation: str, **parameters: Any) -> Mapping[str, Any]:  # noqa: ANN401  # the API's own shapes
        try:
            return self._api.call(service, region, operation, **parameters)
        except AwsError as error:
            raise as_failure(error, where=region) from error


def _request(fleet: FleetId, order: NodeOrder, launch: AwsLaunch) -> dict[str, Any]:
    """The parameters of RunInstances: a function of the order and the launch settings alone."""
    tags = [{"Key": key, "Value": value} for key, value in write_tags(fleet, order.tags).items()]
    spot = order.market is Market.SPOT
    kinds = ["instance", "volume", "network-interface", *(["spot-instances-request"] if spot else [])]
    subnet = launch.subnets.get(order.zone)
    group = {"GroupName": _group_name(fleet, order.tags.instance_id)} if order.grouped else {}
    request: dict[str, Any] = {
        "LaunchTemplate": {
            "LaunchTemplateName": launch.launch_template,
            "Version": launch.launch_template_version,
        },
        "InstanceType": order.tags.config,
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": client_token(fleet, order.tags.instance_id, order.tags.node),
        # A subnet fixes the zone; both at once EC2 takes only where they agree, so one is enough.
        "Placement": group if subnet else {"AvailabilityZone": order.zone, **group},
        # The agent on the node reads its tags from the metadata service, with session tokens only.
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "InstanceMetadataTags": "enabled"},
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
    }
    if subnet:
        request["SubnetId"] = subnet
    if spot:
        request["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    return request


def _node(fleet: FleetId, region: str, found: Mapping[str, Any], *, account: str) -> Node | ForeignNode:
    tags = read_tags(
        fleet,
        {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())},
        account=account,
        token=found.get("ClientToken", ""),
    )
    name = found["InstanceId"]
    if isinstance(tags, str):
        return ForeignNode(node_id=name, region=region, reason=tags)
    return Node(
        node_id=name,
        region=region,
        zone=found["Placement"]["AvailabilityZone"],
        market=Market.SPOT if found.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND,
        state=known_state(_STATES, found["State"]["Name"], where=region),
        launched_at=found["LaunchTime"].astimezone(UTC),
        tags=tags,
    )


def _group_name(fleet: FleetId, instance_id: str) -> str:
    return f"coral-{fleet.name}-{instance_id}"
