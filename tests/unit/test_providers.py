"""Which cloud a run uses, from settings alone."""

from __future__ import annotations

import sys

import pytest

from coral_core.cloud.assumed_engine import AssumedEngine
from coral_core.cloud.aws_provisioner import AwsProvisioner
from coral_core.cloud.provisioner import CloudBusyError
from coral_core.cloud.rehearsal import RehearsalCloud
from coral_core.config.settings import Settings, load_settings
from coral_core.errors import InputError, ProvisionError
from tasks.gateway_engine import GatewayEngine
from tasks.providers import open_provider, rehearsal_zones, serving_side


def test_a_rehearsal_needs_no_settings_and_says_what_it_is(tmp_path):
    provider = open_provider(Settings(rehearsal=tmp_path / "r"))
    assert isinstance(provider.provisioner, RehearsalCloud)
    assert provider.notes[0].startswith("a rehearsal: nothing was rented")
    assert not (tmp_path / "r").exists()
    zones = rehearsal_zones()
    assert {"us-east-1", "us-east-2", "us-west-2"} <= zones.keys()
    assert all(len(set(names)) == 2 for names in zones.values())


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
