"""The infrastructure code: it parses, all that it names exists, and only the gateway is open to the world."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import pytest
import yaml

from coral_core.cloud import aws_provisioner, aws_sources
from coral_core.cloud.tags import FLEET_TAG

INFRA = Path(__file__).resolve().parents[2] / "infra"
ROOT = INFRA / "terraform"
MODULES = {"": ROOT, **{path.name: path for path in sorted((ROOT / "modules").iterdir())}}
ANYWHERE = ("0.0.0.0/0", "::/0")


@cache
def blocks(module: str) -> dict[str, list[dict[str, Any]]]:
    """All blocks of a module by kind, labels as keys."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(MODULES[module].glob("*.tf")):
        for kind, items in bare(hcl2.loads(path.read_text(encoding="utf-8"))).items():
            found.setdefault(kind, []).extend(items if isinstance(items, list) else [items])
    return found


CORAL = [sys.executable, "-c", "from coral_core.cli.entry import main; main()"]


def bare(value: Any) -> Any:
    """The parser keeps the quotes of labels and texts, and marks blocks."""
    if isinstance(value, dict):
        return {str(bare(key)): bare(item) for key, item in value.items() if not str(key).startswith("__")}
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value


def named(module: str, kind: str) -> dict[str, dict[str, Any]]:
    """Blocks with one label (variable, output, module) by it."""
    return {name: body for item in blocks(module).get(kind, []) for name, body in item.items()}


def resources(module: str, kind: str = "resource") -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (typ, name): body
        for item in blocks(module).get(kind, [])
        for typ, inner in item.items()
        for name, body in inner.items()
    }


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


def source(module: str) -> str:
    """The module's text without comments: what is referred to stands there whatever the parser makes of it."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(MODULES[module].glob("*.tf")))
    return re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_all_that_a_module_refers_to_is_declared_there_and_all_that_is_declared_is_used(module):
    text = source(module)
    variables, used = set(named(module, "variable")), set(re.findall(r"\bvar\.(\w+)", text))
    assert used == variables
    found = set(resources(module))
    for typ, name in re.findall(r"(?<![\w.\"-])(aws_\w+)\.(\w+)", text):
        assert (typ, name) in found | set(resources(module, "data")), f"{typ}.{name}"
    for typ, name in re.findall(r"\bdata\.(aws_\w+)\.(\w+)", text):
        assert (typ, name) in resources(module, "data")
    local = {name for item in blocks(module).get("locals", []) for name in item}
    assert set(re.findall(r"\blocal\.(\w+)", text)) == local


def test_modules_get_exactly_what_they_ask_for_and_give_what_is_used_of_them():
    calls = named("", "module")
    assert set(calls) == set(MODULES) - {""}
    for name, call in calls.items():
        given = set(call) - {"source", "for_each"}
        asked = named(name, "variable")
        assert given <= set(asked), name
        assert {key for key, body in asked.items() if "default" not in body} <= given, name
    for name, output in re.findall(r"\bmodule\.(\w+)(?:\[[^\]]*\])?\.(\w+)", source("")):
        assert output in named(name, "output"), f"{name}.{output}"


def test_the_example_names_every_variable_without_a_default():
    example = bare(hcl2.loads((ROOT / "example.tfvars").read_text(encoding="utf-8")))
    declared = named("", "variable")
    assert set(example) <= set(declared)
    assert {name for name, body in declared.items() if "default" not in body} <= set(example)


def test_every_resource_says_its_region_or_has_none():
    worldwide = re.compile(r"aws_iam_|aws_vpc_peering_connection$")
    for module in MODULES:
        for (typ, name), body in resources(module).items():
            if typ.startswith("aws_iam_"):
                assert "region" not in body
            elif not worldwide.match(typ):
                assert "region" in body, f"{module} {typ}.{name}"


def test_only_the_gateway_is_open_to_the_world():
    open_ones = []
    for module in MODULES:
        for (typ, name), body in resources(module).items():
            assert typ not in {"aws_security_group_rule", "aws_network_acl_rule"}, "rules are kept in one kind"
            if typ == "aws_security_group":
                assert not {"ingress", "egress"} & set(body)
            if typ == "aws_vpc_security_group_ingress_rule":
                sources = body.get("cidr_ipv4", ""), body.get("cidr_ipv6", "")
                inside = "referenced_security_group_id" in body or "fleet_cidrs" in str(body.get("for_each", ""))
                assert not set(sources) & set(ANYWHERE)
                if not inside:
                    open_ones.append((module, name, str(body["from_port"]), str(body["to_port"])))
            assert body.get("associate_public_ip_address") in {None, False}
            assert body.get("map_public_ip_on_launch") in {None, False}
            assert body.get("publicly_accessible") in {None, False}
    assert open_ones == [("control", "gateway", "443", "443")]
    assert [name for (typ, name) in resources("control") if typ == "aws_lb"] == ["gateway"]


def block(body: dict[str, Any], name: str) -> dict[str, Any]:
    found = body[name]
    return found[0] if isinstance(found, list) else found


def test_instances_take_session_tokens_only_and_keep_data_encrypted():
    machines = [
        body
        for module in MODULES
        for (typ, _), body in resources(module).items()
        if typ in {"aws_instance", "aws_launch_template"}
    ]
    assert len(machines) == 2
    for body in machines:
        metadata = block(body, "metadata_options")
        assert (metadata["http_tokens"], str(metadata["http_put_response_hop_limit"])) == ("required", "1")
    (volume,) = [
        block(block(body, "block_device_mappings"), "ebs")
        for (typ, _), body in resources("region").items()
        if typ == "aws_launch_template"
    ]
    assert volume["encrypted"] is True
    assert volume["delete_on_termination"] is True
    assert block(resources("control")["aws_instance", "control"], "root_block_device")["encrypted"] is True


def statements(name: str) -> list[dict[str, Any]]:
    found = resources("access", "data")["aws_iam_policy_document", name]["statement"]
    return found if isinstance(found, list) else [found]


def actions(*documents: str) -> set[str]:
    return {action for name in documents for statement in statements(name) for action in statement["actions"]}


def api_operations() -> set[str]:
    """EC2 and other operations that the AWS code calls, from its source."""
    text = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (aws_provisioner, aws_sources))
    found = re.findall(r'"(ec2|pricing|service-quotas|sts)",\s*[\w.]+,\s*"([a-z_]+)"', text)
    assert len(found) > 10
    prefix = {"service-quotas": "servicequotas"}
    return {f"{prefix.get(of, of)}:{''.join(word.capitalize() for word in name.split('_'))}" for of, name in found}


def test_the_flow_role_may_do_what_the_code_calls_and_no_more():
    called = api_operations() - {"sts:GetCallerIdentity"}  # needs no permission
    allowed = {action for action in actions("observe", "fleet") if not action.startswith("iam:")} - {"ec2:CreateTags"}
    assert allowed == called


def test_what_changes_something_is_bound_to_the_fleet_tag_or_to_a_named_resource():
    for statement in statements("fleet"):
        conditions = statement.get("condition", [])
        variables = " ".join(
            str(condition["variable"]) for condition in (conditions if isinstance(conditions, list) else [conditions])
        )
        named_only = statement["sid"] == "Where"
        assert named_only or FLEET_TAG in variables or re.search(r"ec2:|iam:|launch-template", variables)
        assert statement["resources"] != ["*"]
    for statement in [*statements("node"), *statements("store")]:
        assert "*" not in statement["resources"]
        assert not any(action.endswith("*") for action in statement["actions"])


def test_nodes_can_change_nothing():
    assert actions("node") == {"s3:GetObject", "s3:ListBucket", "secretsmanager:GetSecretValue", "kms:Decrypt"}


def filled(path: Path) -> str:
    """A template of Terraform with every name filled in; fails where the caller gives another set of names."""
    text = path.read_text(encoding="utf-8")
    wanted = set(re.findall(r"(?<!\$)\$\{(\w+)\}", text))
    module = "" if path.name == "node.yaml" else "control"
    call = re.search(rf'templatefile\("[^"]*{path.name}", \{{(.*?)\n\s*\}}\)', source(module), re.DOTALL)
    assert call is not None
    assert set(re.findall(r"^\s*(\w+)\s*=", call.group(1), re.MULTILINE)) == wanted
    return re.sub(r"(?<!\$)\$\{(\w+)\}", r"\1", text)


@pytest.mark.parametrize("name", ["node.yaml", "control.yaml"])
def test_machines_boot_from_sound_cloud_init_without_secrets(name):
    text = filled(INFRA / "cloud-init" / name)
    assert text.startswith("#cloud-config\n")
    assert len(text.encode()) < 16_384, "EC2 takes no more user data"
    cloud = yaml.safe_load(text)
    assert cloud["ssh_pwauth"] is False
    files = {item["path"]: item for item in cloud["write_files"]}
    started = {unit for command in cloud["runcmd"] for unit in command if str(unit).endswith(".service")}
    units = {Path(path).name: item["content"] for path, item in files.items() if path.endswith(".service")}
    assert started == set(units)
    scripts = {path for path in files if path.startswith("/usr/local/sbin/")}
    run = "\n".join([*units.values(), yaml.safe_dump(cloud["runcmd"])])
    assert {path for path in scripts if path in run} == scripts
    for path in scripts:
        assert files[path]["permissions"] == "0755"
        assert files[path]["content"].startswith("#!/bin/bash\n")
        assert "set -euo pipefail" in files[path]["content"]
        checked = subprocess.run(
            ["bash", "-n"], input=files[path]["content"], text=True, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, ""), path
    for unit in units.values():
        for path in re.findall(r"^EnvironmentFile=(\S+)", unit, re.MULTILINE):
            assert path in files
    assert not re.search(r"(?i)(password|secret|token)\s*[:=]\s*[\"']?[A-Za-z0-9/+]{12,}", text)


def test_nodes_and_control_machine_start_what_there_is(tmp_path):
    from coral_core.config.agent import load_agent_file

    for name, commands in (("node", {"agent run"}), ("control", {"flows serve", "gateway run", "coordinator run"})):
        files = {
            f["path"]: f["content"]
            for f in yaml.safe_load(filled(INFRA / "cloud-init" / f"{name}.yaml"))["write_files"]
        }
        starts = re.findall(
            r"^ExecStart=/opt/coral/bin/coral (\w+ \w+)(?: --config (\S+))?$", "\n".join(files.values()), re.MULTILINE
        )
        assert {command for command, _ in starts} == commands
        for command, _ in starts:
            assert (
                subprocess.run([*CORAL, *command.split(), "--help"], capture_output=True, check=False).returncode == 0
            )
    agent = filled(INFRA / "cloud-init" / "node.yaml")
    files = {item["path"]: item["content"] for item in yaml.safe_load(agent)["write_files"]}
    (tmp_path / "agent.yaml").write_text(files["/etc/coral/agent.yaml"], encoding="utf-8")
    spec = load_agent_file(tmp_path / "agent.yaml")
    assert str(spec.keys_file) in files["/usr/local/sbin/coral-keys"]
    assert spec.coordinator.endswith(":5600")
    assert "agent_port   = 5600" in source("control")
    unit = files["/etc/systemd/system/coral-agent.service"]
    stop_s = float(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert spec.drain_s + spec.stop_grace_s < stop_s
    assert "ExecStart=/opt/coral/bin/coral agent run --config /etc/coral/agent.yaml" in unit


def test_the_ray_cluster_file_is_sound():
    cluster = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text(encoding="utf-8"))
    types = cluster["available_node_types"]
    assert cluster["head_node_type"] in types
    assert cluster["provider"]["use_internal_ips"] is True
    for name, spec in types.items():
        assert spec["max_workers"] <= cluster["max_workers"], name
        assert spec["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
        assert spec["node_config"]["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True
    assert types["worker"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
