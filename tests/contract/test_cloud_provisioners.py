"""What every provisioner must do: the fake, EC2 through boto3 on loopback, GCE on a stand-in, this machine's processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from coral_core.clock import ManualClock
from coral_core.cloud.fake import FakeCloud, Fault, Trouble
from coral_core.cloud.provisioner import CloudBusyError, NodeOrder, Provisioner, Refusal, Refused, Started
from coral_core.cloud.tags import write_tags
from coral_core.domain.fleet import FleetId, NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import ProvisionError
from tests.fakes.fleet_cases import START


@dataclass
class Subject:
    """A provisioner under test and the handles on its cloud. `fail(operation, trouble)` scripts the next call."""

    provisioner: Provisioner
    fleet: FleetId
    region: str
    zones: tuple[str, str]
    config: str
    fail: Callable[[str, str], None]
    plant: Callable[[str, Mapping[str, str]], str]
    machines: Callable[[], int]
    halt: Callable[[str], None]
    interrupt: Callable[[str], None] | None = None
    impatient: Provisioner | None = None
    groups: bool = True
    troubles: frozenset[tuple[str, str]] | None = None
    settle: Callable[[], None] = field(default=lambda: None)

    def order(self, *, node: int = 0, nodes: int = 1, market: Market = Market.ON_DEMAND, **changes) -> NodeOrder:
        values = {"instance_id": "d-0123456789abcdef-00ff", "template_id": "d-0123456789abcdef", "epoch": 3, **changes}
        tags = NodeTags(
            model="Qwen3-32B.v1", phase=Phase.DECODE, config=self.config, stage=node, node=node, nodes=nodes, **values
        )
        return NodeOrder(region=self.region, zone=self.zones[0], market=market, tags=tags)

    def start(self, **order) -> Started:
        outcome = self.provisioner.start(self.fleet, self.order(**order))
        assert isinstance(outcome, Started), outcome
        return outcome

    def meet(self, operation: str, trouble: str) -> None:
        """Script the next call; skips where this cloud cannot have such trouble."""
        if self.troubles is not None and (operation, trouble) not in self.troubles:
            pytest.skip(f"{operation} cannot meet {trouble} here")
        self.fail(operation, trouble)

    def nodes(self):
        return self.provisioner.describe(self.fleet, self.region).nodes


def fake_subject() -> Subject:
    clock = ManualClock(start=START)
    cloud = FakeCloud(clock=clock, zones={"east": ("east-a", "east-b")})
    names = {"no_answer": Trouble.UNAVAILABLE}

    def plant(name, tags):
        cloud.plant(name, region="east", tags=tags, token="by hand")
        return name

    return Subject(
        provisioner=cloud,
        fleet=FleetId(name="demo", account=cloud.owner),
        region="east",
        zones=("east-a", "east-b"),
        config="a",
        fail=lambda operation, trouble: cloud.faults.append(
            Fault(operation=operation, trouble=names.get(trouble) or Trouble(trouble))
        ),
        plant=plant,
        machines=lambda: sum(m.order is not None for m in cloud.held(also_ending=False)),
        halt=cloud.halt,
        interrupt=cloud.interrupt,
        settle=lambda: clock.advance(100.0),
    )


def aws_subject(server, clients) -> Subject:
    from coral_core.cloud.aws_provisioner import AwsLaunch, AwsProvisioner
    from tests.fakes.ec2_server import ACCOUNT, TEMPLATE, Rule

    actions = {"start": "RunInstances", "describe": "DescribeInstances", "stop": "TerminateInstances"}
    codes = {
        "capacity": ("InsufficientInstanceCapacity", 500),
        "quota": ("VcpuLimitExceeded", 400),
        "throttled": ("RequestLimitExceeded", 503),
        "no_answer": ("ServiceUnavailable", 503),
        "denied": ("UnauthorizedOperation", 403),
        "expired": ("RequestExpired", 400),
    }

    def fail(operation, trouble):
        if trouble == "lost":
            server.rules.append(Rule(action=actions[operation], delay_s=5.0))
            return
        code, status = codes[trouble]
        server.rules.append(Rule(action=actions[operation], code=code, status=status))

    client, api, hasty = clients
    launch = AwsLaunch(launch_template=TEMPLATE)

    def plant(name, tags):
        made = client.run_instances(
            ImageId="ami-12345678",
            InstanceType="g5.xlarge",
            MinCount=1,
            MaxCount=1,
            ClientToken=f"by-hand-{name}",
            TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}],
        )
        return made["Instances"][0]["InstanceId"]

    return Subject(
        provisioner=AwsProvisioner(api, launch),
        impatient=AwsProvisioner(hasty, launch),
        fleet=FleetId(name="demo", account=ACCOUNT),
        region="us-west-2",
        zones=("us-west-2a", "us-west-2b"),
        config="g5.xlarge",
        fail=fail,
        plant=plant,
        machines=lambda: sum(
            not any(t["key"] == "planted" for t in m.get_tags()) for m in server.machines("us-west-2")
        ),
        halt=lambda name: client.stop_instances(InstanceIds=[name]),
        interrupt=lambda name: server.noticed.update({name: "us-west-2"}),
    )


def gcp_subject() -> Subject:
    pytest.importorskip("google.cloud.compute_v1", reason="the extra `gcp` (google-cloud-compute) is not installed")
    from coral_core.cloud.gcp import GcpLaunch, GcpProvisioner
    from tests.fakes.gce_session import PROJECT, ZONES, Gce

    gce = Gce()
    operations = {"start": "insert", "describe": "list", "stop": "delete"}
    kinds = {"capacity": "ZONE_RESOURCE_POOL_EXHAUSTED", "quota": "QUOTA_EXCEEDED"}

    def plant(name, tags):
        machine = {"name": name, "status": "RUNNING", "creationTimestamp": "2026-11-29T12:00:00+00:00"}
        labels = {"coral-fleet": tags.get("coral:fleet", "")}
        gce.machines["us-central1-b", name] = {**machine, "labels": labels, "description": json.dumps(dict(tags))}
        return name

    def halt(name):
        next(m for (_, n), m in gce.machines.items() if n == name)["status"] = "TERMINATED"

    launch = GcpLaunch(project=PROJECT, instance_template="coral-node", zones=ZONES)
    return Subject(
        provisioner=GcpProvisioner(launch, clients=gce.clients()),
        fleet=FleetId(name="demo", account=PROJECT),
        region="us-central1",
        zones=ZONES["us-central1"],
        config="g2-standard-4",
        fail=lambda operation, trouble: gce.faults.append([operations[operation], kinds.get(trouble, trouble), 1]),
        plant=plant,
        machines=lambda: sum(zone == "us-central1-a" for zone, _ in gce.machines),
        halt=halt,
        groups=False,
    )


@contextmanager
def local_subject(folder: Path) -> Iterator[Subject]:
    from tests.fakes.local_nodes import LocalNodes

    with LocalNodes(folder) as nodes:
        yield Subject(
            provisioner=nodes,
            fleet=FleetId(name="demo", account=nodes.account()),
            region="here",
            zones=("here-a", "here-b"),
            config="one",
            fail=nodes.fail,
            plant=nodes.plant,
            machines=lambda: len(nodes.alive()),
            halt=nodes.halt,
            groups=False,
            troubles=frozenset(
                {("start", "capacity"), ("start", "throttled"), ("stop", "throttled")}
                | {(operation, "denied") for operation in ("start", "describe", "stop")}
            ),
            settle=nodes.settle,
        )


@pytest.fixture(scope="module")
def ec2():
    import boto3

    from coral_core.cloud.aws import Boto3Api
    from tests.fakes.ec2_server import ec2_server

    with ec2_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        client = boto3.client("ec2", region_name="us-west-2")
        yield server, (client, Boto3Api(read_timeout_s=30.0), Boto3Api(read_timeout_s=2.0))
        client.close()


@pytest.fixture(params=["fake", pytest.param("aws", marks=pytest.mark.servers), "gcp", "local"])
def subject(request) -> Iterator[Subject]:
    if request.param == "fake":
        yield fake_subject()
    elif request.param == "gcp":
        yield gcp_subject()
    elif request.param == "local":
        with local_subject(request.getfixturevalue("tmp_path")) as found:
            yield found
    else:
        server, clients = request.getfixturevalue("ec2")
        server.clear()
        yield aws_subject(server, clients)


@pytest.mark.parametrize("market", list(Market))
def test_a_started_node_is_listed_as_it_was_ordered(subject, market):
    started = subject.start(market=market).node
    assert started.live
    subject.settle()
    (node,) = subject.nodes()
    assert (node.node_id, node.tags) == (started.node_id, subject.order().tags)
    assert (node.region, node.zone, node.market) == (subject.region, subject.zones[0], market)
    assert node.state is NodeState.RUNNING
    assert node.launched_at.utcoffset().total_seconds() == 0


def test_the_same_order_again_gives_the_same_node(subject):
    first, again = subject.start().node, subject.start().node
    assert first.node_id == again.node_id
    assert subject.machines() == 1


def test_nodes_of_one_instance_are_different(subject):
    ids = {subject.start(node=number, nodes=3).node.node_id for number in range(3)}
    assert len(ids) == subject.machines() == 3
    assert sorted(node.tags.node for node in subject.nodes()) == [0, 1, 2]


def test_a_token_used_by_another_request_is_a_conflict(subject):
    subject.start()
    outcome = subject.provisioner.start(subject.fleet, subject.order(epoch=4))
    assert isinstance(outcome, Refused)
    assert outcome.refusal is Refusal.CONFLICT
    assert subject.machines() == 1


@pytest.mark.parametrize(
    ("trouble", "refusal"),
    [
        ("capacity", Refusal.CAPACITY),
        ("quota", Refusal.QUOTA),
        ("throttled", Refusal.THROTTLED),
        ("no_answer", Refusal.UNKNOWN),
    ],
)
def test_a_refused_start_is_typed_and_asked_for_once(subject, trouble, refusal):
    subject.meet("start", trouble)
    outcome = subject.provisioner.start(subject.fleet, subject.order())
    assert isinstance(outcome, Refused)
    assert outcome.refusal is refusal
    assert outcome.code
    assert outcome.message
    assert outcome.refusal.passing == (trouble in {"throttled", "no_answer"})
    assert subject.machines() == 0
    subject.start()


def test_a_start_whose_answer_was_lost_is_found_by_the_same_order(subject):
    subject.provisioner.describe(subject.fleet, subject.region)
    subject.meet("start", "lost")
    outcome = (subject.impatient or subject.provisioner).start(subject.fleet, subject.order())
    assert isinstance(outcome, Refused)
    assert outcome.refusal is Refusal.UNKNOWN
    assert subject.machines() == 1
    subject.start()
    assert subject.machines() == 1


def test_stopping_is_final_and_may_be_repeated(subject):
    node = subject.start().node
    other = subject.start(node=1, nodes=2).node
    subject.provisioner.stop(subject.fleet, subject.region, [node])
    subject.provisioner.stop(subject.fleet, subject.region, [node, other])
    subject.settle()
    assert subject.machines() == 0
    assert {node.state for node in subject.nodes()} <= {NodeState.ENDING, NodeState.GONE}


def test_a_node_that_is_not_there_does_not_keep_the_others_from_being_stopped(subject):
    node = subject.start().node
    ghost_tags = replace(node.tags, instance_id="d-none-00")
    ghost = replace(node, node_id="i-0123456789abcdef0", tags=ghost_tags)
    subject.provisioner.stop(subject.fleet, subject.region, [ghost, node])
    subject.provisioner.stop(subject.fleet, subject.region, [ghost])
    assert subject.machines() == 0


def test_what_others_made_is_foreign(subject):
    ours = subject.start().node
    tags = {**write_tags(subject.fleet, ours.tags), "planted": "yes"}
    foreign = {
        subject.plant("copied", tags),
        subject.plant("bare", {"coral:fleet": "demo", "planted": "yes"}),
        subject.plant("negative", {**tags, "coral:node": "-1"}),
    }
    subject.plant("theirs", {**tags, "coral:fleet": "theirs"})
    listing = subject.provisioner.describe(subject.fleet, subject.region)
    assert [node.node_id for node in listing.nodes] == [ours.node_id]
    assert {node.node_id for node in listing.foreign} == foreign
    assert all(node.reason for node in listing.foreign)


def test_a_fleet_of_the_same_name_in_another_account_sees_nothing_of_ours(subject):
    subject.start()
    other = FleetId(name=subject.fleet.name, account="999999999999")
    listing = subject.provisioner.describe(other, subject.region)
    assert listing.nodes == ()
    assert [node.reason for node in listing.foreign] == [
        f"belongs to account {subject.fleet.account}, not to 999999999999"
    ]
    assert subject.provisioner.account() == subject.fleet.account


@pytest.mark.parametrize("operation", ["start", "describe", "stop"])
@pytest.mark.parametrize("trouble", ["denied", "expired"])
def test_what_no_repetition_mends_says_the_fix(subject, operation, trouble):
    node = subject.start().node
    subject.meet(operation, trouble)
    calls = {
        "start": lambda: subject.provisioner.start(subject.fleet, subject.order(instance_id="d-other-00")),
        "describe": subject.nodes,
        "stop": lambda: subject.provisioner.stop(subject.fleet, subject.region, [node]),
    }
    with pytest.raises(ProvisionError) as caught:
        calls[operation]()
    assert not isinstance(caught.value, CloudBusyError)
    assert caught.value.fix
    assert subject.machines() == 1


@pytest.mark.parametrize("operation", ["describe", "stop"])
@pytest.mark.parametrize("trouble", ["throttled", "no_answer"])
def test_passing_trouble_of_reads_and_stops_is_said_to_be_passing(subject, operation, trouble):
    node = subject.start().node
    subject.meet(operation, trouble)
    with pytest.raises(CloudBusyError):
        subject.nodes() if operation == "describe" else subject.provisioner.stop(subject.fleet, subject.region, [node])
    subject.provisioner.stop(subject.fleet, subject.region, subject.nodes())
    assert subject.machines() == 0


def test_an_unknown_region_is_named(subject):
    with pytest.raises(ProvisionError, match="mars") as caught:
        subject.provisioner.describe(subject.fleet, "mars")
    assert not isinstance(caught.value, CloudBusyError)
    assert subject.region in caught.value.fix


def test_a_node_that_somebody_stopped_is_halted(subject):
    node = subject.start().node
    subject.halt(node.node_id)
    assert [node.state for node in subject.nodes()] == [NodeState.HALTED]


def test_a_spot_notice_is_seen(subject):
    if subject.interrupt is None:
        pytest.skip("this cloud's API announces no interruption")
    kept, doomed = subject.start(market=Market.SPOT).node, subject.start(node=1, nodes=2, market=Market.SPOT).node
    subject.interrupt(doomed.node_id)
    assert {node.node_id: node.interrupted for node in subject.nodes()} == {kept.node_id: False, doomed.node_id: True}


def test_pipelines_have_a_group_that_can_be_released(subject):
    if not subject.groups:
        assert subject.provisioner.release_group(subject.fleet, subject.region, "d-none")
        return
    order = subject.order(nodes=2)
    subject.start(nodes=2)
    subject.start(node=1, nodes=2)
    listing = subject.provisioner.describe(subject.fleet, subject.region)
    assert listing.groups == (order.tags.instance_id,)
    subject.provisioner.stop(subject.fleet, subject.region, listing.nodes)
    subject.settle()
    assert subject.provisioner.release_group(subject.fleet, subject.region, order.tags.instance_id)
    assert subject.provisioner.release_group(subject.fleet, subject.region, order.tags.instance_id)
    assert subject.provisioner.describe(subject.fleet, subject.region).groups == ()


def test_calls_have_a_bound(subject):
    assert 0 < subject.provisioner.call_timeout_s <= 120
