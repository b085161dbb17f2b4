"""Parameters of the flows: what the Prefect UI renders as a form and the server validates before a run exists."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from coral_core.config.scenario import PolicyName, scenario_names
from tasks.library import ILP_COMBINATIONS_PER_SHARD

ScenarioName = Annotated[
    str,
    Field(
        description="A scenario's name, or the path of a scenario file on the machine that runs the flow.",
        min_length=1,
        examples=list(scenario_names()),
    ),
]
StoreUrl = Annotated[
    str,
    Field(description="Object store (file:///folder or s3://bucket/prefix). Empty: the setting CORAL_STORE."),
]


def artifact_key(*parts: str) -> str:
    """A key that Prefect takes for its artifacts, from names that it may not take."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    scenario: ScenarioName = "tiny"

    @property
    def scenario_name(self) -> str:
        """The scenario without the folders and the ending of its file, for names of runs."""
        return PurePath(self.scenario).name.removesuffix(".yaml").removesuffix(".yml")


class BuildLibraryParameters(_Parameters):
    """What to build, and where it runs."""

    method: Literal["scenario", "lattice-free", "lattice", "ilp"] = Field(
        default="scenario",
        description="How placements are solved: as the scenario says, exactly without a solver, or by integer programs.",
    )
    store: StoreUrl = ""
    executor: Literal["ray", "inline"] = Field(
        default="ray", description="Ray, or one shard after the other in the flow's own process."
    )
    ray_address: str = Field(
        default="",
        description="`local` for a private Ray on this machine, or host:port of a cluster's head. Empty: CORAL_RAY_ADDRESS.",
    )
    workers: int | None = Field(
        default=None, ge=1, le=4096, description="CPUs of a local Ray. Default: all of the machine's."
    )
    combinations_per_ilp_shard: int = Field(
        default=ILP_COMBINATIONS_PER_SHARD,
        ge=1,
        le=10_000,
        description="Method ilp: node combinations per shard. Fewer spread better over a cluster, and are more files.",
    )
    lattice_parts: int = Field(
        default=1,
        ge=1,
        le=1_000,
        description="Method lattice: shards per model and phase. More than 1 pays only with more CPUs than those.",
    )
    keep_all: bool = Field(
        default=False,
        description="Store templates too that another equals with a subset of their nodes. Plans are the same without them.",
    )
    allow_partial: bool = Field(
        default=False,
        description="Commit a snapshot even where shards failed. Plans made from it may be dearer than they need to be.",
    )


class ReallocateParameters(_Parameters):
    """What to plan, from which library."""

    mode: Literal["plan"] = Field(default="plan", description="`plan` records the cheapest plan and changes nothing.")
    store: StoreUrl = ""
    library_version: int | None = Field(
        default=None, ge=1, description="Snapshot of the scenario's library to plan from. Default: the newest."
    )
    fleet: str = Field(
        default="",
        pattern=r"^([a-z0-9][a-z0-9-]{0,31})?$",
        description="Fleet that the plan is recorded under. Empty: the setting CORAL_FLEET.",
    )
    keep_running: bool = Field(
        default=False,
        description="Take the fleet's last recorded plan as what runs now, so that changes are charged for churn.",
    )


class EvaluateParameters(_Parameters):
    """What to compare in the simulator."""

    policies: tuple[PolicyName, ...] = Field(default=(), description="Policies to compare. Empty: the scenario's.")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="Seeds of the requests. Empty: the scenario's."
    )
    prefill_utilization: float | None = Field(
        default=None, gt=0, le=1, description="max_utilization_frac of prefill. Default: the scenario's."
    )
    decode_utilization: float | None = Field(
        default=None, gt=0, le=1, description="max_utilization_frac of decode. Default: the scenario's."
    )
    store: StoreUrl = ""
    workers: int = Field(default=1, ge=1, le=4096, description="Processes that build missing libraries.")
