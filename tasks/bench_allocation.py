"""What an allocation takes, and how that compares with the raw integer program, measured in one run."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final, Literal

import numpy as np

from coral_core.allocation.columns import columns_of
from coral_core.allocation.coverage import coverage_of
from coral_core.allocation.formulation import formulate
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.reduce import fits
from coral_core.allocation.wide import cost_scale
from coral_core.config.resolve import ResolvedModel, ResolvedScenario, allocation_problem
from coral_core.config.scenario import LibraryMethod, RandomWalk
from coral_core.domain.allocation import (
    AllocationProblem,
    AllocationResult,
    AllocationStatus,
    DemandRow,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.solver.choose import choose_solver
from coral_core.solver.program import SolveOptions

Mode = Literal["paper", "full"]

GROWTH_MODELS: Final = (6, 12, 24, 46)
GROWTH_REGIONS: Final = (3, 6, 12)
_PATIENCE: Final = 2.0
_LOADING_S: Final = 30.0
_NARROW: Final = "fp8"
_ALL_PHASES: Final = (Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMilp:
    """The integer program over every column that fits, as it stands, on HiGHS; None where it found nothing.

    `status` other than `optimal`: it ran into its time limit, so `wall_s` is less than it would take.
    """

    wall_s: float
    core_s: float | None
    columns: int
    objective_usd_per_h: float | None
    bound_usd_per_h: float | None
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationBench:
    """One problem, from its templates in memory to a verified result; core seconds are CPU time of this process.

    `speedup_ratio`: wall seconds of the raw program over ours, a lower bound where it ran into its time limit.
    `first_core_s`: of the first solve in the process, which loads or compiles the kernels.
    """

    scenario: str
    mode: str
    columns_before: int
    columns_after: int
    solve_s: float
    solve_core_s: float
    first_s: float
    first_core_s: float
    status: str
    objective_usd_per_h: float
    bound_usd_per_h: float
    gap_frac: float
    shortfall_weighted_frac: float
    raw_milp: RawMilp | None
    speedup_ratio: float | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """One size of a growing problem."""

    models: int
    regions: int
    templates: int
    solve_s: float
    solve_core_s: float
    gap_frac: float
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePoint:
    """Gap proven within a time limit, over seeds; `unserved`: how many plans did not serve everything.

    `proven`: how many are within the gap wished for, of the shortfall as of the cost; `worst_unproven_shortfall_frac`: how far a
    weighted shortfall is from its bound.
    """

    time_limit_s: float
    seeds: int
    median_gap_frac: float
    worst_gap_frac: float
    median_solve_s: float
    worst_solve_s: float
    median_core_s: float
    unserved: int
    proven: int
    worst_unproven_shortfall_frac: float


def in_mode(resolved: ResolvedScenario, mode: Mode, *, method: LibraryMethod) -> ResolvedScenario:
    """The scenario in a mode, on a library of its own that is built by `method`.

    `paper`: as published. `full`: aggregated templates compete, prefill and decode of a model share a region, and fp8
    weights compete with the model's own where it has them. Only models that are served disaggregated gain the phase, the
    others have aggregated templates already; variants that the scenario names stay what they are.
    """
    scenario = resolved.scenario
    library = scenario.library.model_copy(update={"name": f"{scenario.library_name}-{mode}-{method}", "method": method})
    if mode == "paper":
        return replace(resolved, scenario=scenario.model_copy(update={"library": library}))
    models = tuple(
        replace(model, phases=_full_phases(model), variants=_full_variants(model)) for model in resolved.models
    )
    specs = tuple(
        spec.model_copy(update={"phases": model.phases, "variant": None, "variants": model.variants})
        for spec, model in zip(scenario.models, models, strict=True)
    )
    update = {
        "models": specs,
        "library": library,
        "allocation": scenario.allocation.model_copy(update={"pd_same_region": True}),
    }
    return replace(resolved, scenario=scenario.model_copy(update=update), models=models)


def _full_phases(model: ResolvedModel) -> tuple[Phase, ...]:
    return _ALL_PHASES if Phase.PREFILL in model.phases else model.phases


def _full_variants(model: ResolvedModel) -> tuple[str, ...]:
    named = model.spec.variants is not None or model.spec.variant is not None
    return (
        model.variants if named or _NARROW not in model.shape.variants else tuple({model.variant: None, _NARROW: None})
    )


def bench_problem(
    resolved: ResolvedScenario, templates: TemplateColumns, *, mode: Mode, gap_frac: float, time_limit_s: float
) -> AllocationProblem:
    """The scenario's problem in a mode, its gap and time limit as wished, on HiGHS."""
    problem = allocation_problem(resolved, templates)
    options = replace(
        problem.options,
        pd_same_region=mode == "full",
        gap_frac=gap_frac,
        time_limit_s=time_limit_s,
        solver="highs",
    )
    return replace(problem, options=options)


def with_supply_seed(resolved: ResolvedScenario, seed: int) -> ResolvedScenario:
    """The scenario with another walk of its supply. Raises InputError where its supply is not a random walk."""
    supply = resolved.scenario.availability
    if not isinstance(supply, RandomWalk):
        raise InputError(
            f"the supply of {resolved.scenario.name} is {supply.kind}, the same for every seed",
            where="--seeds",
            fix="choose a scenario whose availability is a random_walk",
        )
    scenario = resolved.scenario.model_copy(update={"availability": supply.model_copy(update={"seed": seed})})
    return replace(resolved, scenario=scenario)


def bench_allocation(
    scenario: str, mode: Mode, problem: AllocationProblem, *, repeats: int, raw_time_limit_s: float
) -> AllocationBench:
    """Solve `repeats` times after a first one, report the median; then the raw program (left out at 0 seconds)."""
    first = _solved(problem)
    runs = sorted((_solved(problem) for _ in range(repeats)), key=lambda run: run[1])
    result, wall_s, core_s = runs[len(runs) // 2] if runs else first
    raw = raw_milp_apart(problem, time_limit_s=raw_time_limit_s) if raw_time_limit_s > 0 else None
    return AllocationBench(
        scenario=scenario,
        mode=mode,
        columns_before=int(result.statistics["columns_all"]),
        columns_after=int(result.statistics["columns"]),
        solve_s=wall_s,
        solve_core_s=core_s,
        first_s=first[1],
        first_core_s=first[2],
        status=result.status.value,
        objective_usd_per_h=result.objective_usd_per_h,
        bound_usd_per_h=result.bound_usd_per_h,
        gap_frac=result.gap_frac,
        shortfall_weighted_frac=result.statistics["shortfall_weighted"],
        raw_milp=raw,
        speedup_ratio=None if raw is None else raw.wall_s / wall_s,
    )


def raw_milp_apart(problem: AllocationProblem, *, time_limit_s: float) -> RawMilp:
    """`raw_milp` in a process of its own, ended where the solver does not keep its limit (`status` says so then).

    HiGHS was seen to stay in its presolve for many times the limit on more than a million columns.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_raw_milp_into, args=(sender, problem, time_limit_s), daemon=True)
    started = time.perf_counter()
    status = "ended: the solver did not keep its time limit"
    process.start()
    sender.close()
    try:
        if receiver.poll(_PATIENCE * time_limit_s + _LOADING_S):
            found: RawMilp = receiver.recv()
            return found
    except EOFError:
        status = "failed: its process ended, perhaps for want of memory"
    finally:
        process.terminate()
        process.join()
    return RawMilp(
        wall_s=time.perf_counter() - started,
        core_s=None,
        columns=int(fits(problem).sum()),
        objective_usd_per_h=None,
        bound_usd_per_h=None,
        status=status,
    )


def _raw_milp_into(sender: Connection, problem: AllocationProblem, time_limit_s: float) -> None:
    sender.send(raw_milp(problem, time_limit_s=time_limit_s))


def raw_milp(problem: AllocationProblem, *, time_limit_s: float) -> RawMilp:
    """The published program over all columns that fit, without any reduction of ours, at the problem's gap."""
    started, core = time.perf_counter(), time.process_time()
    coverage = coverage_of(problem)
    columns = columns_of(problem, coverage, fits(problem))
    program = formulate(problem, coverage, columns).full()
    scale = cost_scale(program.objective)
    whole = program.take(np.arange(len(program.objective)), relaxed=False, scale=scale)
    options = SolveOptions(time_limit_s=time_limit_s, gap_frac=problem.options.gap_frac)
    answer = choose_solver(whole, "highs").solve(whole, options)
    return RawMilp(
        wall_s=time.perf_counter() - started,
        core_s=time.process_time() - core,
        columns=len(columns),
        objective_usd_per_h=None if answer.objective is None else answer.objective / scale,
        bound_usd_per_h=None if answer.bound is None or not np.isfinite(answer.bound) else answer.bound / scale,
        status=answer.status.value,
    )


def growth(problem: AllocationProblem, *, seed: int) -> Iterator[SizePoint]:
    """Solve the problem at growing numbers of models and regions (`grown`), the smallest first."""
    for models in GROWTH_MODELS:
        for regions in GROWTH_REGIONS:
            bigger = grown(problem, models=models, regions=regions, seed=seed)
            result, wall_s, core_s = _solved(bigger)
            yield SizePoint(
                models=models,
                regions=regions,
                templates=len(bigger.templates),
                solve_s=wall_s,
                solve_core_s=core_s,
                gap_frac=result.gap_frac,
                status=result.status.value,
            )


def grown(problem: AllocationProblem, *, models: int, regions: int, seed: int) -> AllocationProblem:
    """A problem of so many models and regions: copies of the given ones, none quite like another.

    Model k takes the templates of model k mod M, their throughputs times 0.7 to 1.4 for the model and 0.98 to 1.02 for each,
    its demand times 0.5 to 1.5; region k takes the prices of region k mod R times 0.9 to 1.3, and its nodes.
    """
    rng = np.random.default_rng(seed)
    given = problem.templates
    names = list(dict.fromkeys(row.model for row in problem.demand))
    of_model = np.array([names.index(name) if name in names else -1 for name in given.models])
    ids: list[str] = []
    owners: list[str] = []
    phases: list[Phase] = []
    variants: list[str] = []
    demand: list[DemandRow] = []
    nodes, throughput = [], []
    for k in range(models):
        own = np.flatnonzero(of_model == k % len(names))
        faster, asked = rng.uniform(0.7, 1.4), rng.uniform(0.5, 1.5)
        name = f"{names[k % len(names)]}#{k}"
        ids.extend(f"{k}:{given.ids[i]}" for i in own)
        owners.extend([name] * len(own))
        phases.extend(given.phases[i] for i in own)
        variants.extend("" if given.variants is None else given.variants[i] for i in own)
        nodes.append(given.nodes[own])
        throughput.append(given.throughput[own] * faster * rng.uniform(0.98, 1.02, len(own)))
        demand.extend(_scaled(row, name, asked) for row in problem.demand if row.model == names[k % len(names)])
    region = np.arange(regions) % len(problem.regions)
    factor = np.where(np.arange(regions) < len(problem.regions), 1.0, rng.uniform(0.9, 1.3, regions))
    return replace(
        problem,
        regions=tuple(f"{problem.regions[r]}#{k}" for k, r in enumerate(region)),
        available=problem.available[region],
        price_usd_per_h=problem.price_usd_per_h[region] * factor[:, None],
        templates=TemplateColumns(
            ids=tuple(ids),
            models=tuple(owners),
            phases=tuple(phases),
            nodes=np.concatenate(nodes),
            throughput=np.concatenate(throughput),
            variants=None if given.variants is None else tuple(variants),
        ),
        demand=tuple(demand),
        running=(),
    )


def _scaled(row: DemandRow, model: str, factor: float) -> DemandRow:
    tokens = None if row.tokens_per_s is None else row.tokens_per_s * factor
    requests = None if row.requests_per_s is None else row.requests_per_s * factor
    return replace(row, model=model, tokens_per_s=tokens, requests_per_s=requests)


def gap_over_time(
    problem_of_seed: Callable[[int], AllocationProblem], *, seeds: int, limits_s: tuple[float, ...]
) -> Iterator[TimePoint]:
    """Solve the problem of every seed within each time limit; the first solve of the process is not counted."""
    problems = [problem_of_seed(seed) for seed in range(seeds)]
    solve_allocation(problems[0])
    for limit_s in limits_s:
        runs = []
        for problem in problems:
            options = replace(problem.options, time_limit_s=limit_s)
            runs.append(_solved(replace(problem, options=options)))
        gaps = [result.gap_frac for result, _, _ in runs]
        yield TimePoint(
            time_limit_s=limit_s,
            seeds=seeds,
            median_gap_frac=float(np.median(gaps)),
            worst_gap_frac=max(gaps),
            median_solve_s=float(np.median([wall_s for _, wall_s, _ in runs])),
            worst_solve_s=max(wall_s for _, wall_s, _ in runs),
            median_core_s=float(np.median([core_s for _, _, core_s in runs])),
            unserved=sum(not result.full for result, _, _ in runs),
            proven=sum(result.status is AllocationStatus.OPTIMAL for result, _, _ in runs),
            worst_unproven_shortfall_frac=max(
                result.statistics["shortfall_weighted"] - result.statistics["shortfall_bound"] for result, _, _ in runs
            ),
        )


def _solved(problem: AllocationProblem) -> tuple[AllocationResult, float, float]:
    """The result, wall seconds and core seconds."""
    started, core = time.perf_counter(), time.process_time()
    result = solve_allocation(problem)
    return result, time.perf_counter() - started, time.process_time() - core
