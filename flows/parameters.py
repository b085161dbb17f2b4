"""Parameters of the flows: what the Prefect UI renders as a form and the server validates before a run exists."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from artifacts.leases import LeaseTerms
from coral_core.config.demand import DemandSpec
from coral_core.config.form_titles import form_title
from coral_core.config.scenario import PolicyName, scenario_names
from coral_core.config.settings import load_settings
from coral_core.perf.profiling import Sweep
from tasks.apply import Patience
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
    model_config = ConfigDict(extra="forbid", frozen=True, field_title_generator=form_title)

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


FleetName = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9][a-z0-9-]{0,31})?$",
        description="Fleet that is planned, changed and recorded. Empty: the setting CORAL_FLEET.",
    ),
]
ProviderChoice = Annotated[
    Literal["", "fake", "local", "aws", "gcp"],
    Field(
        description="Where nodes are rented; `fake` rehearses in a folder, `local` is this machine. Empty: the fleet's, or the setting CORAL_PROVIDER."
    ),
]


class ActingParameters(BaseModel):
    """How long a run that changes a fleet holds its lease, waits between looks, and goes on."""

    model_config = ConfigDict(extra="forbid", frozen=True, field_title_generator=form_title)

    lease_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="Seconds after which a run that has died or hangs no longer keeps others from acting.",
    )
    clock_skew_s: float = Field(
        default=30.0, gt=0, le=3600, description="The most that the clocks of two machines may differ."
    )
    poll_s: float = Field(default=5.0, gt=0, le=600, description="Seconds between looks at the fleet.")
    deadline_s: float = Field(
        default=1800.0, gt=0, le=86_400, description="Seconds after which a run leaves the rest to the next one."
    )

    @property
    def patience(self) -> Patience:
        """The same, for the work."""
        return Patience(
            lease=LeaseTerms(duration_s=self.lease_s, skew_s=self.clock_skew_s),
            poll_s=self.poll_s,
            deadline_s=self.deadline_s,
        )


class ReallocateParameters(_Parameters):
    """What to plan, from which library, and whether to act on it."""

    mode: Literal["plan", "approve", "apply"] = Field(
        default="plan",
        description="`plan` records the cheapest plan and changes nothing, `approve` asks before it acts, `apply` acts.",
    )
    dry_run: bool = Field(
        default=False, description="Only list the steps and the difference in cost; nothing is recorded or changed."
    )
    store: StoreUrl = ""
    library_version: int | None = Field(
        default=None, ge=1, description="Snapshot of the scenario's library to plan from. Default: the newest."
    )
    fleet: FleetName = ""
    provider: ProviderChoice = ""
    demand: DemandSpec = Field(default=DemandSpec(), description="Which demand to plan for.")
    keep_running: bool = Field(
        default=False,
        description="Mode plan: take the fleet's last recorded plan as what runs now, not what is seen.",
    )
    max_nodes: int | None = Field(
        default=None, ge=0, description="Nodes that no run may go beyond. Empty: the setting CORAL_MAX_NODES."
    )
    max_usd_per_h: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Cost that no plan and no run may go beyond. Empty: the setting CORAL_MAX_USD_PER_H.",
    )
    approval_timeout_s: int = Field(
        default=3600, ge=1, le=604_800, description="Mode approve: how long to wait for an answer."
    )
    plan_max_age_s: float = Field(
        default=900.0, gt=0, le=604_800, description="Mode approve: a plan approved later than this is made anew."
    )
    acting: ActingParameters = ActingParameters()


class TeardownParameters(BaseModel):
    """Which fleet to release."""

    model_config = ConfigDict(extra="forbid", frozen=True, field_title_generator=form_title)

    fleet: FleetName = ""
    provider: ProviderChoice = ""
    store: StoreUrl = ""
    regions: tuple[str, ...] = Field(
        default=(), description="Regions to look in besides all that the fleet has ever been in."
    )
    dry_run: bool = Field(default=False, description="Only list the steps.")
    confirm: str = Field(default="", description="The fleet's name once more, to release all of it.")
    acting: ActingParameters = ActingParameters()

    @property
    def fleet_name(self) -> str:
        """The fleet, for names of runs."""
        return self.fleet or load_settings().fleet


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


Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], Field(min_length=1, max_length=64)]


class SweepParameters(BaseModel):
    """Which steps are measured, and how clean they must be."""

    model_config = ConfigDict(extra="forbid", frozen=True, field_title_generator=form_title)

    batches: Counts = Field(default=Sweep().batches, description="Requests in a step.")
    prompts: Counts = Field(default=Sweep().prompts, description="Prompt lengths, tokens.")
    contexts: Counts = Field(default=Sweep().contexts, description="Contexts of decode steps, tokens.")
    max_batched_tokens: int = Field(default=Sweep().max_batched_tokens, ge=1, description="Tokens of a prefill step.")
    max_requests: int = Field(default=Sweep().max_requests, ge=1, description="Requests of any step.")
    samples: int = Field(default=Sweep().samples, ge=3, le=1000, description="Steps that are timed of each kind.")
    max_cv_frac: float = Field(
        default=Sweep().max_cv_frac, gt=0, le=1, description="Above this coefficient of variation samples are refused."
    )
    attempts: int = Field(default=Sweep().attempts, ge=1, le=20, description="How often a noisy kind is measured.")


class ProfileParameters(BaseModel):
    """What to measure where, and what that may take."""

    model_config = ConfigDict(extra="forbid", frozen=True, field_title_generator=form_title)

    provider: Literal["local", "aws"] = Field(default="local", description="This machine's CPU, or rented nodes.")
    model: str = Field(default="tiny-chat", min_length=1, description="The model.")
    configs: tuple[str, ...] = Field(
        default=("local-large",), min_length=1, max_length=100, description="Node configurations, one node of each."
    )
    engine_file: str = Field(
        default="engine.yaml", min_length=1, description="How engines serve the model (a YAML file)."
    )
    engine_version: str = Field(
        default="",
        max_length=32,
        description="The version that nodes run. Empty (local only): asked of this machine's.",
    )
    dtype: str = Field(default="", description="Variant of the model. Empty: its own.")
    depths: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = Field(
        default=(), max_length=2, description="Two numbers of layers to cut the model to. Empty: chosen by its shape."
    )
    sweep: SweepParameters = SweepParameters()
    max_minutes: float = Field(default=240.0, gt=0, le=100_000, description="The run's time is up after so long.")
    max_usd: float = Field(default=20.0, gt=0, le=1_000_000, allow_inf_nan=False, description="Its money is up here.")
    regions: tuple[str, ...] = Field(default=(), max_length=50, description="Provider aws: where nodes may be rented.")
    coordinator_file: str = Field(
        default="", description="Provider aws: file of the coordinator that the nodes' launch template names."
    )
    fleet: FleetName = ""
    store: StoreUrl = ""
    fresh: bool = Field(default=False, description="Measure all of it anew, not only what earlier runs left out.")
    dry_run: bool = Field(default=False, description="Only show what would be measured, and the most that it costs.")
