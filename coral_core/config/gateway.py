"""A gateway's YAML files: where it listens, what it serves on which instances, its limits, and the keys it knows."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coral_core.config.fields import NonNegative, Positive, Strict
from coral_core.config.yaml_lines import read_yaml_model

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", max_length=128)]
InstanceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seconds = Annotated[float, Field(ge=0.001, le=1e7, strict=True)]


class ListenSpec(Strict):
    """An address. Port 0: any free one."""

    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535, strict=True)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class AdminSpec(ListenSpec):
    """The admin side, for the fleet's own programs: loopback only."""

    token_file: Path = Field(description="file with the token, of at least 32 characters, alone on its line")

    @model_validator(mode="after")
    def _private(self) -> Self:
        if not self.is_loopback:
            raise ValueError("the admin side listens on loopback only; reach it through a tunnel or an agent")
        return self


class SloSpec(Strict):
    """Latency bounds."""

    ttft_s: Positive
    tpot_s: Positive


class ServedModelSpec(Strict):
    """A model, its SLO, and what requests of it are on average."""

    name: Label
    slo: SloSpec
    mean_input_tokens: Positive
    mean_output_tokens: Positive
    prompt_s: NonNegative = Field(default=0.0, description="what a mean prompt takes on an idle instance")
    planned_tpot_frac: Positive = Field(default=1.0, le=1, description="share of the TPOT that decode was planned for")


class InstanceEntry(Strict):
    """A serving instance. Weight: T(tau); prefill and decode in tokens/s, aggregated in requests/s."""

    name: InstanceName
    model: Label
    phase: Literal["prefill", "decode", "aggregated"]
    url: str = Field(pattern=r"^http://[A-Za-z0-9.\-\[\]:]+$")
    weight: NonNegative
    region: str = "local"


class LimitsSpec(Strict):
    """What the gateway keeps to; what is not given has the gateway's own value."""

    max_body_bytes: Count | None = None
    max_answer_bytes: Count | None = None
    max_requests: Count | None = None
    max_choices: Count | None = None
    max_retries: Annotated[int, Field(ge=0, le=5, strict=True)] | None = None
    header_s: Seconds | None = None
    body_s: Seconds | None = None
    connect_s: Seconds | None = None
    first_byte_s: Seconds | None = None
    stall_s: Seconds | None = None
    gone_stall_s: Seconds | None = None
    request_s: Seconds | None = None
    drain_s: Seconds | None = None
    probe_s: Seconds | None = None
    probe_timeout_s: Seconds | None = None
    eject_s: Seconds | None = None
    eject_after: Count | None = None
    retry_after_s: Seconds | None = None
    demand_every_s: Annotated[float, Field(ge=1, le=3600, strict=True)] | None = None


class GatewaySpec(Strict):
    """The file of `coral gateway run --config`. Paths in it are relative to its own folder."""

    listen: ListenSpec
    admin: AdminSpec | None = None
    keys_file: Path | None = Field(default=None, description="without one anybody may ask, on loopback only")
    record_demand: bool = Field(default=False, description="write measured demand to the store, for the fleet's plans")
    limits: LimitsSpec = LimitsSpec()
    models: tuple[ServedModelSpec, ...] = Field(min_length=1)
    instances: tuple[InstanceEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, names in (
            ("models", [model.name for model in self.models]),
            ("instances", [instance.name for instance in self.instances]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} has {', '.join(twice)} more than once")
        if self.keys_file is None and not self.listen.is_loopback:
            raise ValueError("without a keys_file anybody could ask: listen on 127.0.0.1, or name one")
        if self.admin and self.admin.port == self.listen.port != 0:
            raise ValueError(f"listen and admin have the same port {self.listen.port}: give each its own")
        served = [model.name for model in self.models]
        for instance in self.instances:
            if instance.model not in served:
                raise ValueError(f"instance {instance.name} is of the model {instance.model}, which models lacks")
        return self


class KeyEntry(Strict):
    """One API key and its limits."""

    name: InstanceName
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$", description="made by `coral gateway hash-key`")
    requests_per_s: Annotated[float, Field(ge=1e-6, le=1e9, strict=True)] | None = None
    burst_requests: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    concurrent_requests: Count | None = None


class KeysSpec(Strict):
    """The keys file."""

    keys: tuple[KeyEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for what in ("name", "hash"):
            values = [getattr(key, what) for key in self.keys]
            twice = [key.name for key in self.keys if values.count(getattr(key, what)) > 1]
            if twice:
                raise ValueError(f"{' and '.join(dict.fromkeys(twice))} have the same {what}")
        return self


def load_gateway_file(path: Path) -> GatewaySpec:
    """The gateway's file; InputError names file and line of the first fault. Its paths are made absolute."""
    spec = read_yaml_model(path, GatewaySpec)
    folder = path.resolve().parent
    changes: dict[str, object] = {}
    if spec.keys_file is not None:
        changes["keys_file"] = folder / spec.keys_file
    if spec.admin is not None:
        changes["admin"] = spec.admin.model_copy(update={"token_file": folder / spec.admin.token_file})
    return spec.model_copy(update=changes)


def load_keys_file(path: Path) -> KeysSpec:
    """The keys file; InputError names file and line of the first fault."""
    return read_yaml_model(path, KeysSpec)
