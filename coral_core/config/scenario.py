"""Scenarios: what to serve, where, on what, under which limits; YAML that users copy and edit (DESIGN 10)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coral_core.config.yaml_lines import parse_yaml_model, read_yaml_model
from coral_core.domain.workload import Phase
from coral_core.errors import unknown_name

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SloSpec(_Strict):
    """Latency bounds of one model, in seconds."""

    ttft_s: Positive = Field(le=3600, description="time to first token")
    tpot_s: Positive = Field(le=60, description="time per output token")


class LengthsSpec(_Strict):
    """Mean request lengths, where they are not one of the named length statistics."""

    mean_input_tokens: Positive = Field(le=10_000_000)
    mean_output_tokens: Positive = Field(le=10_000_000)
    source: str = "given in the scenario"


class TraceSpec(_Strict):
    """A trace file whose lengths (and rate, unless one is given) are used; relative to the scenario file."""

    trace: Path
    format: Literal["auto", "azure", "burstgpt", "mooncake"] = "auto"


class InstanceLimits(_Strict):
    """Bounds on the number of instances of one model in one phase."""

    min_instances: int = Field(default=0, ge=0, le=100_000)
    max_instances: int | None = Field(default=None, ge=0, le=100_000)

    @model_validator(mode="after")
    def _ordered(self) -> InstanceLimits:
        if self.max_instances is not None and self.max_instances < self.min_instances:
            raise ValueError(f"max_instances {self.max_instances} is below min_instances {self.min_instances}")
        return self


class ModelSpec(_Strict):
    """One model to serve and what is asked of it."""

    model: str
    variant: str | None = Field(default=None, description="dtype variant; default: the model's own")
    phases: tuple[Phase, ...] = Field(default=(Phase.PREFILL, Phase.DECODE), min_length=1)
    requests_per_s: NonNegative | None = Field(default=None, le=1e6, description="default: the trace's own rate")
    lengths: str | LengthsSpec | TraceSpec
    slo: SloSpec
    weight: Positive = Field(default=1.0, description="importance when not all demand can be met")
    limits: dict[Phase, InstanceLimits] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _complete(self) -> ModelSpec:
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


class LibrarySpec(_Strict):
    """How the template library is enumerated and solved (DESIGN 3.5)."""

    name: Name | None = Field(default=None, description="default: the scenario's name")
    n_max: int = Field(default=6, ge=1, le=8, description="most nodes in a combination")
    rho: Positive = Field(default=12.0, le=1000, description="total GPU memory below rho x model size")
    method: Literal["lattice", "ilp"] = "lattice"
    ilp_time_limit_s: Positive = Field(default=60.0, le=86_400)


class CapacitySpec(_Strict):
    """Assumptions behind the stage capacities."""

    max_utilization_frac: dict[Phase, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    allow_estimates: bool = Field(default=True, description="use configurations without a measured profile")


class Ample(_Strict):
    """As many nodes as the plan could want of every configuration sold in a region."""

    kind: Literal["ample"] = "ample"
    nodes: int = Field(default=10_000, ge=1, le=1_000_000, description="nodes per region and configuration")


class Constant(_Strict):
    """A fixed number of nodes per region and configuration; what is not named is 0."""

    kind: Literal["constant"]
    nodes: dict[str, dict[str, Annotated[int, Field(ge=0, le=1_000_000)]]]


class AllocationSpec(_Strict):
    """The online program (DESIGN 3.6)."""

    startup_s: NonNegative = Field(default=300.0, le=86_400, description="node start-up until it serves")
    interval_s: Positive = Field(default=3600.0, le=604_800, description="time over which a start-up is paid off")
    pd_same_region: bool = Field(default=False, description="prefill and decode of a request in one region")
    gap_frac: NonNegative = Field(default=1e-3, le=1)
    time_limit_s: Positive = Field(default=120.0, le=86_400)
    solver: Literal["auto", "highs", "gurobi"] = "auto"

    @property
    def churn_k(self) -> float:
        """Start-up time over interval (DESIGN 3.6)."""
        return self.startup_s / self.interval_s


class Scenario(_Strict):
    """All that a plan is made from."""

    name: Name
    description: str = ""
    catalog: str = Field(description="a catalogue name, see `coral catalog list`")
    configs: tuple[str, ...] | None = Field(default=None, description="default: all of the catalogue's")
    regions: tuple[str, ...] = Field(min_length=1)
    models: tuple[ModelSpec, ...] = Field(min_length=1)
    library: LibrarySpec = LibrarySpec()
    capacity: CapacitySpec = CapacitySpec()
    availability: Annotated[Ample | Constant, Field(discriminator="kind")] = Ample()
    allocation: AllocationSpec = AllocationSpec()

    @model_validator(mode="after")
    def _distinct(self) -> Scenario:
        for what, names in (
            ("model", [spec.model for spec in self.models]),
            ("region", list(self.regions)),
            ("configuration", list(self.configs or ())),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{what} {twice!r} is given twice")
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


def _relative_to(scenario: Scenario, folder: Path) -> Scenario:
    """Trace paths made independent of the working folder."""
    models = tuple(
        spec.model_copy(update={"lengths": spec.lengths.model_copy(update={"trace": folder / spec.lengths.trace})})
        if isinstance(spec.lengths, TraceSpec)
        else spec
        for spec in scenario.models
    )
    return scenario.model_copy(update={"models": models})
