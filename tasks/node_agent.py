"""A node's agent from its file: who the node is, what runs its engine."""

from __future__ import annotations

import contextlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coral_core.cloud.tags import parse_tags
from coral_core.config.agent import AgentSpec, MetadataSpec
from coral_core.domain.fleet import NodeTags
from coral_core.errors import InputError, ServingError
from coral_core.serving.control.messages import Hello, NodeReport
from tasks.direct_http import open_directly

_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 2.0
_TAG_PREFIX: Final = "coral:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whoami:
    """A node as its file or its cloud says."""

    node_id: str
    region: str
    host: str
    tags: NodeTags


def who_am_i(spec: AgentSpec, *, patience_s: float = _PATIENCE_S) -> Whoami:
    """Who the node is. Raises InputError for tags that are none, ServingError where the metadata service does not tell."""
    found: Mapping[str, str]
    if spec.node is not None:
        node_id, region, host, found = spec.node.node_id, spec.node.region, spec.node.host, spec.node.tags
        where, fix = "node.tags", "the agent's file names all of them (docs/control-plane.md)"
    else:
        assert spec.metadata is not None
        node_id, region, host, found = _from_metadata(spec.metadata, patience_s)
        where, fix = "instance tags", "nodes are tagged at their launch; allow tags in their metadata"
    tags = parse_tags(found)
    if isinstance(tags, str):
        raise InputError(tags, where=where, fix=fix)
    return Whoami(node_id=node_id, region=region, host=host, tags=tags)


def hello_of(spec: AgentSpec, who: Whoami) -> Hello:
    """What the agent says of its node; its epoch is the time, so that a younger agent of the same node counts."""
    return Hello(
        node_id=who.node_id,
        tags=who.tags,
        region=who.region,
        host=who.host,
        first_port=spec.first_port,
        ports=spec.ports,
        cpus=spec.cpus,
        memory_bytes=spec.memory_bytes,
        agent_epoch=time.time_ns(),
        report=NodeReport(),
    )


def take_share(spec: AgentSpec) -> None:
    """Keep this process, and the engine that it starts, to the file's CPUs; none: all. InputError for what is not there.

    Memory is only compared with the machine's: nothing keeps an engine to it.
    """
    there_bytes = memory_of_machine()
    if spec.memory_bytes is not None and spec.memory_bytes > there_bytes:
        what = f"cannot have {spec.memory_bytes} bytes of memory"
        raise InputError(what, where="memory_bytes", fix=f"there are {there_bytes}")
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # none of them is there
        os.sched_setaffinity(0, spec.cpus or before)
    missing = set(spec.cpus) - os.sched_getaffinity(0)  # the kernel takes a list of which some are there
    if missing:
        os.sched_setaffinity(0, before)
        raise InputError(
            f"cannot have CPUs {', '.join(map(str, sorted(missing)))}",
            where="cpus",
            fix=f"there are {', '.join(map(str, sorted(before)))}",
        )


def memory_of_machine() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _from_metadata(spec: MetadataSpec, patience_s: float) -> tuple[str, str, str, Mapping[str, str]]:
    """(node, region, address, tags) by the metadata service of EC2, version 2; it may come up after the agent."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            token = _asked(spec, "api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
            headers = {"X-aws-ec2-metadata-token": token}

            def ask(path: str, headers: Mapping[str, str] = headers) -> str:
                return _asked(spec, f"meta-data/{path}", headers=headers)

            names = [name for name in ask("tags/instance/").split() if name.startswith(_TAG_PREFIX)]
            tags = {name: ask(f"tags/instance/{name}") for name in names}
            return ask("instance-id"), ask("placement/region"), ask("local-ipv4"), tags
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline_s:
                raise ServingError(
                    f"the metadata service does not tell who this node is: {error}",
                    where=spec.url,
                    fix="allow tags in instance metadata, or name the node in the agent's file",
                ) from None
            time.sleep(_PAUSE_S)


def _asked(spec: MetadataSpec, path: str, *, headers: Mapping[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(f"{spec.url}/latest/{path}", headers=dict(headers), method=method)  # noqa: S310 - configured
    with open_directly(request, timeout=5) as response:
        return str(response.read().decode("utf-8"))
