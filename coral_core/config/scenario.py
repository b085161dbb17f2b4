"""Scenarios: what to serve, where, on what, under which limits; YAML that users copy and edit (DESIGN 10)."""

from __future__ import annotations

import math
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from coral_core.config.fields import Name, Nodes, NonNegative, Positive, Strict
from coral_core.config.market_spec import ExclusionSpec, PreferenceSpec, SpotSpec
from coral_core.config.yaml_lines import key_line, parse_yaml_model, read_yaml_model
from coral_core.domain.launch import Runtime
from coral_core.domain.workload import Phase
from coral_core.errors import unknown_name

PolicyName = Literal["coral", "coral_paper", "homo_joint", "homo", "cauchy", "helix"]


class SloSpec(Strict):
    """Latency bounds of one model, in seconds."""

    ttft_s: Positive = Field(le=3600, description="time to first token")
    tpot_s: Positive = Field(le=60, description="time per output token")


class LengthsSpec(Strict):
    """Mean request lengths, where they are not one of the named length statistics."""

    mean_input_tokens: Positive = Field(le=10_000_000)
    mean_output_tokens: Positive = Field(le=10_000_000)
    source: str = "given in the scenario"


class TraceSpec(Strict):
    """A trace file whose lengths (and rate, unless one is given) are used; relative to the scenario file."""

    trace: Path
    format: Literal["auto", "azure", "burstgpt", "mooncake"] = "auto"


class InstanceLimits(Strict):
    """Bounds on the number of instances of one model in one phase."""

    min_instances: int = Field(strict=True, default=0, ge=0, le=100_000)
    max_instances: int | None = Field(strict=True, default=None, ge=0, le=100_000)

    @model_validator(mode="after")
    def _ordered(self) -> InstanceLimits:
        if self.max_instances is not None and self.max_instances < self.min_instances:
            raise ValueError(f"max_instances {self.max_instances} is below min_instances {self.min_instances}")
        return self


class ModelSpec(Strict):
    """One model to serve and what is asked of it."""

    model: str
    variant: str | None = Field(default=None, description="dtype variant; default: the model's own")
    variants: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="dtype variants that compete, instead of one"
    )
    phases: tuple[Phase, ...] = Field(default=(Phase.PREFILL, Phase.DECODE), min_length=1)
    requests_per_s: NonNegative | None = Field(default=None, le=1e6, description="default: the trace's own rate")
    lengths: str | LengthsSpec | TraceSpec
    slo: SloSpec
    weight: Positive = Field(default=1.0, description="importance when not all demand can be met")
    limits: dict[Phase, InstanceLimits] = Field(default_factory=dict)
    on_demand_frac: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.0, description="share of the demand that nodes other than spot must be able to serve"
    )
    spare_instances: int = Field(
        strict=True,
        default=0,
        ge=0,
        le=1,
        description="instances that may fail in each phase with the demand still met",
    )
    region_fracs: dict[str, Annotated[float, Field(strict=True, ge=0, le=1)]] = Field(
        default_factory=dict, description="share of the demand that must be served in a region; at most 1 in all"
    )

    @field_validator("variants")
    @classmethod
    def _variants_differ(cls, variants: tuple[str, ...] | None) -> tuple[str, ...] | None:
        twice = next((name for name in variants or () if (variants or ()).count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"variant {twice!r} is given twice")
        return variants

    @field_validator("region_fracs")
    @classmethod
    def _no_more_than_all(cls, fracs: dict[str, float]) -> dict[str, float]:
        if math.fsum(fracs.values()) > 1 + 1e-9:
            raise ValueError(f"the shares add up to {math.fsum(fracs.values()):g}, at most 1 can be served")
        return fracs

    @model_validator(mode="after")
    def _complete(self) -> ModelSpec:
        if self.variant is not None and self.variants is not None:
            raise ValueError("give either variant or variants")
        if len(set(self.phases)) != len(self.phases):
            raise ValueError("a phase is given twice")
        if (Phase.PREFILL in self.phases) != (Phase.DECODE in self.phases):
            raise ValueError("prefill and decode come together: a request needs both")
        if self.requests_per_s is None and not isinstance(self.lengths, TraceSpec):
            raise ValueError("requests_per_s is required unless `lengths` is a trace")
        unused = set(self.limits) - set(self.phases)
        if unused:
            raise ValueError(f"limits for phase {min(unused)}, which the model is not served in")
        return self


LibraryMethod = Literal["lattice-free", "lattice", "ilp"]
"""Free shares of the SLO per stage; the published equal shares, exactly; the same by integer programs."""


class LibrarySpec(Strict):
    """How the template library is enumerated and solved (DESIGN 3.5)."""

    name: Name | None = Field(default=None, description="default: the scenario's name")
    n_max: int = Field(strict=True, default=6, ge=1, le=8, description="most nodes in a combination")
    rho: Positive = Field(default=12.0, le=1_000_000, description="total GPU memory below rho x model size")
    method: LibraryMethod = Field(default="lattice-free", description="how placements are solved")
    ilp_time_limit_s: Positive = Field(default=60.0, le=86_400)
    keep_all: bool = Field(default=False, description="store dominated templates too; plans are the same without them")


class LayerTimesNode(Strict):
    """Which rows of a layer time table stand for a configuration, and the most layers a fixed pool gives it."""

    node: str = Field(min_length=1, description="the table's name for this node")
    max_layers: int = Field(strict=True, ge=1, le=10_000)


class LayerTimesSpec(Strict):
    """Measured times of one layer by batch, instead of estimates; one model, prefill and decode."""

    table: Path = Field(description="CSV; relative to the folder that CORAL_REFERENCE_DATA names")
    model: str = Field(min_length=1, description="the table's name for the model")
    nodes: dict[str, LayerTimesNode] = Field(min_length=1, description="by configuration")
    kv_memory_frac: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=1.0, description="share of the memory left by weights that a fixed pool plans to fill with KV cache"
    )
    link_gbit_per_s: Positive | None = Field(
        default=None, le=1e6, description="between any two nodes of a fixed pool; default: bound by their NICs only"
    )


class ProfilesSpec(Strict):
    """Measured profiles in the object store, by the engine that ran."""

    engine: Name = Field(description="engine, version, dtype and flags as `coral profile list` names them")
    store: str | None = Field(default=None, description="URL of the store that holds them; default: CORAL_STORE")


FracByPhase = dict[Phase, Annotated[float, Field(strict=True, gt=0, le=1)]]


class HeadroomSpec(Strict):
    """What a plan may count on of one model, where it is not what `capacity` says of all."""

    slo_frac: FracByPhase = Field(default_factory=dict)
    max_utilization_frac: FracByPhase = Field(default_factory=dict)


class CapacitySpec(Strict):
    """Assumptions behind the stage capacities."""

    max_utilization_frac: FracByPhase = Field(default_factory=dict, description="share of each capacity to plan with")
    slo_frac: FracByPhase = Field(default_factory=dict, description="share of the latency bounds to plan against")
    headroom: dict[str, HeadroomSpec] = Field(default_factory=dict, description="the two above, by model")
    headroom_source: str | None = Field(default=None, description="where they come from; default: not calibrated")
    allow_estimates: bool = Field(default=True, description="use configurations without a measured profile")
    layer_times: LayerTimesSpec | None = Field(default=None, description="default: the analytic estimates")
    profiles: ProfilesSpec | None = Field(default=None, description="measured profiles that come before estimates")
    pessimistic: bool = Field(
        default=False, description="plan with the slow end of the estimates' error bars, not with their middle"
    )

    def slo_frac_of(self, model: str, phase: Phase) -> float:
        """Share of the latency bounds that the model's phase is planned against."""
        own = self.headroom.get(model, HeadroomSpec()).slo_frac
        return own.get(phase, self.slo_frac.get(phase, 1.0))

    def max_utilization_frac_of(self, model: str, phase: Phase) -> float:
        """Share of each capacity that the model's phase is planned with."""
        own = self.headroom.get(model, HeadroomSpec()).max_utilization_frac
        return own.get(phase, self.max_utilization_frac.get(phase, 1.0))


class Ample(Strict):
    """As many nodes as the plan could want of every configuration sold in a region."""

    kind: Literal["ample"] = "ample"
    nodes: int = Field(
        strict=True, default=10_000, ge=1, le=1_000_000, description="nodes per region and configuration"
    )


class Constant(Strict):
    """A fixed number of nodes per region and configuration; what is not named is 0."""

    kind: Literal["constant"]
    nodes: dict[str, dict[str, Nodes]]


class AvailabilityTrace(Strict):
    """Nodes over time from a CSV file `start_s,region,config,nodes`; relative to the scenario file.

    A row holds from its second on until the next of its region and configuration; before the first there are 0.
    """

    kind: Literal["trace"]
    file: Path


class RandomWalk(Strict):
    """Nodes per region and configuration wander from epoch to epoch; seeded, so the same scenario has the same supply.

    The logarithm of each supply is a mean-reverting walk: x' = (1 - reversion_frac) x + step_log N(0, 1). Memory is shared
    out in proportion to gpu_weight e^x over all regions and configurations sold, and scaled so that its mean over the
    epochs is the size wished; whole nodes then, never more than that. One of the two sizes is given.
    """

    kind: Literal["random_walk"]
    seed: int = Field(strict=True, ge=0, le=2**63 - 1)
    step_log: NonNegative = Field(default=0.3, le=3, description="standard deviation of a step of log nodes")
    reversion_frac: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.2
    gpu_weights: dict[str, Positive] = Field(default_factory=dict, description="by GPU type; default 1 each")
    memory_gib: Positive | None = Field(default=None, le=1e9, description="total GPU memory, mean over the epochs")
    memory_frac_of_ample: Positive | None = Field(
        default=None, le=1000, description="the same as a multiple of what the `coral_paper` plan holds at ample supply"
    )

    @model_validator(mode="after")
    def _one_size(self) -> RandomWalk:
        if (self.memory_gib is None) == (self.memory_frac_of_ample is None):
            raise ValueError("give either memory_gib or memory_frac_of_ample")
        return self


class EpochsSpec(Strict):
    """How often an evaluation plans anew; a single plan is made for the first epoch."""

    count: int = Field(strict=True, default=1, ge=1, le=10_000)
    duration_s: Positive = Field(default=360.0, le=604_800)


class WorkloadSpec(Strict):
    """How an evaluation makes requests; lengths and rates are the models' own."""

    burstiness: NonNegative = Field(default=1.0, le=1000, description="CV of the gaps between arrivals; 1 is Poisson")
    cv_tokens: NonNegative = Field(default=1.0, le=1000, description="CV of lengths of which only means are given")


class OwnConfig(Strict):
    """A node configuration that the catalogue lacks."""

    gpu: str = Field(description="a GPU type of the catalogue")
    gpu_count: int = Field(strict=True, ge=1, le=1024)
    nic_gbit_per_s: Positive = Field(le=1e6, description="sustained, per direction")
    price_usd_per_h: dict[str, Positive] = Field(min_length=1, description="on demand, by region")
    source: str = Field(min_length=1, description="where price and NIC come from")
    as_of: date


class AllocationSpec(Strict):
    """The online program (DESIGN 3.6)."""

    startup_s: NonNegative = Field(default=300.0, le=86_400, description="node start-up until it serves")
    interval_s: Positive = Field(default=3600.0, le=604_800, description="time over which a start-up is paid off")
    pd_same_region: bool = Field(default=True, description="prefill and decode of a request in one region")
    budget_usd_per_h: NonNegative | None = Field(
        default=None, le=1e9, description="most that may be rented; what it does not pay for is a shortfall"
    )
    gap_frac: NonNegative = Field(default=1e-3, le=1)
    time_limit_s: Positive = Field(default=120.0, le=86_400)
    solver: Literal["auto", "highs", "gurobi"] = "auto"

    @property
    def churn_k(self) -> float:
        """Start-up time over interval (DESIGN 3.6)."""
        return self.startup_s / self.interval_s


class Scenario(Strict):
    """All that a plan is made from."""

    name: Name
    description: str = ""
    catalog: str = Field(description="a catalogue name, see `coral catalog list`")
    configs: tuple[str, ...] | None = Field(default=None, description="default: all of the catalogue's")
    own_configs: dict[str, OwnConfig] = Field(default_factory=dict, description="added to the catalogue, by name")
    regions: tuple[str, ...] = Field(min_length=1)
    models: tuple[ModelSpec, ...] = Field(min_length=1)
    library: LibrarySpec = LibrarySpec()
    capacity: CapacitySpec = CapacitySpec()
    availability: Annotated[Ample | Constant | AvailabilityTrace | RandomWalk, Field(discriminator="kind")] = Ample()
    spot: SpotSpec | None = Field(default=None, description="default: on demand only")
    exclusions: tuple[ExclusionSpec, ...] = ()
    preferences: tuple[PreferenceSpec, ...] = ()
    runtimes: tuple[Runtime, ...] | None = Field(
        default=None, min_length=1, description="plan only with templates that one of these can run; default: with all"
    )
    allocation: AllocationSpec = AllocationSpec()
    epochs: EpochsSpec = EpochsSpec()
    workload: WorkloadSpec = WorkloadSpec()
    policies: tuple[PolicyName, ...] = Field(
        default=("coral", "coral_paper", "homo_joint", "homo", "cauchy"), min_length=1, description="to evaluate"
    )
    seeds: tuple[Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)], ...] = Field(
        default=(0,), min_length=1, description="of an evaluation's requests"
    )

    @model_validator(mode="after")
    def _distinct(self) -> Scenario:
        for what, names in (
            ("model", [spec.model for spec in self.models]),
            ("region", list(self.regions)),
            ("configuration", list(self.configs or ())),
            ("policy", [str(name) for name in self.policies]),
            ("runtime", [str(name) for name in self.runtimes or ()]),
            ("seed", [str(seed) for seed in self.seeds]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{what} {twice!r} is given twice")
        return self

    @model_validator(mode="after")
    def _measured_times_are_of_one_variant(self) -> Scenario:
        several = next((spec.model for spec in self.models if len(spec.variants or ()) > 1), None)
        if several is not None and self.capacity.layer_times is not None:
            raise ValueError(f"measured layer times are of one variant, but {several} has several")
        return self

    @property
    def library_name(self) -> str:
        """The library this scenario builds and plans from."""
        return self.library.name or self.name


def scenario_names() -> tuple[str, ...]:
    """Names of the scenarios that ship with Coral, sorted."""
    folder = resources.files("coral_core.config") / "scenarios"
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


def load_scenario(name_or_path: str) -> Scenario:
    """A shipped scenario by name, or a YAML file by path; InputError with file and line where it is wrong."""
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"} or "/" in name_or_path:
        return _relative_to(read_yaml_model(path, Scenario), path.parent)
    names = scenario_names()
    if name_or_path not in names:
        raise unknown_name("scenario", name_or_path, names, where="scenario")
    return parse_yaml_model(scenario_text(name_or_path), Scenario, where=f"{name_or_path}.yaml")


def scenario_text(name: str) -> str:
    """The YAML of a shipped scenario, for copying."""
    return (resources.files("coral_core.config") / "scenarios" / f"{name}.yaml").read_text(encoding="utf-8")


def scenario_place(name_or_path: str, key: str) -> str:
    """Where a key path of a scenario stands, for people: file, line where there is one, and key."""
    path = Path(name_or_path)
    shipped = name_or_path in scenario_names()
    try:
        text = scenario_text(name_or_path) if shipped else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return f"{name_or_path}: {key}"
    line = key_line(text, key, where=name_or_path)
    return f"{name_or_path}: {key}" if line is None else f"{name_or_path}:{line}: {key}"


def _relative_to(scenario: Scenario, folder: Path) -> Scenario:
    """Paths of traces made independent of the working folder."""
    models = tuple(
        spec.model_copy(update={"lengths": spec.lengths.model_copy(update={"trace": folder / spec.lengths.trace})})
        if isinstance(spec.lengths, TraceSpec)
        else spec
        for spec in scenario.models
    )
    supply = scenario.availability
    if isinstance(supply, AvailabilityTrace):
        supply = supply.model_copy(update={"file": folder / supply.file})
    return scenario.model_copy(update={"models": models, "availability": supply})
