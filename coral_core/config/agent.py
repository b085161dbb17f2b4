"""The file of a node's agent: who the node is, where its coordinator is, and what its engine may use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from coral_core.config.fields import NonNegative, Positive, Strict
from coral_core.config.yaml_lines import read_yaml_model

Endpoint = Annotated[str, Field(pattern=r"^tcp://[A-Za-z0-9._\-\[\]:]+:[0-9]{1,5}$", max_length=200)]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*$", max_length=128)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Cpu = Annotated[int, Field(ge=0, le=4095, strict=True)]


class NodeSpec(Strict):
    """Who the node is. `tags` are those that the cloud has of it (`coral:instance`, `coral:template` and so on)."""

    node_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    region: str = Field(default="local", max_length=64)
    host: Host = Field(default="127.0.0.1", description="the address under which gateway and other nodes reach it")
    tags: dict[str, str]


class MetadataSpec(Strict):
    """Where a rented node asks who it is: the metadata service of its cloud, with tags allowed in it."""

    url: str = Field(default="http://169.254.169.254", pattern=r"^http://[A-Za-z0-9.\-\[\]:]+$")


class AgentSpec(Strict):
    """The file of `coral agent run --config`. Paths in it are relative to its own folder."""

    coordinator: Endpoint
    keys_file: Path = Field(description="made by `coral keys new agent`; nobody else may read it")
    node: NodeSpec | None = None
    metadata: MetadataSpec | None = None
    folder: Path = Field(default=Path("agent"), description="what the agent keeps: its engine's pid and logs")
    engine_python: Path | None = Field(default=None, description="default: CORAL_ENGINE_PYTHON")
    first_port: Port = 20000
    ports: int = Field(default=64, ge=1, le=65535, strict=True)
    cpus: tuple[Cpu, ...] = Field(default=(), description="CPUs of its own; none: all")
    memory_bytes: int | None = Field(default=None, ge=1, strict=True, description="that its engine may use")
    heartbeat_s: Positive = Field(default=1.0, le=2.0)
    drain_s: NonNegative = Field(
        default=120.0, description="how long requests may take to end when the agent is told to"
    )
    stop_grace_s: NonNegative = Field(default=20.0, description="between asking an engine to end and killing it")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not 0 < int(self.coordinator.rpartition(":")[2]) <= 65535:
            raise ValueError(f"coordinator has a port that is none: {self.coordinator}")
        if (self.node is None) == (self.metadata is None):
            raise ValueError("give either node (who it is) or metadata (where to ask)")
        if self.first_port + self.ports > 65536:
            raise ValueError(f"ports {self.first_port} to {self.first_port + self.ports - 1} go beyond 65535")
        if len(set(self.cpus)) < len(self.cpus):
            raise ValueError("cpus names a CPU twice")
        return self


def load_agent_file(path: Path) -> AgentSpec:
    """The agent's file; InputError names file and line of the first fault. Its paths are made absolute."""
    spec = read_yaml_model(path, AgentSpec)
    home = path.resolve().parent
    changes: dict[str, object] = {"keys_file": home / spec.keys_file, "folder": home / spec.folder}
    if spec.engine_python is not None:
        changes["engine_python"] = home / spec.engine_python
    return spec.model_copy(update=changes)
