"""What building a library takes, and how its placements compare with the integer program's, measured in one run."""

from __future__ import annotations

import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from artifacts.library import Manifest
from artifacts.store import open_store
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacementStatus
from coral_core.errors import SolverError
from coral_core.placement.ilp import IlpPlacement
from coral_core.placement.lattice import LatticePlacement
from coral_core.placement.problem import problem_at
from coral_core.placement.verify import verify_placement
from coral_core.solver.choose import Preference
from tasks.executor import InlineExecutor
from tasks.library import BuildSpec, ProgressCallback, build_library, capacity_tables
from tasks.peak_memory import PeakMemory
from tasks.solve_shard import combinations

SAME_FRAC: Final = 1e-6
"""Relative difference up to which two optima are the same: the integer program's own tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """Which combinations the integer program solves too: `size` in all, evenly over models, phases and numbers of nodes."""

    size: int = 24
    time_limit_s: float = 10.0
    solver: Preference = "highs"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One combination by both methods. `same` is None where the integer program ran into its time limit: unproven."""

    n_nodes: int
    same: bool | None
    is_better_by_ilp: bool
    ilp_core_s: float
    lattice_core_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One (model, phase), or all models of one phase. Core seconds are CPU time, wall time is not: others may compute too."""

    combinations: int
    templates_kept: int
    infeasible: int
    with_idle_nodes: int
    dominated: int
    solve_s: float
    solve_core_s: float
    shard_core_s: float
    core_s_per_combination: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpSample:
    """Sampled combinations by the integer program; it and the lattice agree on `same_optimum` of them.

    `unproven` ones ran into the time limit: no agreement, and their time, cut short, makes the ratios lower bounds.
    `different` counts proven optima that differ, and unproven placements that beat the lattice's.
    `speedup_ratio`: core seconds of a program over those of one combination in the build.
    `speedup_ratio_alone`: over those of the lattice for the same combinations, one at a time.
    """

    n: int
    same_optimum: int
    unproven: int
    different: int
    time_limit_s: float
    solver: str
    ilp_core_s_per_combination: float | None
    ilp_core_s_by_nodes: dict[int, float]
    speedup_ratio: float | None
    speedup_ratio_alone: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySize:
    """A whole build, with commit, of combinations of at most `n_max` nodes."""

    n_max: int
    combinations: int
    templates_kept: int
    wall_s: float
    build_core_s: float
    solve_core_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryBench:
    """What a build took. `core_s_per_combination` is for placing alone; `build_core_s` is all CPU time of all processes.

    `wall_s` is of the whole build: capacities, enumeration, placing, checks, pruning, Parquet, commit into a new store.
    `peak_memory_bytes` is of the process tree during the build.
    """

    scenario: str
    method: str
    n_max: int
    rho: float
    workers: int
    combinations: int
    templates_kept: int
    core_s_per_combination: float | None
    wall_s: float
    build_core_s: float
    peak_memory_bytes: int
    stored_bytes: int
    by_phase: dict[str, GroupReport]
    by_shard: dict[str, GroupReport]
    ilp_sample: IlpSample = field(repr=False)
    growth: tuple[LibrarySize, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As one JSON document."""
        return asdict(self)


def bench_library(
    scenario: str,
    spec: BuildSpec,
    *,
    workers: int,
    sample: SampleSpec,
    grow: bool = False,
    on_progress: ProgressCallback | None = None,
) -> LibraryBench:
    """Build the library in `workers` processes into a temporary store, then solve a sample by integer programs too.

    With `grow`, all smaller N_max are built first. Raises what `build_library` does, and SolverError where a sampled
    placement does not hold what it states.
    """
    LatticePlacement().place(*_warm_up(spec))  # compiled once per machine, which is not what is measured
    smaller = range(1, spec.n_max) if grow else ()
    sizes = [_build(replace(spec, n_max=n_max), workers=workers)[1] for n_max in smaller]
    manifest, size = _build(spec, workers=workers, on_progress=on_progress)
    by_shard = {
        f"{model} {phase}": _group(manifest, model=model, phase=phase)
        for model, phase in dict.fromkeys((r.shard.model, r.shard.phase.value) for r in manifest.present)
    }
    total = _group(manifest)
    return LibraryBench(
        scenario=scenario,
        method=spec.method,
        n_max=spec.n_max,
        rho=spec.rho,
        workers=workers,
        combinations=total.combinations,
        templates_kept=manifest.rows,
        core_s_per_combination=total.core_s_per_combination,
        wall_s=size.wall_s,
        build_core_s=size.build_core_s,
        peak_memory_bytes=size.peak_memory_bytes,
        stored_bytes=sum(record.bytes for record in manifest.present),
        by_phase={
            phase: _group(manifest, phase=phase) for phase in sorted({r.shard.phase.value for r in manifest.present})
        },
        by_shard=by_shard,
        ilp_sample=_sampled(spec, sample, workers=workers, build_core_s=total.core_s_per_combination),
        growth=(*sizes, size) if grow else (),
    )


def _build(
    spec: BuildSpec, *, workers: int, on_progress: ProgressCallback | None = None
) -> tuple[Manifest, LibrarySize]:
    """One build into a new store that is removed again."""
    with tempfile.TemporaryDirectory(prefix="coral-bench-") as folder:
        store = open_store(str(Path(folder) / "store"))
        used_s, started_s = _core_s(), time.perf_counter()
        with PeakMemory() as memory:
            manifest = build_library(spec, store, InlineExecutor(processes=workers), on_progress=on_progress)
        wall_s, core_s = time.perf_counter() - started_s, _core_s() - used_s
    total = _group(manifest)
    return manifest, LibrarySize(
        n_max=spec.n_max,
        combinations=total.combinations,
        templates_kept=manifest.rows,
        wall_s=wall_s,
        build_core_s=core_s,
        solve_core_s=total.solve_core_s,
        peak_memory_bytes=memory.peak_bytes,
    )


def _warm_up(spec: BuildSpec) -> tuple[CapacityTable, NDArray[np.int16]]:
    only = replace(spec, models=(replace(spec.models[0], phases=spec.models[0].phases[:1]),))
    table = capacity_tables(only)[0]
    return table, np.eye(1, len(table.configs), dtype=np.int16)


def _core_s() -> float:
    """CPU seconds of this process and of those it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _group(manifest: Manifest, *, model: str | None = None, phase: str | None = None) -> GroupReport:
    records = [
        record
        for record in manifest.present
        if model in (None, record.shard.model) and phase in (None, record.shard.phase.value)
    ]
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.statistics)
    return GroupReport(
        combinations=int(total["combinations"]),
        templates_kept=sum(record.rows for record in records),
        infeasible=int(total["infeasible"]),
        with_idle_nodes=int(total["with_idle_nodes"]),
        dominated=int(total["dominated"]),
        solve_s=total["solve_s"],
        solve_core_s=total["solve_core_s"],
        shard_core_s=total["shard_core_s"],
        core_s_per_combination=total["solve_core_s"] / total["combinations"] if total["combinations"] else None,
    )


def _sampled(spec: BuildSpec, sample: SampleSpec, *, workers: int, build_core_s: float | None) -> IlpSample:
    chosen = sample_combinations(spec, sample)
    compare = partial(compare_methods, time_limit_s=sample.time_limit_s, solver=sample.solver)
    outcomes = list(InlineExecutor(processes=workers)(chosen, compare)) if chosen else []
    failed = next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)
    if failed is not None:
        raise SolverError(failed.message, where="ilp sample")
    found = [outcome.result for outcome in outcomes]
    ilp_s = float(np.mean([item.ilp_core_s for item in found])) if found else None
    alone_s = float(np.mean([item.lattice_core_s for item in found])) if found else None
    return IlpSample(
        n=len(found),
        same_optimum=sum(item.same is True for item in found),
        unproven=sum(item.same is None for item in found),
        different=sum(item.same is False or item.is_better_by_ilp for item in found),
        time_limit_s=sample.time_limit_s,
        solver=sample.solver,
        ilp_core_s_per_combination=ilp_s,
        ilp_core_s_by_nodes=_mean_by_nodes(found),
        speedup_ratio=ilp_s / build_core_s if ilp_s is not None and build_core_s else None,
        speedup_ratio_alone=ilp_s / alone_s if ilp_s is not None and alone_s else None,
    )


def sample_combinations(spec: BuildSpec, sample: SampleSpec) -> list[tuple[CapacityTable, NDArray[np.int16]]]:
    """`sample.size` combinations (fewer where there are not so many), the strata (table, number of nodes) in turn."""
    rng = np.random.default_rng(sample.seed)
    strata = []
    for table in capacity_tables(spec):
        counts = combinations(table, n_max=spec.n_max, rho=spec.rho)
        sizes = counts.sum(axis=1)
        for size in np.unique(sizes):
            of_size = counts[sizes == size]
            n = min(sample.size, len(of_size))
            strata.append((table, of_size[rng.choice(len(of_size), n, replace=False)]))
    order = rng.permutation(len(strata))
    rounds = max((len(rows) for _, rows in strata), default=0)
    drawn = [(strata[i][0], strata[i][1][k]) for k in range(rounds) for i in order if k < len(strata[i][1])]
    return drawn[: sample.size]


def compare_methods(
    item: tuple[CapacityTable, NDArray[np.int16]], *, time_limit_s: float, solver: Preference
) -> Comparison:
    """One combination by the lattice and by the integer program; both placements are verified."""
    problem = problem_at(*item)
    LatticePlacement().solve(problem)  # loads compiled code, which is not what is measured
    started_s = time.process_time()
    lattice = LatticePlacement().solve(problem)
    between_s = time.process_time()
    ilp = IlpPlacement(preference=solver, time_limit_s=time_limit_s).solve(problem)
    ended_s = time.process_time()
    for result in (lattice, ilp):
        if result.placement is not None:
            verify_placement(problem, result.placement, result.throughput_tokens_per_s)
    ours, theirs = lattice.throughput_tokens_per_s, ilp.throughput_tokens_per_s
    unproven = ilp.status is PlacementStatus.UNPROVEN
    return Comparison(
        n_nodes=len(problem.nodes),
        same=None if unproven else bool(abs(ours - theirs) <= SAME_FRAC * max(ours, theirs)),
        is_better_by_ilp=theirs > ours * (1 + SAME_FRAC),
        ilp_core_s=ended_s - between_s,
        lattice_core_s=between_s - started_s,
    )


def _mean_by_nodes(found: Iterable[Comparison]) -> dict[int, float]:
    by_nodes: dict[int, list[float]] = {}
    for item in found:
        by_nodes.setdefault(item.n_nodes, []).append(item.ilp_core_s)
    return {n: _mean(values) for n, values in sorted(by_nodes.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
