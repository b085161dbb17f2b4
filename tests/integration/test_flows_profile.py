"""The flow `profile-gpus` on an EC2 API server on loopback: each machine boots as an agent here, with steps of a closed form."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from artifacts.leases import LeaseTerms, take_lease
from artifacts.profiles import list_profiles, read_profile
from artifacts.store import open_store
from coral_core.clock import SystemClock
from coral_core.cloud.aws import Boto3Api
from coral_core.cloud.aws_provisioner import AwsLaunch, AwsProvisioner
from coral_core.cloud.provisioner import NodeOrder, Started
from coral_core.config.settings import load_settings
from coral_core.domain.fleet import FleetId, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, ProvisionError
from coral_core.serving.control.curve import KeyPair, write_allowed, write_private
from coral_core.serving.control.wire import new_pair
from tasks.local_serving import CORAL, ROOT, free_ports
from tasks.profile_run import ProfileRun
from tests.fakes.ec2_server import ACCOUNT, TEMPLATE, Ec2Server, Rule, ec2_server
from tests.fakes.profile_interpreter import DIES, interpreter

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

REGION = "us-west-2"
FLEET = "blue-profile"
ENGINE = {
    "device": "cuda",
    "models": {"llama-3.1-8b": {"bf16": {"path": "/weights/llama", "max_model_len_tokens": 4096}}},
}
SWEEP = {"batches": [1, 4], "prompts": [64], "contexts": [64], "samples": 3}


@dataclass
class Machines(threading.Thread):
    """What machines do when they boot and when they end: an agent for each that the server says runs, from its tags."""

    server: Ec2Server
    folder: Path
    interpreter: Path
    endpoint: str = ""
    keys: Path | None = None
    variables: dict[str, str] = field(default_factory=dict)
    booted: list[str] = field(default_factory=list)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ending: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.ending.wait(0.2):
            there = {machine.id: machine for machine in self.server.machines(REGION)}
            for name in [name for name in self.running if name not in there]:
                self.end(name)
            for name, machine in there.items():
                if name not in self.booted and self.keys is not None:
                    self.booted.append(name)
                    self.boot(name, {tag["key"]: tag["value"] for tag in machine.get_tags()})

    def boot(self, name: str, tags: dict[str, str]) -> None:
        document = {
            "coordinator": self.endpoint,
            "keys_file": str(self.keys),
            "node": {
                "node_id": name,
                "region": REGION,
                "tags": {key: value for key, value in tags.items() if key.startswith("coral:")},
            },
            "folder": str(self.folder / name),
            "engine_python": str(self.interpreter),
            "first_port": free_ports(1)[0],
            "ports": 4,
            "drain_s": 0.0,
            "stop_grace_s": 3.0,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(document))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*CORAL, "agent", "run", "--config", str(path), "--json"],
                env={**os.environ, **self.variables, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def prefect():
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=300):
        yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)


@pytest.fixture(scope="module")
def ec2():
    with ec2_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        patch.setenv("CORAL_PROVIDER", "aws")
        patch.setenv("CORAL_FLEET", "blue")
        patch.setenv("CORAL_AWS_LAUNCH_TEMPLATE", TEMPLATE)
        patch.setattr("tasks.providers.AWS_SETTLE_S", 0.3)
        yield server


@pytest.fixture
def ground(ec2, tmp_path):
    """An empty cloud, files of coordinator and engine, and machines that boot."""
    ec2.clear()
    coordinator, agent = new_pair(), new_pair()
    write_private(tmp_path / "c.keys", KeyPair(public=coordinator[0], secret=coordinator[1]))
    write_private(tmp_path / "a.keys", KeyPair(public=agent[0], secret=agent[1], server=coordinator[0]))
    write_allowed(tmp_path / "allowed", {agent[0]: "nodes"})
    (port,) = free_ports(1)
    (tmp_path / "token").write_text("t" * 40)
    (tmp_path / "coordinator.yaml").write_text(
        json.dumps(
            {
                "listen": {"host": "127.0.0.1", "port": port},
                "keys_file": "c.keys",
                "agents_file": "allowed",
                "gateway": {"url": "http://127.0.0.1:1", "token_file": "token"},
                "scenario": "tiny",
                "engine_file": "engine.yaml",
            }
        )
    )
    (tmp_path / "engine.yaml").write_text(json.dumps(ENGINE))
    machines = Machines(
        server=ec2,
        folder=tmp_path,
        interpreter=interpreter(tmp_path),
        endpoint=f"tcp://127.0.0.1:{port}",
        keys=tmp_path / "a.keys",
    )
    machines.start()
    yield machines
    machines.ending.set()
    machines.join(timeout=10)
    for name in list(machines.running):
        machines.end(name)


def parameters(ground: Machines, **changes):
    from flows.parameters import ProfileParameters

    given = {
        "provider": "aws",
        "model": "llama-3.1-8b",
        "configs": ["g5.12xlarge"],
        "engine_file": str(ground.folder / "engine.yaml"),
        "engine_version": "0.32.0",
        "sweep": SWEEP,
        "regions": [REGION],
        "coordinator_file": str(ground.folder / "coordinator.yaml"),
        "store": (ground.folder / "store").as_uri(),
    }
    return ProfileParameters.model_validate({**given, **changes})


def profiled(ground: Machines, **changes):
    """The end of one run, as the flow makes it but without Prefect."""
    from flows.profile_gpus import wish_of

    settings = load_settings()
    wish = wish_of(parameters(ground, **changes), settings)
    return ProfileRun(wish=wish, settings=settings, store=store_of(ground), folder=ground.folder / "run").run()


def store_of(ground: Machines):
    return open_store((ground.folder / "store").as_uri())


def test_a_node_of_each_configuration_is_rented_measured_and_released(ground, prefect):
    from flows.profile_gpus import profile_gpus

    end = profile_gpus(parameters(ground, configs=["g5.12xlarge", "g5.xlarge"]))
    assert end.unfinished == {}
    assert ground.server.machines(REGION) == []
    assert ground.server.count("RunInstances") == 2
    assert 0 < end.spent_usd < 1.0
    store = store_of(ground)
    assert sorted(end.keys.values()) == list_profiles(store)
    profile = read_profile(store, end.keys["g5.12xlarge"])
    assert profile.tps == (1, 2, 4)
    for point in profile.points:
        own_s = 5e-5 * point.tokens if point.phase is Phase.PREFILL else 2e-4 + 1e-6 * point.tokens
        assert point.layer_s == pytest.approx((2e-3 + own_s * point.requests) / point.tp)
        assert point.fixed_s == pytest.approx(0.01)
    assert (profile.key.version, profile.key.variant) == ("0.32.0", "bf16")
    assert "--max-model-len" in profile.key.flags
    assert "/weights/llama" not in profile.key.flags


def test_a_dry_run_shows_the_bound_and_rents_nothing(ground):
    done = subprocess.run(
        [
            *CORAL, "profile", "run", "--provider", "aws", "--model", "llama-3.1-8b", "--config", "g5.12xlarge",
            "--engine-file", str(ground.folder / "engine.yaml"), "--engine-version", "0.32.0", "--region", REGION,
            "--coordinator-file", str(ground.folder / "coordinator.yaml"), "--max-minutes", "30", "--max-usd", "99",
            "--dry-run", "--json",
        ],
        capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "CORAL_STORE": (ground.folder / "s").as_uri()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    (row,) = plan["rows"]
    assert plan["bound_usd"] == pytest.approx(row["price_usd_per_h"] / 2)
    assert (plan["label"], row["engines"], ground.server.count("RunInstances")) == ("predicted", 6, 0)


def test_a_run_whose_node_dies_releases_it_and_the_next_goes_on(ground):
    ground.variables[DIES] = "3"
    end = profiled(ground, configs=["g5.xlarge"])
    assert "ended with 9" in end.unfinished["g5.xlarge"]
    assert ground.server.machines(REGION) == []
    ground.variables.clear()
    end = profiled(ground, configs=["g5.xlarge"])
    assert set(end.published) == {"g5.xlarge"}
    kept = [key for key in store_of(ground).list_keys("profiles") if "/steps/tp" in key]
    assert len(kept) == 8  # two depths, two batches, prefill and decode: none was measured twice


def test_no_node_is_started_that_the_money_does_not_last_for(ground):
    end = profiled(ground, max_usd=0.01)
    assert "0.01 USD do not last for a node of 5.672 USD/h" in end.unfinished["g5.12xlarge"]
    assert ground.server.count("RunInstances") == 0


def test_a_zone_without_capacity_leads_to_the_next(ground):
    ground.server.rules.append(Rule(action="RunInstances", code="InsufficientInstanceCapacity"))
    assert set(profiled(ground, configs=["g5.xlarge"]).published) == {"g5.xlarge"}
    assert ground.server.count("RunInstances") == 2


def test_nowhere_to_be_had(ground):
    ground.server.rules.append(Rule(action="RunInstances", code="InsufficientInstanceCapacity", times=99))
    end = profiled(ground, configs=["g5.xlarge"])
    assert "InsufficientInstanceCapacity" in end.unfinished["g5.xlarge"]


def test_what_a_killed_run_has_left_is_released_first(ground):
    cloud = AwsProvisioner(Boto3Api(profile=None), AwsLaunch(launch_template=TEMPLATE))
    tags = NodeTags(
        instance_id="profile-x", template_id="profile-x", model="m", phase=Phase.AGGREGATED, config="g5.xlarge",
        stage=0, node=0, nodes=1, epoch=1,
    )  # fmt: skip
    order = NodeOrder(region=REGION, zone=f"{REGION}a", market=Market.ON_DEMAND, tags=tags)
    left = cloud.start(FleetId(name=FLEET, account=ACCOUNT), order)
    assert isinstance(left, Started)
    assert set(profiled(ground, configs=["g5.xlarge"]).published) == {"g5.xlarge"}
    assert ground.server.machines(REGION) == []


def test_two_runs_of_a_fleet_do_not_share_it(ground):
    taken = take_lease(
        store_of(ground), FLEET, holder="another run", terms=LeaseTerms(duration_s=100.0), clock=SystemClock()
    )
    with pytest.raises(ProvisionError, match=r"another run .*a run that was killed has ended"):
        profiled(ground)
    taken.give_back()


def test_what_is_missing_is_said_before_anything_is_rented(ground):
    for changes, words in (
        ({"coordinator_file": ""}, "need a coordinator"),
        ({"engine_version": ""}, "version of the nodes' engine"),
        ({"configs": ["g5.xlarge", "g5.xlarge"]}, "once"),
        ({"depths": [4, 2]}, "rising"),
        ({"regions": []}, "no region"),
    ):
        with pytest.raises(InputError, match=words):
            profiled(ground, **changes)
    assert ground.server.count("RunInstances") == 0
