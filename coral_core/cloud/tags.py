"""Tags and tokens: how a node says whose it is, and how that is proven.

The client token is a hash of the fleet, account, instance id and node number. Clouds keep it with the node and nobody
else's launch can carry it by accident: a copy of the tags ("launch more like this", a fleet of the same name, a
hand-made tag) has another token and is foreign.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Final

from coral_core.domain.fleet import FleetId, NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, ProvisionError

FLEET_TAG: Final = "coral:fleet"
_FIELDS: Final = ("instance", "template", "model", "phase", "config", "stage", "node", "nodes", "epoch")
_FLEET_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


def check_fleet_name(name: str, *, where: str = "fleet") -> None:
    """Raise InputError unless every cloud takes `name` as a tag and as part of a name."""
    if not _FLEET_NAME.fullmatch(name):
        raise InputError(
            f"bad fleet name {name!r}", where=where, fix="use 1 to 40 lowercase letters, digits and dashes"
        )


def instance_id(
    fleet: FleetId, *, plan_id: str, template_id: str, region: str, zone: str, market: Market, ordinal: int
) -> str:
    """The id of a serving instance; `ordinal` counts the replicas of one plan and their repeated attempts alike.

    The same plan run again asks for the same ids, hence for the same tokens: what an interrupted run has started and no
    listing shows yet is found again instead of doubled. At most 40 ASCII characters for template ids up to 27.
    """
    return (
        f"{template_id}-{_digest([*_identity(fleet), plan_id, template_id, region, zone, market.value, ordinal], 12)}"
    )


def client_token(fleet: FleetId, instance: str, node: int) -> str:
    """The idempotency token of one node: 50 ASCII characters (EC2 allows 64; 63 make a GCE name)."""
    return f"coral-{_digest([*_identity(fleet), instance, node], 44)}"


def write_tags(fleet: FleetId, tags: NodeTags) -> dict[str, str]:
    """All tags of a node, the readable `Name` included."""
    values = (
        tags.instance_id,
        tags.template_id,
        tags.model,
        tags.phase.value,
        tags.config,
        str(tags.stage),
        str(tags.node),
        str(tags.nodes),
        str(tags.epoch),
    )
    named = {f"coral:{name}": value for name, value in zip(_FIELDS, values, strict=True)}
    return {"Name": f"{fleet.name}/{tags.instance_id}/{tags.node}", FLEET_TAG: fleet.name, **named}


def read_tags(fleet: FleetId, found: Mapping[str, str], *, account: str, token: str) -> NodeTags | str:
    """The tags of a node of ours, or the reason why it is foreign. `token` is what the cloud kept from its launch."""
    if found.get(FLEET_TAG) != fleet.name:
        return f"belongs to fleet {found.get(FLEET_TAG)!r}"
    if account != fleet.account:
        return f"belongs to account {account}, not to {fleet.account}"
    tags = parse_tags(found)
    if isinstance(tags, NodeTags) and token != client_token(fleet, tags.instance_id, tags.node):
        return "was not launched by this fleet: its tags are a copy (its client token is not theirs)"
    return tags


def known_state(states: Mapping[str, NodeState], name: str, *, where: str) -> NodeState:
    """What a cloud's word for a machine's state means; ProvisionError for a word never heard, which is not guessed."""
    if name not in states:
        raise ProvisionError(
            f"unknown state {name!r} of a machine", where=where, fix="end that machine, or report it as a bug of Coral"
        )
    return states[name]


def parse_tags(found: Mapping[str, str]) -> NodeTags | str:
    """What tags say of a node, or what is wrong with them; whose node it is they do not prove."""
    missing = [f"coral:{name}" for name in _FIELDS if not found.get(f"coral:{name}")]
    if missing:
        return f"lacks the tag{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
    text = {name: found[f"coral:{name}"] for name in _FIELDS}
    numbers = {name: int(text[name]) for name in ("stage", "node", "nodes", "epoch") if _is_count(text[name])}
    if len(numbers) < 4 or text["phase"] not in set(Phase):
        return "has a tag that is no phase or no number where one is due"
    if numbers["node"] >= numbers["nodes"]:
        return f"says it is node {numbers['node']} of {numbers['nodes']}"
    return NodeTags(
        instance_id=text["instance"],
        template_id=text["template"],
        model=text["model"],
        phase=Phase(text["phase"]),
        config=text["config"],
        **numbers,
    )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def _identity(fleet: FleetId) -> list[str]:
    return [fleet.name, fleet.account]


def _digest(parts: list[object], length: int) -> str:
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:length]
