"""The deployments that are served, and the same ones for a work pool."""

from __future__ import annotations

import importlib

import pytest
import yaml

pytest.importorskip("prefect", reason="the flows extra is not installed")

from flows.deployments import REALLOCATE_CRON, absolute_scenario, deployments, reallocate_schedule
from flows.parameters import ReallocateParameters


@pytest.fixture
def pooled(repository):
    file = yaml.safe_load((repository / "infra" / "prefect.yaml").read_text(encoding="utf-8"))
    return {item["name"]: item for item in file["deployments"]}


def test_a_work_pool_gets_what_is_served(pooled):
    served = {deployment.name: deployment for deployment in deployments()}
    assert (
        set(served)
        == set(pooled)
        == {
            "build-library",
            "reallocate",
            "evaluate",
            "profile-gpus",
            "teardown",
        }
    )
    for name, item in pooled.items():
        module, _, function = item["entrypoint"].partition(".py:")
        flow = getattr(importlib.import_module(module.replace("/", ".")), function)
        assert (flow.name, served[name].flow_name) == (name, name)
        assert item["tags"] == served[name].tags == ["coral"]
        assert item["description"]


def test_the_schedule_of_reallocate_is_there_and_off_in_both(pooled):
    (schedule,) = pooled["reallocate"]["schedules"]
    assert (schedule["cron"], schedule["active"]) == (REALLOCATE_CRON, False)
    (plan,) = [deployment for deployment in deployments() if deployment.name == "reallocate"]
    (served,) = plan.schedules
    assert (served.schedule.cron, served.active) == (REALLOCATE_CRON, False)
    limit = pooled["reallocate"]["concurrency_limit"]
    assert (limit["limit"], limit["collision_strategy"]) == (1, plan.concurrency_options.collision_strategy.value)


def test_what_the_command_says_is_what_forms_begin_with_and_the_schedule_uses():
    begin_with = ReallocateParameters(scenario="paper-core", mode="approve", fleet="blue")
    found = {item.name: item for item in deployments(begin_with, schedule=reallocate_schedule("600"))}
    assert found["reallocate"].parameters == {"params": {"scenario": "paper-core", "mode": "approve", "fleet": "blue"}}
    assert found["build-library"].parameters == {"params": {"scenario": "paper-core"}}
    assert found["teardown"].parameters == {"params": {"fleet": "blue"}}
    (schedule,) = found["reallocate"].schedules
    assert (schedule.schedule.interval.total_seconds(), schedule.active) == (600, True)


def test_scenario_files_are_named_by_their_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_scenario("tiny") == "tiny"
    assert absolute_scenario("my.yaml") == str(tmp_path / "my.yaml")
    assert absolute_scenario("./sub/my.yml") == str(tmp_path / "sub" / "my.yml")
