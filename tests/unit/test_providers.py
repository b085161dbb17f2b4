"""Which cloud a run uses, from settings alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from coral_core.cloud.assumed_engine import ASSUMED_NOTE, AssumedEngine
from coral_core.cloud.aws_provisioner import AwsProvisioner
from coral_core.cloud.local import LocalProvisioner
from coral_core.cloud.local_records import read_record
from coral_core.cloud.provisioner import CloudBusyError, NodeOrder
from coral_core.cloud.rehearsal import RehearsalCloud
from coral_core.config.agent import load_agent_file
from coral_core.config.settings import Settings, load_settings
from coral_core.domain.fleet import FleetId, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, ProvisionError
from tasks.gateway_engine import GatewayEngine
from tasks.local_nodes import agent_document, local_machine
from tasks.providers import open_provider, rehearsal_zones, serving_side
from tests.fakes.local_nodes import LocalNodes

TAGS = NodeTags(
    instance_id="a-1", template_id="a", model="tiny", phase=Phase.AGGREGATED,
    config="one", stage=0, node=0, nodes=1, epoch=1,
)  # fmt: skip


def test_a_rehearsal_needs_no_settings_and_says_what_it_is(tmp_path):
    provider = open_provider(Settings(rehearsal=tmp_path / "r"))
    assert isinstance(provider.provisioner, RehearsalCloud)
    assert provider.notes[0].startswith("a rehearsal: nothing was rented")
    assert not (tmp_path / "r").exists()
    zones = rehearsal_zones()
    assert {"us-east-1", "us-east-2", "us-west-2"} <= zones.keys()
    assert all(len(set(names)) == 2 for names in zones.values())


def test_local_nodes_take_their_share_of_the_machine_and_their_agents_its_terms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    interpreter = tmp_path / "python"
    interpreter.symlink_to(sys.executable)
    settings = Settings(
        provider="local",
        local=tmp_path / "l",
        local_coordinator="tcp://127.0.0.1:7700",
        local_agent_keys=Path("agent.keys"),
        local_memory_gib=4.0,
        local_first_port=22000,
        local_ports=64,
        engine_python=interpreter,
    )
    provider = open_provider(settings)
    assert isinstance(provider.provisioner, LocalProvisioner)
    assert provider.notes[-1] == ASSUMED_NOTE
    assert provider.settle_s == 0.0
    found = local_machine(settings)
    assert (found.memory_bytes, found.first_port, found.last_port) == (4 * 2**30, 22000, 22063)
    assert {name: size.cpus for name, size in found.sizes.items()} == {"local-large": 1, "local-small": 1}
    assert 0 < local_machine(Settings()).memory_bytes < 2**46
    with pytest.raises(InputError, match="more than this machine has"):
        local_machine(Settings(local_memory_gib=1e5))

    with LocalNodes(tmp_path) as nodes:
        order = NodeOrder(region="here", zone="here-a", market=Market.ON_DEMAND, tags=TAGS)
        started = nodes.start(FleetId(name="demo", account=nodes.account()), order)
        record = read_record(nodes.folder / "nodes" / started.node.node_id)
    path = tmp_path / "agent.yaml"
    path.write_text(json.dumps(agent_document(settings, record)))
    spec = load_agent_file(path)
    assert spec.keys_file == tmp_path / "agent.keys"
    assert spec.engine_python == interpreter, "not what the link leads to: that has no vLLM"
    assert (spec.node.node_id, spec.first_port, spec.cpus) == (record.node_id, record.first_port, record.cpus)
    assert spec.node.tags == {name: value for name, value in record.tags.items() if name != "Name"}
    with pytest.raises(InputError, match="CORAL_LOCAL_COORDINATOR"):
        agent_document(Settings(), record)


def test_aws_takes_its_settings_and_asks_nobody_yet():
    settings = Settings(provider="aws", aws_launch_template="node", aws_subnets={"us-east-1a": "subnet-1"})
    provider = open_provider(settings)
    assert isinstance(provider.provisioner, AwsProvisioner)
    assert provider.settle_s == 60.0
    assert provider.provisioner.call_timeout_s == 60.0
    sources, ages = provider.supply(None, None)
    assert type(sources.prices).__name__ == "AwsPrices"
    assert ages.spot_s == 3600.0


def test_aws_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "coral_core.cloud.aws", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InputError, match=r"pip install 'coral-serve\[aws\]'"):
        open_provider(Settings(), "aws")


def test_gcp_without_credentials_or_zones_names_the_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    settings = Settings(gcp_project="p", gcp_zones={"us-central1": ("us-central1-a",)})
    with pytest.raises(ProvisionError, match=r"provider gcp: no usable credentials: .*gcloud auth"):
        open_provider(settings, "gcp")
    with pytest.raises(InputError, match="CORAL_GCP_PROJECT, CORAL_GCP_ZONES"):
        open_provider(Settings(gcp_project="p"), "gcp")


def test_reads_are_patient_with_a_busy_cloud_and_not_for_ever(tmp_path, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    provider = open_provider(Settings(rehearsal=tmp_path))
    answers = [CloudBusyError("busy"), CloudBusyError("busy"), 7]

    def read():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert provider.patiently(read) == 7
    assert pauses == [1.0, 3.0]
    answers = [CloudBusyError("busy")] * 4
    with pytest.raises(CloudBusyError):
        provider.patiently(read)


def test_a_gateway_that_is_set_is_asked_and_said(tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-at-least-32-characters-in-all\n", encoding="utf-8")
    settings = Settings(provider="aws", gateway_admin_url="http://127.0.0.1:8001", gateway_token_file=token)
    provider = open_provider(settings)
    assert provider.engine == GatewayEngine(
        url="http://127.0.0.1:8001", token="a-token-of-at-least-32-characters-in-all"
    )
    assert provider.notes == ("readiness, weights and draining: the gateway at http://127.0.0.1:8001",)
    assert isinstance(open_provider(Settings(provider="aws")).engine, AssumedEngine)
    assert isinstance(open_provider(settings, "fake").engine, AssumedEngine)  # nothing of a rehearsal can answer
    for wrong, complaint in (
        ({"gateway_admin_url": "http://127.0.0.1:8001"}, "set both"),
        ({"gateway_token_file": token}, "set both"),
        ({**settings.model_dump(), "gateway_token_file": tmp_path / "none"}, "cannot read the admin token"),
    ):
        with pytest.raises(InputError, match=complaint):
            serving_side(Settings(**wrong))
    token.write_text("short", encoding="utf-8")
    with pytest.raises(InputError, match="holds no admin token"):
        serving_side(settings)


def test_the_address_of_the_gateway_is_one(monkeypatch):
    monkeypatch.setenv("CORAL_GATEWAY_ADMIN_URL", "ftp://x")
    with pytest.raises(InputError, match="CORAL_GATEWAY_ADMIN_URL"):
        load_settings()
