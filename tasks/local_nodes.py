"""The provider `local` from settings: what of this machine nodes may use, and what their agents are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from coral_core.catalog import load_catalog
from coral_core.clock import Clock
from coral_core.cloud.local import LocalLaunch, LocalMachine, LocalProvisioner, NodeSize
from coral_core.cloud.local_records import LocalNode
from coral_core.config.settings import Settings
from coral_core.errors import InputError
from coral_core.units import GIB
from tasks.node_agent import memory_of_machine

LOCAL_ZONES: Final = {"local": ("local-a",)}
AGENT: Final = (sys.executable, "-c", "from coral_core.cli.entry import main; main()", "agent", "run", "--config")
MEMORY_FRAC: Final = 0.8
"""Share of this machine's memory that nodes may use where the settings say nothing."""
DRAIN_S: Final = 5.0
STOP_GRACE_S: Final = 10.0
"""An agent is told to end after its instance was drained, so little is left to wait for."""


def local_provisioner(settings: Settings, clock: Clock, *, agent: tuple[str, ...] = AGENT) -> LocalProvisioner:
    """Nodes on this machine; `agent` is the command to which the path of the agent's file is added.

    Raises InputError at the first start where the settings name no coordinator and keys.
    """
    return LocalProvisioner(
        settings.local,
        machine=local_machine(settings),
        launch=LocalLaunch(argv=agent, document=lambda node: agent_document(settings, node)),
        zones=LOCAL_ZONES,
        clock=clock,
        end_grace_s=DRAIN_S + STOP_GRACE_S + 5.0,
    )


def local_machine(settings: Settings) -> LocalMachine:
    """The CPUs that this process may use, and memory and ports as set; a node takes one CPU per device.

    Raises InputError for more memory than there is.
    """
    there_bytes, memory_gib = memory_of_machine(), settings.local_memory_gib
    memory_bytes = int(there_bytes * MEMORY_FRAC if memory_gib is None else memory_gib * GIB)
    if memory_bytes > there_bytes:
        what = f"{memory_gib:g} GiB are more than this machine has"
        raise InputError(what, where="CORAL_LOCAL_MEMORY_GIB", fix=f"at most {there_bytes / GIB:.1f}")
    configs = load_catalog("local").configs.values()
    return LocalMachine(
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        nodes_per_cpu=settings.local_nodes_per_cpu,
        memory_bytes=memory_bytes,
        first_port=settings.local_first_port,
        last_port=settings.local_first_port + settings.local_ports - 1,
        sizes={config.name: NodeSize(cpus=config.gpu_count, memory_bytes=config.memory_bytes) for config in configs},
    )


def agent_document(settings: Settings, node: LocalNode) -> Mapping[str, object]:
    """What stands in a node's agent file."""
    if not settings.local_coordinator or settings.local_agent_keys is None:
        raise InputError(
            "nodes of the provider local need a coordinator and the keys of its agents",
            where="CORAL_LOCAL_COORDINATOR, CORAL_LOCAL_AGENT_KEYS",
            fix="set both (see docs/local.md), or let `coral serve-demo` show them",
        )
    return {
        "coordinator": settings.local_coordinator,
        "keys_file": str(settings.local_agent_keys.absolute()),
        "node": {
            "node_id": node.node_id,
            "region": node.region,
            "tags": {name: value for name, value in node.tags.items() if name.startswith("coral:")},
        },
        "folder": str(node.folder / "agent"),
        "engine_python": str(settings.engine_interpreter()),
        "first_port": node.first_port,
        "ports": node.ports,
        "cpus": list(node.cpus),
        "memory_bytes": node.memory_bytes,
        "drain_s": DRAIN_S,
        "stop_grace_s": STOP_GRACE_S,
    }
