"""Build a template library: plan its shards, reuse the finished, solve the missing, commit one snapshot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, get_args

from artifacts.index import index_libraries
from artifacts.library import Manifest, commit, draft_manifest
from artifacts.shards import ShardRecord, ShardStatus, failed_shard, find_shard
from artifacts.store import Store
from coral_core import __version__
from coral_core.clock import Clock, SystemClock
from coral_core.config.resolve import ResolvedScenario
from coral_core.config.scenario import LibraryMethod
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.launch import Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import InputError, StoreError
from coral_core.perf import CapacityAssumptions, capacity_table
from coral_core.perf.budgets import budget_table
from coral_core.perf.layer_times import capacity_table_from_times
from coral_core.perf.profile import Profile
from tasks.executor import Executor, Outcome
from tasks.measured import MeasuredTimes, measured_times, stored_profiles
from tasks.runtime_shards import runtime_shards
from tasks.solve_shard import ShardSpec, add_statistics, combinations, solve_shard

ILP_COMBINATIONS_PER_SHARD: Final = 25
"""Integer programs take seconds each: small shards keep all workers busy and a resumed build near where it was."""
SHARD_RETRIES: Final = 1
SHARDS_PER_GROUP: Final = 200
_READS_AT_ONCE: Final = 8
_COUNTED: Final = ("combinations", "infeasible", "unproven", "with_idle_nodes", "dominated")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuild:
    """One model of a library, and what its templates are to keep to.

    `slo_frac` and `max_utilization_frac` replace the build's own assumptions for the phases they name.
    """

    shape: ModelShape
    variant: str
    phases: tuple[Phase, ...]
    slo: Slo
    lengths: Lengths
    slo_frac: Mapping[Phase, float] = field(default_factory=dict)
    max_utilization_frac: Mapping[Phase, float] = field(default_factory=dict)

    def assumptions(self, of_all: CapacityAssumptions) -> CapacityAssumptions:
        """What capacities of this model assume, where `of_all` is what the build assumes."""
        return replace(
            of_all,
            slo_frac={**of_all.slo_frac, **self.slo_frac},
            max_utilization_frac={**of_all.max_utilization_frac, **self.max_utilization_frac},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """What a library is built from (DESIGN 3.5): models, node configurations, limits and the method.

    `lattice_parts` splits the combinations of one table over so many shards, for clusters with more CPUs than tables;
    each part builds the smaller combinations' tables anew, so 1 is best on one machine. Dominated templates (DESIGN 3.5)
    are dropped unless `keep_all`; integer programs keep all in any case. For each of `runtimes` the library also has the best
    placements that it can run, where capacities are estimated: measured times are of one layout. `profiles` by (model,
    variant) and configuration come before estimates.
    """

    library: str
    configs: tuple[NodeConfig, ...]
    models: tuple[ModelBuild, ...]
    n_max: int = 6
    rho: float = 12.0
    method: LibraryMethod = "lattice-free"
    ilp_time_limit_s: float = 60.0
    combinations_per_ilp_shard: int = ILP_COMBINATIONS_PER_SHARD
    lattice_parts: int = 1
    keep_all: bool = False
    assumptions: CapacityAssumptions = field(default_factory=CapacityAssumptions)
    measured: MeasuredTimes | None = None
    profiles: Mapping[tuple[str, str], Mapping[str, Profile]] = field(default_factory=dict)
    runtimes: tuple[Runtime, ...] = ()

    def __post_init__(self) -> None:
        """Raise InputError for settings that cannot build anything."""
        if self.method not in get_args(LibraryMethod):
            raise InputError(
                f"there is no method {self.method!r}", where="method", fix=f"use {' or '.join(get_args(LibraryMethod))}"
            )
        for name in ("n_max", "combinations_per_ilp_shard", "lattice_parts"):
            if getattr(self, name) < 1:
                raise InputError(f"{getattr(self, name)} is below 1", where=name)
        for name in ("rho", "ilp_time_limit_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{getattr(self, name)} is not a positive number", where=name)
        for name in ("configs", "models"):
            if not getattr(self, name):
                raise InputError("there is nothing to build from", where=name, fix="name at least one")
        tables = Counter((m.shape.name, m.variant, phase, m.slo) for m in self.models for phase in m.phases)
        for (model, variant, phase, _), times in tables.items():
            if times > 1:
                raise InputError(f"{model} ({variant}) is given {times} times for {phase} at one SLO", where="models")

    def question(self, model: ModelBuild, phase: Phase) -> dict[str, Any]:
        """What capacities of one model and phase are asked for, as keywords."""
        return {
            "shape": model.shape,
            "variant": model.variant,
            "phase": phase,
            "slo": model.slo,
            "lengths": model.lengths,
            "configs": self.configs,
            "assumptions": model.assumptions(self.assumptions),
            **({"profiles": found} if (found := self.profiles.get((model.shape.name, model.variant))) else {}),
        }


def build_spec_from_scenario(
    resolved: ResolvedScenario, *, method: LibraryMethod | None = None, keep_all: bool = False
) -> BuildSpec:
    """The build that a scenario asks for; `method` replaces its own, `keep_all` adds to it."""
    scenario = resolved.scenario
    return BuildSpec(
        library=scenario.library_name,
        configs=resolved.configs,
        models=tuple(
            ModelBuild(
                shape=model.shape,
                variant=variant,
                phases=model.phases,
                slo=model.demand.slo,
                lengths=model.demand.lengths,
                slo_frac={phase: scenario.capacity.slo_frac_of(model.shape.name, phase) for phase in Phase},
                max_utilization_frac={
                    phase: scenario.capacity.max_utilization_frac_of(model.shape.name, phase) for phase in Phase
                },
            )
            for model in resolved.models
            for variant in model.variants
        ),
        n_max=scenario.library.n_max,
        rho=scenario.library.rho,
        method=method or scenario.library.method,
        ilp_time_limit_s=scenario.library.ilp_time_limit_s,
        keep_all=keep_all or scenario.library.keep_all,
        assumptions=CapacityAssumptions(
            allow_estimates=scenario.capacity.allow_estimates, pessimistic=scenario.capacity.pessimistic
        ),
        measured=measured_times(scenario.capacity.layer_times),
        profiles=stored_profiles(scenario.capacity.profiles, resolved),
        runtimes=scenario.runtimes or (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """How far a build is: `done` of `total` shards have a record, `reused` of them from an earlier build."""

    total: int
    done: int
    reused: int
    failed: int
    rows: int
    last: str = ""

    @property
    def done_frac(self) -> float:
        """Share of the shards that are done; 1 where there are none."""
        return self.done / self.total if self.total else 1.0


ProgressCallback = Callable[[BuildProgress], None]


def build_library(
    spec: BuildSpec,
    store: Store,
    executor: Executor,
    *,
    on_progress: ProgressCallback | None = None,
    allow_partial: bool = False,
    clock: Clock | None = None,
) -> Manifest:
    """Build the library and commit it as the newest snapshot; the manifest with its version.

    Workers write each finished shard to the store at once, so a build that was interrupted goes on where it was.
    Raises NoSolutionError where shards failed and `allow_partial` is not set (a partial snapshot would make plans that
    are silently dearer), DataGapError where a capacity cannot be known, StoreError where the store fails.
    """
    build = Build(spec, store, on_progress)
    if build.missing:
        with executor.session():
            build.run(executor)
    return build.commit(allow_partial=allow_partial, clock=clock or SystemClock())


class Build:
    """One build in the making: its shards, and the records of those that are done."""

    def __init__(self, spec: BuildSpec, store: Store, on_progress: ProgressCallback | None = None) -> None:
        """Plan the shards and look up those that an earlier build finished."""
        self.spec = spec
        self.store = store
        self.shards = plan_shards(spec)
        self.on_progress = on_progress
        self._records: dict[int, ShardRecord] = {}
        self._quarantined: set[int] = set()
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            found = enumerate(pool.map(self._found, self.shards))
        self._records.update({index: record for index, record in found if record is not None})
        self._reused = len(self._records)
        self._report("")

    @property
    def missing(self) -> list[int]:
        """Indices of the shards that have no data file and were not quarantined."""
        over = {index for index, record in self._records.items() if record.status is ShardStatus.PRESENT}
        over |= self._quarantined
        return [index for index in range(len(self.shards)) if index not in over]

    @property
    def records(self) -> list[ShardRecord]:
        """Records so far, in the order of the shards."""
        return [self._records[index] for index in sorted(self._records)]

    @property
    def progress(self) -> BuildProgress:
        """How far the build is."""
        records = self._records.values()
        return BuildProgress(
            total=len(self.shards),
            done=len(self._records),
            reused=self._reused,
            failed=sum(record.status is ShardStatus.FAILED for record in records),
            rows=sum(record.rows for record in records),
        )

    @property
    def groups(self) -> list[list[int]]:
        """The missing shards in groups of a size that one task can stand for."""
        missing = self.missing
        return [missing[start : start + SHARDS_PER_GROUP] for start in range(0, len(missing), SHARDS_PER_GROUP)]

    def run(self, executor: Executor, indices: Sequence[int] | None = None) -> None:
        """Solve the missing shards (those of `indices` only) and record each; one that fails is tried once more.

        Never raises for a shard's own failure; StoreError where the store cannot be written. Shards whose worker died have had their further tries already.
        """
        self.store.check()  # before the work, not after it
        chosen = set(range(len(self.shards)) if indices is None else indices)
        for _ in range(1 + SHARD_RETRIES):
            todo = [index for index in self.missing if index in chosen]
            if not todo:
                return
            shards = [self.shards[index] for index in todo]
            for outcome in executor(shards, partial(solve_shard, store_url=self.store.url)):
                self._settle(todo[outcome.index], outcome)

    def commit(self, *, allow_partial: bool, clock: Clock) -> Manifest:
        """Commit one snapshot of all records, and refresh the pages that say what lies there."""
        spec = self.spec
        manifest = commit(
            self.store,
            draft_manifest(
                library=spec.library,
                shards=self.records,
                shards_expected=len(self.shards),
                created_at=clock.now(),
                code_version=__version__,
                inputs=_hash_by_name(shard.table for shard in self.shards if not shard.made_for),
                parameters=_parameters(spec),
                statistics=_summed(self.records),
                allow_partial=allow_partial,
            ),
        )
        index_libraries(self.store, spec.library)
        return manifest

    def _found(self, shard: ShardSpec) -> ShardRecord | None:
        try:
            return find_shard(self.store, shard.library, shard.key)
        except StoreError:
            self.store.exists(shard.key.key(shard.library))  # raises where the store itself is to blame
            return None  # a damaged object: its worker meets the same and the shard is recorded as failed

    def _settle(self, index: int, outcome: Outcome[ShardRecord]) -> None:
        if outcome.failure is None:
            record = outcome.result
            if self.store.size_bytes(record.key) != record.bytes:
                error = f"a worker wrote {record.key} where it cannot be read from here: workers need a shared store"
                record = failed_shard(record.shard, error=error, attempts=outcome.attempts)
        else:
            earlier = self._records.get(index)
            record = failed_shard(
                self.shards[index].key,
                error=outcome.failure.message,
                attempts=outcome.attempts + (earlier.attempts if earlier else 0),
            )
            if outcome.failure.kind == "worker_died":
                self._quarantined.add(index)
        self._records[index] = record
        self._report(str(record.shard))

    def _report(self, last: str) -> None:
        if self.on_progress is not None:
            self.on_progress(replace(self.progress, last=last))


def capacity_inputs(spec: BuildSpec) -> dict[str, str]:
    """Name and hash of each capacity table a build rests on; a manifest states them, and a plan compares them."""
    # The capacities over free budgets have the same inputs, and take longer to compute.
    return _hash_by_name(capacity_tables(replace(spec, method="lattice")))


def _hash_by_name(tables: Iterable[CapacityTable]) -> dict[str, str]:
    return {f"capacity of {table.model} {table.variant} {table.phase}": table.inputs_hash for table in tables}


def capacity_tables(spec: BuildSpec) -> list[CapacityTable]:
    """One table per model and phase. Raises DataGapError where a capacity cannot be known."""
    measured = spec.measured
    if measured is not None and spec.method == "lattice-free":
        raise InputError(
            "measured layer times are known at equal stage budgets only",
            where="library.method",
            fix="set it to lattice",
        )
    table = capacity_table
    if measured is not None:
        table = partial(capacity_table_from_times, times=measured.times, nodes=measured.nodes)
    tables = []
    for model in spec.models:
        for phase in model.phases:
            question = spec.question(model, phase)
            budgets = budget_table(**question) if spec.method == "lattice-free" else None
            tables.append(replace(table(max_stages=spec.n_max, **question), budgets=budgets))
    return tables


def plan_shards(spec: BuildSpec) -> list[ShardSpec]:
    """All shards of a build. Raises DataGapError where a capacity cannot be known, InputError for unusable names."""
    shards: list[ShardSpec] = []
    for table in capacity_tables(spec):
        parts = spec.lattice_parts
        if spec.method == "ilp":
            n = len(combinations(table, n_max=spec.n_max, rho=spec.rho))
            parts = max(1, math.ceil(n / spec.combinations_per_ilp_shard))
        shards += [
            ShardSpec(
                library=spec.library,
                table=table,
                n_max=spec.n_max,
                rho=spec.rho,
                method=spec.method,
                ilp_time_limit_s=spec.ilp_time_limit_s,
                part=part,
                parts=parts,
                keep_all=spec.keep_all,
            )
            for part in range(parts)
        ]
    return [*shards, *runtime_shards(spec)]


def manifest_rows(manifest: Manifest) -> list[dict[str, object]]:
    """A snapshot as a table for people: one row per model, variant, phase and method."""
    rows: dict[tuple[str, ...], Counter[str]] = {}
    for record in manifest.shards:
        shard = record.shard
        counts = rows.setdefault((shard.model, shard.variant, shard.phase.value, shard.method), Counter())
        counts["shards"] += 1
        counts["failed"] += record.status is ShardStatus.FAILED
        counts["templates"] += record.rows
        counts.update({name: record.statistics.get(name, 0) for name in _COUNTED})
    names = ("model", "variant", "phase", "method")
    return [{**dict(zip(names, key, strict=True)), **counts} for key, counts in rows.items()]


def failure_rows(records: Sequence[ShardRecord]) -> list[dict[str, object]]:
    """The failed shards as a table for people."""
    failed = [record for record in records if record.status is ShardStatus.FAILED]
    return [{"shard": str(record.shard), "attempts": record.attempts, "error": record.error} for record in failed]


def _parameters(spec: BuildSpec) -> dict[str, object]:
    return {
        "method": spec.method,
        "n_max": spec.n_max,
        "rho": spec.rho,
        "ilp_time_limit_s": spec.ilp_time_limit_s,
        "keep_all": spec.keep_all,
        **({"runtimes": [runtime.value for runtime in spec.runtimes]} if spec.runtimes else {}),
        "configs": [config.name for config in spec.configs],
        "assumptions": spec.assumptions,
        "lengths": {model.shape.name: model.lengths for model in spec.models},
        "headroom": {
            model.shape.name: {
                "slo_frac": dict(model.slo_frac),
                "max_utilization_frac": dict(model.max_utilization_frac),
            }
            for model in spec.models
        },
    }


def _summed(records: Sequence[ShardRecord]) -> dict[str, float]:
    """Each statistic added up over the shards; the largest of those in bytes, which are peaks."""
    total: dict[str, float] = {}
    for record in records:
        add_statistics(total, record.statistics)
    return total
