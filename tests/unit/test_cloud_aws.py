"""The AWS adapters without a server: requests as built, answers as read, codes as meant."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest

from coral_core.clock import ManualClock
from coral_core.cloud.aws_codes import REFUSALS, AwsError, as_failure, pages
from coral_core.cloud.aws_provisioner import AwsLaunch, AwsProvisioner
from coral_core.cloud.aws_sources import aws_sources
from coral_core.cloud.provisioner import CloudBusyError, NodeOrder, Refusal, Refused, Started
from coral_core.cloud.tags import check_fleet_name, client_token, instance_id, read_tags, write_tags
from coral_core.domain.fleet import FleetId, NodeState, NodeTags, spec_of
from coral_core.domain.hardware import Market
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError, ProvisionError
from tests.fakes.fleet_cases import FLEET, START

TAGS = NodeTags(
    instance_id="d-two-00", template_id="d-two", model="m", phase=Phase.DECODE, config="g5.xlarge",
    stage=1, node=1, nodes=2, epoch=5,
)  # fmt: skip


@dataclass
class Scripted:
    """An API that answers from a table of operation -> answers in turn (an exception is raised)."""

    answers: dict[str, list[object]]
    request_timeout_s: float = 10.0
    calls: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)

    def call(self, service, region, operation, **parameters):
        self.calls.append((operation, region, parameters))
        answers = self.answers[operation]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def found(tags: NodeTags = TAGS, *, state: str = "running", fleet: FleetId = FLEET, **changes) -> dict[str, object]:
    pairs = [{"Key": k, "Value": v} for k, v in write_tags(fleet, tags).items()]
    return {
        "InstanceId": f"i-{tags.node}",
        "Tags": pairs,
        "ClientToken": client_token(fleet, tags.instance_id, tags.node),
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "State": {"Name": state},
        "LaunchTime": START,
        "InstanceType": "g5.xlarge",
        **changes,
    }


def order(market: Market = Market.ON_DEMAND) -> NodeOrder:
    return NodeOrder(region="us-east-1", zone="us-east-1a", market=market, tags=TAGS)


def ran(*instances) -> dict[str, object]:
    return {"OwnerId": FLEET.account, "Instances": list(instances)}


def test_a_request_holds_all_that_a_node_must_have():
    api = Scripted({"run_instances": [ran(found())]})
    launch = AwsLaunch(launch_template="coral-node", launch_template_version="7")
    outcome = AwsProvisioner(api, launch).start(FLEET, order(Market.SPOT))
    assert isinstance(outcome, Started)
    (_, region, request), *_ = api.calls
    assert region == "us-east-1"
    assert request["LaunchTemplate"] == {"LaunchTemplateName": "coral-node", "Version": "7"}
    assert (request["InstanceType"], request["MinCount"], request["MaxCount"]) == ("g5.xlarge", 1, 1)
    assert request["Placement"] == {"AvailabilityZone": "us-east-1a", "GroupName": "coral-demo-d-two-00"}
    assert request["MetadataOptions"]["HttpTokens"] == "required"
    assert request["InstanceMarketOptions"]["MarketType"] == "spot"
    assert request["ClientToken"].isascii()
    assert len(request["ClientToken"]) <= 64
    kinds = {t["ResourceType"]: {tag["Key"]: tag["Value"] for tag in t["Tags"]} for t in request["TagSpecifications"]}
    assert kinds.keys() == {"instance", "volume", "network-interface", "spot-instances-request"}
    assert kinds["instance"]["coral:fleet"] == "demo"
    assert kinds["instance"]["coral:stage"] == "1"
    assert all(len(key) <= 128 and len(value) <= 256 for key, value in kinds["instance"].items())


def test_a_subnet_takes_the_place_of_its_zone():
    api = Scripted({"run_instances": [ran(found())]})
    AwsProvisioner(api, AwsLaunch(launch_template="t", subnets={"us-east-1a": "subnet-1"})).start(FLEET, order())
    request = api.calls[0][2]
    assert request["SubnetId"] == "subnet-1"
    assert request["Placement"] == {"GroupName": "coral-demo-d-two-00"}
    assert "InstanceMarketOptions" not in request


def test_a_missing_placement_group_is_made_once_and_a_race_for_it_is_no_error():
    unknown = AwsError("InvalidPlacementGroup.Unknown", "", "run_instances")
    duplicate = AwsError("InvalidPlacementGroup.Duplicate", "", "create_placement_group")
    api = Scripted({"run_instances": [unknown, ran(found())], "create_placement_group": [duplicate]})
    assert isinstance(AwsProvisioner(api, AwsLaunch(launch_template="t")).start(FLEET, order()), Started)
    assert [call[0] for call in api.calls] == ["run_instances", "create_placement_group", "run_instances"]
    denied = AwsError("UnauthorizedOperation", "no", "create_placement_group")
    api = Scripted({"run_instances": [unknown], "create_placement_group": [denied]})
    with pytest.raises(ProvisionError, match="create_placement_group: UnauthorizedOperation"):
        AwsProvisioner(api, AwsLaunch(launch_template="t")).start(FLEET, order())


def test_a_placement_group_that_is_made_and_not_seen_yet_is_tried_again_later():
    unknown = AwsError("InvalidPlacementGroup.Unknown", "why", "run_instances")
    api = Scripted({"run_instances": [unknown, unknown], "create_placement_group": [{}]})
    outcome = AwsProvisioner(api, AwsLaunch(launch_template="t")).start(FLEET, order())
    assert outcome == Refused(refusal=Refusal.THROTTLED, code=unknown.code, message="why")


@pytest.mark.parametrize(("code", "refusal"), REFUSALS.items())
def test_every_named_code_of_a_start_is_a_typed_refusal(code, refusal):
    api = Scripted({"run_instances": [AwsError(code, "why\n it is", "run_instances")]})
    outcome = AwsProvisioner(api, AwsLaunch(launch_template="t")).start(FLEET, order())
    assert outcome == Refused(refusal=refusal, code=code, message="why it is")
    assert len(api.calls) == 1


@pytest.mark.parametrize("code", ["InvalidParameterValue", "Blocked", "NeverHeardOf"])
def test_a_code_without_a_meaning_is_not_repeated(code):
    api = Scripted({"run_instances": [AwsError(code, "why", "run_instances")]})
    with pytest.raises(ProvisionError, match=f"us-east-1: run_instances: {code}: why") as caught:
        AwsProvisioner(api, AwsLaunch(launch_template="t")).start(FLEET, order())
    assert not isinstance(caught.value, CloudBusyError)


def test_a_node_whose_tags_were_changed_at_launch_is_an_error_not_an_orphan():
    api = Scripted({"run_instances": [ran(found(Tags=[]))]})
    with pytest.raises(ProvisionError, match=r"i-1 was started and belongs to fleet None.*end it by hand"):
        AwsProvisioner(api, AwsLaunch(launch_template="t")).start(FLEET, order())


def test_a_listing_reads_every_page_and_every_state():
    states = ["pending", "running", "stopping", "stopped", "shutting-down", "terminated"]
    each = [
        found(NodeTags(**{**_fields(TAGS), "node": n, "nodes": 6, "stage": n}), state=state)
        for n, state in enumerate(states)
    ]
    api = Scripted(
        {
            "describe_regions": [{"Regions": [{"RegionName": "us-east-1"}, {"RegionName": "x", "OptInStatus": "not-opted-in"}]}],
            "describe_instances": [
                {"Reservations": [ran(*each[:2])], "NextToken": "more"},
                {"Reservations": [ran(*each[2:]), {"OwnerId": "9", "Instances": [found()]}]},
            ],
            "describe_placement_groups": [
                {"PlacementGroups": [{"GroupName": "coral-demo-d-two-00"}, {"GroupName": "somebody-else"}]}
            ],
        }
    )  # fmt: skip
    provisioner = AwsProvisioner(api, AwsLaunch(launch_template="t"))
    listing = provisioner.describe(FLEET, "us-east-1")
    assert [node.state for node in listing.nodes] == [
        NodeState.PENDING, NodeState.RUNNING, NodeState.HALTED, NodeState.HALTED, NodeState.ENDING, NodeState.GONE,
    ]  # fmt: skip
    assert len(listing.foreign) == 1
    assert listing.groups == ("d-two-00",)
    with pytest.raises(ProvisionError, match="'x'"):
        provisioner.describe(FLEET, "x")
    assert [call[0] for call in api.calls].count("describe_regions") == 1


def _fields(tags: NodeTags) -> dict[str, object]:
    return {name: getattr(tags, name) for name in NodeTags.__slots__}


def test_spot_notices_are_asked_for_only_where_spot_runs():
    noticed = {"SpotInstanceRequests": [{"InstanceId": "i-1"}, {}]}
    spot, on_demand = ran(found(InstanceLifecycle="spot")), ran(found())
    api = Scripted(
        {
            "describe_regions": [{"Regions": [{"RegionName": "us-east-1"}]}],
            "describe_instances": [{"Reservations": [on_demand]}, {"Reservations": [spot]}],
            "describe_placement_groups": [{"PlacementGroups": []}],
            "describe_spot_instance_requests": [noticed],
        }
    )
    provisioner = AwsProvisioner(api, AwsLaunch(launch_template="t"))
    assert [node.interrupted for node in provisioner.describe(FLEET, "us-east-1").nodes] == [False]
    assert "describe_spot_instance_requests" not in [call[0] for call in api.calls]
    assert [node.interrupted for node in provisioner.describe(FLEET, "us-east-1").nodes] == [True]


def test_one_absent_id_does_not_keep_the_others_alive():
    absent = AwsError("InvalidInstanceID.NotFound", "i-9", "terminate_instances")
    api = Scripted({"run_instances": [ran(found())], "terminate_instances": [absent, absent, {}]})
    provisioner = AwsProvisioner(api, AwsLaunch(launch_template="t"))
    outcome = provisioner.start(FLEET, order())
    assert isinstance(outcome, Started)
    provisioner.stop(FLEET, "us-east-1", [replace(outcome.node, node_id="i-9"), outcome.node])
    assert [call[2]["InstanceIds"] for call in api.calls[1:]] == [["i-9", "i-1"], ["i-9"], ["i-1"]]
    api.answers["terminate_instances"] = [absent, AwsError("RequestLimitExceeded", "", "terminate_instances")]
    with pytest.raises(CloudBusyError):
        provisioner.stop(FLEET, "us-east-1", [outcome.node, outcome.node])
    api.answers["terminate_instances"] = [AwsError("UnauthorizedOperation", "", "terminate_instances")]
    with pytest.raises(ProvisionError, match="UnauthorizedOperation"):
        provisioner.stop(FLEET, "us-east-1", [outcome.node])
    api.answers["get_caller_identity"] = [{"Account": "42"}, AwsError("ExpiredToken", "", "get_caller_identity")]
    assert provisioner.account() == "42"
    with pytest.raises(ProvisionError, match="ExpiredToken"):
        provisioner.account()
    assert provisioner.call_timeout_s == 30.0


def test_a_state_never_heard_of_is_said():
    api = Scripted({"run_instances": [ran(found(state="dreaming"))]})
    with pytest.raises(ProvisionError, match="unknown state 'dreaming'"):
        AwsProvisioner(api, AwsLaunch(launch_template="t")).start(FLEET, order())


def test_a_group_in_use_stays():
    api = Scripted({"delete_placement_group": [AwsError("InvalidPlacementGroup.InUse", "", "delete_placement_group")]})
    provisioner = AwsProvisioner(api, AwsLaunch(launch_template="t"))
    assert provisioner.release_group(FLEET, "us-east-1", "d-two-00") is False
    api.answers["delete_placement_group"] = [AwsError("RequestLimitExceeded", "", "delete_placement_group")]
    with pytest.raises(CloudBusyError):
        provisioner.release_group(FLEET, "us-east-1", "d-two-00")


def test_tags_prove_themselves_and_every_change_is_seen():
    written = write_tags(FLEET, TAGS)
    token = client_token(FLEET, TAGS.instance_id, TAGS.node)
    assert read_tags(FLEET, written, account=FLEET.account, token=token) == TAGS
    for key in written.keys() - {"Name"}:
        without = {k: v for k, v in written.items() if k != key}
        assert isinstance(read_tags(FLEET, without, account=FLEET.account, token=token), str)
    for key, value in {"coral:instance": "other", "coral:node": "0", "coral:nodes": "1"}.items():
        assert isinstance(read_tags(FLEET, {**written, key: value}, account=FLEET.account, token=token), str)


def test_tokens_and_ids_differ_wherever_a_request_differs():
    base = {
        "plan_id": "p", "template_id": "t", "region": "r", "zone": "z", "market": Market.SPOT, "ordinal": 0,
    }  # fmt: skip
    changed = [
        {**base, key: value}
        for key, value in {
            "plan_id": "q", "template_id": "u", "region": "s", "zone": "y", "market": Market.ON_DEMAND, "ordinal": 1,
        }.items()
    ]  # fmt: skip
    fleets = (FLEET, FleetId(name="demo", account="2"), FleetId(name="demo2", account=FLEET.account))
    ids = {instance_id(fleet, **given) for fleet in fleets for given in (base, *changed)}
    assert len(ids) == len(fleets) * (len(changed) + 1)
    assert instance_id(FLEET, **base) == instance_id(FLEET, **base)
    assert len({client_token(fleet, name, n) for fleet in fleets for name in ids for n in range(3)}) == 3 * len(ids) * 3


@pytest.mark.parametrize("name", ["", "Demo", "1st", "a" * 41, "a/b", "a b"])
def test_a_fleet_name_that_a_cloud_would_not_take_is_refused(name):
    with pytest.raises(InputError, match="bad fleet name"):
        check_fleet_name(name)
    check_fleet_name("demo-2")


def test_a_template_becomes_nodes_in_the_order_of_its_stages():
    template = ServingTemplate(
        template_id="d-1", model="m", variant="bf16", phase=Phase.DECODE, slo=Slo(ttft_s=1.0, tpot_s=0.1),
        placement=Placement(stages=(Stage(layers=3, nodes=("b", "a")), Stage(layers=5, nodes=("c",)))),
        throughput_tokens_per_s=12.0, throughput_requests_per_s=None, method="m", source=CapacitySource.ESTIMATED,
    )  # fmt: skip
    spec = spec_of(template)
    assert [(slot.stage, slot.config) for slot in spec.slots] == [(0, "a"), (0, "b"), (1, "c")]
    assert spec.combination == template.placement.combination
    assert spec.throughput == 12.0


# Sources -------------------------------------------------------------------------------------------------------


def product(*usd: str, unit: str = "Hrs") -> str:
    import json

    dimensions = {str(i): {"unit": unit, "pricePerUnit": {"USD": each}} for i, each in enumerate(usd)}
    return json.dumps({"terms": {"OnDemand": {"t": {"priceDimensions": dimensions}}}})


@pytest.mark.parametrize(
    ("products", "expected"),
    [
        ([product("1.006")], 1.006),
        ([product("1.006"), product("1.0060000000")], 1.006),
        ([product("0.0000000000"), product("1.006")], 1.006),
        ([product("1.006"), product("2.0")], None),
        ([product("0.0")], None),
        ([product("1.0", unit="Quantity")], None),
        (["{}"], None),
        ([], None),
    ],
)
def test_a_price_is_read_only_where_there_is_exactly_one(products, expected):
    api = Scripted({"get_products": [{"PriceList": products}]})
    sources = aws_sources(api, ManualClock(start=START))
    prices = sources.prices.on_demand_usd_per_h("eu-west-1", ["g5.xlarge"])
    assert {name: reading.value for name, reading in prices.items()} == ({"g5.xlarge": expected} if expected else {})
    operation, region, parameters = api.calls[0]
    assert (operation, region) == ("get_products", "us-east-1")
    assert {f["Field"]: f["Value"] for f in parameters["Filters"]}["regionCode"] == "eu-west-1"


def test_the_latest_spot_price_of_a_zone_counts():
    times = [datetime(2026, 11, day, tzinfo=UTC) for day in (1, 3, 2)]
    history = [
        {"InstanceType": "g5.xlarge", "AvailabilityZone": "z", "SpotPrice": str(0.1 * n), "Timestamp": when}
        for n, when in enumerate(times, 1)
    ]
    api = Scripted({"describe_spot_price_history": [{"SpotPriceHistory": history}]})
    prices = aws_sources(api, ManualClock(start=START)).spot.spot_usd_per_h("r", ["g5.xlarge"])
    assert prices["g5.xlarge", "z"].value == 0.2
    assert prices["g5.xlarge", "z"].as_of == START
    assert "2026-11-03" in prices["g5.xlarge", "z"].source


def test_use_by_others_counts_cores_and_leaves_the_fleet_out():
    cpu = {"CoreCount": 2, "ThreadsPerCore": 2}
    api = Scripted(
        {
            "describe_instances": [
                {
                    "Reservations": [
                        ran(
                            found(CpuOptions=cpu),
                            found(CpuOptions=cpu, ClientToken="by hand"),
                            found(CpuOptions=cpu, Tags=[], InstanceLifecycle="spot"),
                            found(Tags=[], InstanceType="p5.48xlarge"),
                            found(CpuOptions=cpu, Tags=[], InstanceType="m5.xlarge"),
                        )
                    ]
                }
            ],
            "describe_instance_types": [
                {"InstanceTypes": [{"InstanceType": "p5.48xlarge", "VCpuInfo": {"DefaultVCpus": 192}}]}
            ],
        }
    )
    others = aws_sources(api, ManualClock(start=START)).quotas.others_vcpus(FLEET, "us-east-1")
    assert others.value == {"L-DB2E81BA": 4, "L-3819A6DF": 4, "L-417A185B": 192}


@pytest.mark.parametrize(
    ("config", "market", "pool"),
    [
        ("g5.xlarge", Market.ON_DEMAND, "L-DB2E81BA"),
        ("g6e.48xlarge", Market.SPOT, "L-3819A6DF"),
        ("p4d.24xlarge", Market.ON_DEMAND, "L-417A185B"),
        ("p4d.24xlarge", Market.SPOT, "L-7212CCBC"),
        ("p5.4xlarge", Market.SPOT, "L-C4BD4855"),
        ("p6-b200.48xlarge", Market.SPOT, None),
        ("m5.xlarge", Market.ON_DEMAND, None),
        ("gibberish", Market.ON_DEMAND, None),
    ],
)
def test_quota_pools(config, market, pool):
    assert aws_sources(Scripted({}), ManualClock(start=START)).quotas.pool(config, market) == pool


def test_quotas_and_failures_of_sources():
    api = Scripted(
        {
            "list_service_quotas": [
                {"Quotas": [{"QuotaCode": "L-1", "Value": 1.0}], "NextToken": "x"},
                {"Quotas": [{"QuotaCode": "L-DB2E81BA", "Value": 64.0}]},
            ]
        }
    )
    quotas = aws_sources(api, ManualClock(start=START)).quotas
    assert {code: reading.value for code, reading in quotas.limit_vcpus("r").items()} == {"L-DB2E81BA": 64.0}
    api.answers["list_service_quotas"] = [AwsError("TooManyRequestsException", "slow", "list_service_quotas")]
    with pytest.raises(CloudBusyError, match="TooManyRequestsException"):
        quotas.limit_vcpus("r")


def test_codes_of_failures_carry_their_fix():
    assert isinstance(as_failure(AwsError("NoAnswer", "", "x"), where="r"), CloudBusyError)
    assert "renew" in as_failure(AwsError("ExpiredToken", "", "x"), where="r").fix
    capacity = as_failure(AwsError("InsufficientInstanceCapacity", "", "x"), where="r")
    assert not isinstance(capacity, CloudBusyError)
    assert len(AwsError("c", "x" * 5000, "o").message) == 300


def test_pages_pass_their_token_on():
    api = Scripted({"op": [{"K": [1], "NextToken": "t"}, {"K": [2]}]})
    assert list(pages(api, "s", "r", "op", "K", A=1)) == [1, 2]
    assert api.calls[1][2] == {"A": 1, "NextToken": "t"}
