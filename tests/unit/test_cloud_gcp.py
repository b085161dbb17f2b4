"""The GCE adapter's own ways: what its messages hold, slow operations, odd answers, and life without the extra."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from coral_core.cloud import gcp
from coral_core.cloud.provisioner import CloudBusyError, NodeOrder, Refusal, Refused, Started
from coral_core.domain.fleet import FleetId, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import ProvisionError
from tests.fakes.gce_session import PROJECT, ZONES, Gce

pytest.importorskip("google.cloud.compute_v1", reason="the extra `gcp` (google-cloud-compute) is not installed")

FLEET = FleetId(name="demo", account=PROJECT)
LAUNCH = gcp.GcpLaunch(project=PROJECT, instance_template="coral-node", zones=ZONES)
TAGS = NodeTags(
    instance_id="d-0-00", template_id="d-0", model="Qwen3-32B.v1", phase=Phase.DECODE, config="g2-standard-4",
    stage=0, node=0, nodes=1, epoch=1,
)  # fmt: skip
ORDER = NodeOrder(region="us-central1", zone="us-central1-a", market=Market.SPOT, tags=TAGS)


@pytest.fixture
def gce() -> Gce:
    return Gce()


@pytest.fixture
def provisioner(gce) -> gcp.GcpProvisioner:
    return gcp.GcpProvisioner(LAUNCH, clients=gce.clients())


def test_a_machine_holds_all_that_a_node_must_have(gce, provisioner):
    assert isinstance(provisioner.start(FLEET, ORDER), Started)
    ((zone, name), machine) = next(iter(gce.machines.items()))
    assert zone == "us-central1-a"
    assert len(name) <= 63
    assert machine["machineType"] == "zones/us-central1-a/machineTypes/g2-standard-4"
    assert machine["labels"] == {"coral-fleet": "demo"}
    assert json.loads(machine["description"])["coral:model"] == "Qwen3-32B.v1"
    assert machine["scheduling"]["provisioningModel"] == "SPOT"
    assert machine["scheduling"]["instanceTerminationAction"] == "DELETE"
    assert machine["scheduling"]["automaticRestart"] is False


def test_a_slow_operation_may_have_happened_and_is_found_again(gce, provisioner):
    gce.faults.append(["wait", "slow", 1])
    outcome = provisioner.start(FLEET, ORDER)
    assert isinstance(outcome, Refused)
    assert outcome.refusal is Refusal.UNKNOWN
    assert isinstance(provisioner.start(FLEET, ORDER), Started)
    assert len(gce.machines) == 1


def test_an_order_that_failed_or_whose_machine_is_gone_can_be_given_again(gce, provisioner):
    gce.faults.append(["insert", "QUOTA_EXCEEDED", 1])
    assert isinstance(provisioner.start(FLEET, ORDER), Refused)
    first = provisioner.start(FLEET, ORDER)
    assert isinstance(first, Started)
    provisioner.stop(FLEET, "us-central1", [first.node])
    assert isinstance(provisioner.start(FLEET, ORDER), Started)
    assert len(gce.machines) == 1


def test_no_call_takes_longer_than_it_says(gce, provisioner):
    started = provisioner.start(FLEET, ORDER)
    assert gce.requests == ["insert", "wait", "look"]
    assert sum(gce.timeouts_s) <= provisioner.call_timeout_s
    gce.timeouts_s.clear()
    others = [replace(started.node, tags=replace(TAGS, node=n, nodes=6)) for n in range(1, 6)]
    provisioner.stop(FLEET, "us-central1", [started.node, *others])
    assert sum(gce.timeouts_s) <= provisioner.call_timeout_s


@pytest.mark.parametrize(
    ("fault", "refusal"),
    [
        ("too_many", Refusal.THROTTLED),
        ("unavailable", Refusal.UNKNOWN),
        ("not_offered", Refusal.NOT_OFFERED),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", Refusal.CAPACITY),
        ("INTERNAL_ERROR", Refusal.UNKNOWN),
    ],
)
def test_refusals(gce, provisioner, fault, refusal):
    gce.faults.append(["insert", fault, 1])
    outcome = provisioner.start(FLEET, ORDER)
    assert isinstance(outcome, Refused)
    assert outcome.refusal is refusal


def test_an_operation_that_fails_for_another_reason_is_an_error(gce, provisioner):
    gce.faults.append(["insert", "RESOURCE_NOT_FOUND", 1])
    with pytest.raises(ProvisionError, match="us-central1: start: RESOURCE_NOT_FOUND: as scripted"):
        provisioner.start(FLEET, ORDER)


def test_a_machine_that_cannot_be_looked_at_is_asked_for_again(gce, provisioner):
    gce.faults.append(["look", "unavailable", 1])
    outcome = provisioner.start(FLEET, ORDER)
    assert isinstance(outcome, Refused)
    assert outcome.refusal is Refusal.UNKNOWN


def test_a_machine_of_our_name_made_by_others_is_a_conflict(gce, provisioner):
    started = provisioner.start(FLEET, ORDER)
    machine = gce.machines["us-central1-a", started.node.node_id]
    for description in ("", "[1]", "not json", json.dumps({"coral:instance": "x"})):
        machine["description"] = description
        outcome = provisioner.start(FLEET, ORDER)
        assert isinstance(outcome, Refused)
        assert outcome.refusal is Refusal.CONFLICT
        assert provisioner.describe(FLEET, "us-central1").nodes == ()
    assert len(provisioner.describe(FLEET, "us-central1").foreign) == 1


def test_a_state_never_heard_of_is_said(gce, provisioner):
    started = provisioner.start(FLEET, ORDER)
    gce.machines["us-central1-a", started.node.node_id]["status"] = "DEPROVISIONING"
    assert not provisioner.describe(FLEET, "us-central1").nodes[0].live
    gce.machines["us-central1-a", started.node.node_id]["status"] = "UNDEFINED_STATUS"
    with pytest.raises(ProvisionError, match="unknown state 'UNDEFINED_STATUS'"):
        provisioner.describe(FLEET, "us-central1")


def test_a_list_that_is_refused_is_no_empty_fleet(gce, provisioner):
    gce.faults.append(["list", "not_offered", 1])
    with pytest.raises(ProvisionError):
        provisioner.describe(FLEET, "us-central1")
    gce.faults.append(["list", "too_many", 1])
    with pytest.raises(CloudBusyError):
        provisioner.describe(FLEET, "us-central1")


def test_exceptions_of_the_credentials_and_of_ourselves():
    from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError

    for error in (RefreshError("expired"), DefaultCredentialsError("none")):
        with pytest.raises(ProvisionError, match="expired|none") as caught, gcp._Errors("r"):  # noqa: RUF043  # a choice
            raise error
        assert "Google credentials" in caught.value.fix
    with pytest.raises(gcp._RefusedError) as refused, gcp._Errors("r"):
        raise TransportError("no route")
    assert refused.value.refusal is Refusal.UNKNOWN
    with pytest.raises(ZeroDivisionError), gcp._Errors("r"):
        raise ZeroDivisionError


def test_without_the_extra_the_error_says_so(monkeypatch):
    gcp._compute.cache_clear()
    monkeypatch.setitem(sys.modules, "google.cloud.compute_v1", None)
    with pytest.raises(ProvisionError, match="install the extra `gcp`"):
        gcp.GcpProvisioner(LAUNCH)
    gcp._compute.cache_clear()


def test_an_order_on_demand_differs_from_one_on_spot(gce, provisioner):
    provisioner.start(FLEET, ORDER)
    outcome = provisioner.start(FLEET, replace(ORDER, market=Market.ON_DEMAND))
    assert isinstance(outcome, Refused)
    assert outcome.refusal is Refusal.CONFLICT
