"""Settings from the environment (`CORAL_*`): where things live, never what the plan is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from coral_core.errors import InputError

ProviderName = Literal["fake", "local", "aws", "gcp"]


class Settings(BaseSettings):
    """`CORAL_STORE`, `CORAL_FLEET`, `CORAL_PROVIDER` and so on: all that planning needs has working defaults."""

    model_config = SettingsConfigDict(env_prefix="CORAL_", extra="ignore", frozen=True)

    store: str = Field(default="", description="object store URL; default: file:// under the working folder")
    models: Path = Field(default=Path(".coral/models"), description="folder of the models added by the user")
    ray_address: str = Field(default="local", description="`local`, or host:port of a Ray cluster's head")
    fleet: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=32)
    notify: str = Field(default="", description="told of failures: an http(s) URL, or type/name of a Prefect block")
    provider: ProviderName = Field(default="fake", description="where nodes are rented; `fake` rehearses in a folder")
    rehearsal: Path = Field(default=Path(".coral/rehearsal"), description="folder of the provider `fake`")
    engine_python: Path = Field(
        default=Path(".venv-engine/bin/python"),
        description="interpreter that has vLLM; `make engine-cpu` makes the default",
    )
    local: Path = Field(default=Path(".coral/local"), description="folder of the provider `local`, this machine")
    local_coordinator: str = Field(
        default="",
        pattern=r"^(tcp://[A-Za-z0-9.:\[\]-]+)?$",
        description="tcp://HOST:PORT that local nodes register at",
    )
    local_agent_keys: Path | None = Field(default=None, description="keys file of the agents of local nodes")
    local_nodes_per_cpu: int = Field(default=4, ge=1, le=64, description="nodes that may share one CPU")
    local_memory_gib: float | None = Field(default=None, gt=0, le=1e6, description="for all local nodes; default: 80%")
    local_first_port: int = Field(default=20000, ge=1024, le=65535, description="first port of local nodes")
    local_ports: int = Field(default=1000, ge=16, le=60000, description="how many ports local nodes may use")
    max_nodes: int | None = Field(default=None, ge=0, description="nodes that no run may go beyond")
    max_usd_per_h: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="the same for the cost")
    aws_launch_template: str = Field(default="coral-node", description="name of the launch template in every region")
    aws_profile: str | None = Field(default=None, description="profile of the AWS credentials")
    aws_home_region: str = Field(default="us-east-1", description="asked where no region is meant in particular")
    aws_subnets: dict[str, str] = Field(default={}, description="JSON: subnet by zone; default: the default network")
    gcp_project: str = Field(default="", description="project of the provider `gcp`")
    gcp_instance_template: str = Field(default="coral-node", description="a global instance template of the project")
    gcp_zones: dict[str, tuple[str, ...]] = Field(default={}, description="JSON: zones by region")

    gateway_admin_url: str = Field(
        default="",
        pattern=r"^(http://[A-Za-z0-9.:\[\]-]+)?$",
        description="http://HOST:PORT of the gateway's admin side",
    )
    gateway_token_file: Path | None = Field(default=None, description="file with the admin token of the gateway")

    @property
    def store_url(self) -> str:
        """The object store's URL."""
        return self.store or (Path.cwd() / ".coral" / "store").as_uri()

    def engine_interpreter(self) -> Path:
        """The absolute path of the engine's interpreter; InputError where `engine_python` names no program."""
        # Not resolved: behind its symbolic link a virtual environment's interpreter is the system's.
        interpreter = self.engine_python.expanduser().absolute()
        if not interpreter.is_file() or not os.access(interpreter, os.X_OK):
            raise InputError(
                f"no interpreter for engines at {interpreter}",
                where="environment variable CORAL_ENGINE_PYTHON",
                fix="make one with `make engine-cpu`, or name one that has vLLM",
            )
        return interpreter


def load_settings() -> Settings:
    """Settings from the environment; InputError names the variable that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = f"CORAL_{'_'.join(str(part) for part in fault['loc']).upper()}"
        raise InputError(str(fault["msg"]), where=f"environment variable {name}") from None
