"""`coral bench`: what the work takes on this machine, beside the published method in the same run."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from coral_core.cli.bench_fidelity import fidelity
from coral_core.cli.options import AsJson, ScenarioName, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.report_file import check_file, write_file
from coral_core.cli.work import counted_progress, library_progress, open_configured_store, resolved_scenario
from coral_core.config.scenario import LibraryMethod
from coral_core.errors import InputError, SolverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.bench_gateway import GatewayBench, Spell
    from tasks.bench_library import LibraryBench
    from tasks.bench_targets import TargetName

Chart = Annotated[Path | None, Parameter(help="Write a chart of time against size here, as SVG.")]

app = App(name="bench", help="Measure what the work takes on this machine, beside the published method.")
app.command(fidelity)


@app.command
def library(
    *,
    scenario: ScenarioName = "tiny",
    n_max: Annotated[int | None, Parameter(help="Most nodes in a combination; default: the scenario's.")] = None,
    rho: Annotated[float | None, Parameter(help="Memory below rho x model size; default: the scenario's.")] = None,
    method: Annotated[LibraryMethod | None, Parameter(help="Default: the scenario's.")] = None,
    keep_all: Annotated[bool, Parameter(negative="", help="Keep dominated templates too.")] = False,
    workers: Annotated[int | None, Parameter(help="Processes; default: all CPUs of this machine.")] = None,
    sample: Annotated[int, Parameter(help="Combinations that the integer program solves too, in all.")] = 24,
    time_limit_s: Annotated[float, Parameter(help="Of each integer program, one per number of stages.")] = 10.0,
    solver: Annotated[Literal["highs", "gurobi", "auto"], Parameter(help="For the integer programs.")] = "highs",
    seed: Annotated[int, Parameter(help="Of the sample.")] = 0,
    growth: Annotated[bool, Parameter(negative="", help="Also every smaller N_max.")] = False,
    chart: Chart = None,
    as_json: AsJson = False,
) -> int:
    """Build a scenario's library into a temporary store; then solve a sample by integer programs, side by side.

    The exit code is 5 where the two methods disagree. Programs that ran into their time limit are unproven: they count
    neither as agreement nor as disagreement.
    """
    from tasks.bench_library import SampleSpec, bench_library
    from tasks.library import build_spec_from_scenario

    _check_chart(chart, drawn=growth, wanted="--growth")
    spec = build_spec_from_scenario(resolved_scenario(scenario), method=method, keep_all=keep_all)
    spec = replace(spec, n_max=n_max or spec.n_max, rho=rho or spec.rho)
    with library_progress(spec.library, quiet=as_json) as on_progress:
        report = bench_library(
            scenario,
            spec,
            workers=workers or os.cpu_count() or 1,
            sample=SampleSpec(size=sample, time_limit_s=time_limit_s, solver=solver, seed=seed),
            grow=growth,
            on_progress=on_progress,
        )
    if chart is not None:
        from tasks.bench_charts import library_chart

        write_file(chart, library_chart(scenario, report.to_json()["growth"]))
        print_note(f"chart -> {chart}")
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.ilp_sample.different:
        print_note(f"the methods disagree on {report.ilp_sample.different} combinations: please report this as a bug")
        return SolverError.exit_code
    return 0


@app.command
def allocation(
    *,
    scenario: ScenarioName = "tiny",
    mode: Annotated[
        Literal["paper", "full"],
        Parameter(help="`full`: aggregated templates and fp8 weights compete, prefill and decode share a region."),
    ] = "paper",
    gap_frac: Annotated[float, Parameter(help="Relative gap to prove.")] = 1e-3,
    time_limit_s: Annotated[float, Parameter(help="Of each solve.")] = 60.0,
    repeats: Annotated[int, Parameter(help="Solves after the first; the median is reported.")] = 3,
    raw_time_limit_s: Annotated[float, Parameter(help="Of the raw integer program on HiGHS; 0 leaves it out.")] = 60.0,
    method: Annotated[LibraryMethod, Parameter(help="Of the library, built first where it is missing.")] = "lattice",
    growth: Annotated[bool, Parameter(negative="", help="Also 6 to 46 models by 3 to 12 regions.")] = False,
    seeds: Annotated[int, Parameter(help="Also gap against time limit over so many seeds of the supply.")] = 0,
    seed: Annotated[int, Parameter(help="Of the growing problems.")] = 0,
    chart: Chart = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Solve a scenario's allocation, from templates in memory to a verified plan, beside the raw integer program."""
    from artifacts.templates import template_columns
    from coral_core.cli.plan import usable_library
    from tasks.bench_allocation import bench_allocation, bench_problem, gap_over_time, in_mode, with_supply_seed
    from tasks.bench_allocation import growth as growing
    from tasks.plan import scenario_templates

    _check_chart(chart, drawn=growth or seeds > 0, wanted="--growth or --seeds")
    resolved = in_mode(resolved_scenario(scenario), mode, method=method)
    opened = open_configured_store(store)
    snapshot = usable_library(resolved, opened, version=None, executor="auto", dry_run=False, quiet=as_json)
    templates = template_columns(scenario_templates(resolved, snapshot), [c.name for c in resolved.configs])
    wishes: dict[str, Any] = {"mode": mode, "gap_frac": gap_frac, "time_limit_s": time_limit_s}
    problem = bench_problem(resolved, templates, **wishes)
    report = bench_allocation(scenario, mode, problem, repeats=repeats, raw_time_limit_s=raw_time_limit_s).to_json()
    if growth:
        report["growth"] = [asdict(point) for point in growing(problem, seed=seed)]
    if seeds:
        points = gap_over_time(
            lambda number: bench_problem(with_supply_seed(resolved, number), templates, **wishes),
            seeds=seeds,
            limits_s=(1.0, 2.0, 5.0, 10.0, 25.0),
        )
        report["gap_over_time"] = [asdict(point) for point in points]
    if chart is not None:
        from tasks.bench_charts import allocation_chart

        drawn = allocation_chart(scenario, report.get("growth", ()), report.get("gap_over_time", ()))
        write_file(chart, drawn)
        print_note(f"chart -> {chart}")
    if as_json:
        print_json(report)
        return
    tables = {name: report.pop(name) for name in ("growth", "gap_over_time") if name in report}
    raw = report.pop("raw_milp")
    print_table(f"Allocation of {scenario}, {mode} mode", ("what", "value"), list(report.items()))
    if raw is not None:
        print_table("Raw integer program on HiGHS", ("what", "value"), list(raw.items()))
    for name, points_of in tables.items():
        print_table(name, tuple(points_of[0]), [tuple(point.values()) for point in points_of])


def _check_chart(chart: Path | None, *, drawn: bool, wanted: str) -> None:
    """Refuse before the work what cannot be written after it."""
    if chart is not None and not drawn:
        raise InputError("there is only one size to draw", where="--chart", fix=f"add {wanted}")
    check_file(chart, such_as="chart.svg")


def _print(report: LibraryBench) -> None:
    columns = ("shard", "combinations", "kept", "dominated", "idle nodes", "solve core s", "all core s", "us each")
    rows = [
        (
            name,
            group.combinations,
            group.templates_kept,
            group.dominated,
            group.with_idle_nodes,
            group.solve_core_s,
            group.shard_core_s,
            None if group.core_s_per_combination is None else group.core_s_per_combination * 1e6,
        )
        for groups in (report.by_shard, report.by_phase)
        for name, group in groups.items()
    ]
    title = f"{report.scenario}: N_max {report.n_max}, rho {report.rho:g}, {report.method}, {report.workers} processes"
    print_table(title, columns, rows, note="us each: core microseconds per combination, placing alone")
    each_s = report.core_s_per_combination
    print_text(
        f"{report.combinations:,} combinations, {report.templates_kept:,} templates kept; "
        f"{'-' if each_s is None else f'{each_s * 1e6:.3g}'} us per combination and core; whole build with commit "
        f"{report.wall_s:.1f} s, {report.build_core_s:.1f} core s; peak memory {report.peak_memory_bytes / 2**30:.2f} GiB"
    )
    if report.growth:
        sizes = [asdict(size) for size in report.growth]
        print_table("Growth with N_max", tuple(sizes[0]), [tuple(size.values()) for size in sizes])
    found = report.ilp_sample
    if found.n:
        print_text(
            f"integer program ({found.solver}) on {found.n} of them: same optimum {found.same_optimum}, unproven after "
            f"{found.time_limit_s:g} s per program {found.unproven}, different {found.different}; "
            f"{found.ilp_core_s_per_combination:.3g} core s each: at least {found.speedup_ratio or 0:,.0f} times as many"
        )


@app.command
def simulate(
    *,
    minutes: Annotated[float, Parameter(help="Simulated minutes; the growth runs take a fifth each.")] = 30.0,
    growth: Annotated[bool, Parameter(negative="", help="Also over load and fleet size: eight more runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time the simulator on a fleet of the size of `paper-extended`: six models at 25 requests/s each, one core."""
    from tasks.bench_simulate import bench_simulate

    report = bench_simulate(minutes, growth=growth)
    if as_json:
        print_json(report)
        return
    runs = [(f"{minutes:g} min, 25 requests/s per model", report["paper_extended"])]
    runs += [(f"{rate} requests/s per model", run) for rate, run in report.get("growth_with_load", {}).items()]
    runs += [(f"{scale} x the fleet", run) for scale, run in report.get("growth_with_fleet", {}).items()]
    names = ("requests", "engines", "events", "wall_s", "cpu_s", "requests_per_cpu_s", "events_per_cpu_s")
    columns = ("run", "requests", "engines", "events", "wall s", "core s", "requests per core s", "events per core s")
    print_table(
        "Speed of the simulator (measured on this machine)", columns, [(n, *(r[k] for k in names)) for n, r in runs]
    )
    first = report["first_call"]
    how = "loaded from numba's cache" if first["from_cache"] else "compiled"
    print_text(f"the kernel's first call, {how}: {first['cpu_s']:.3g} core s; not in the times above")


@app.command
def gateway(
    *,
    connections: Annotated[list[int] | None, Parameter(help="Default: 1, 64 and 512.", consume_multiple=True)] = None,
    rounds: Annotated[int, Parameter(help="Spells of each kind; figures are medians.")] = 3,
    seconds: Annotated[float, Parameter(help="Of each spell.")] = 6.0,
    chunks: Annotated[int, Parameter(help="Tokens of an answer, an event each.")] = 48,
    gap_ms: Annotated[float, Parameter(help="Between the tokens of an engine that computes nothing.")] = 2.0,
    soak_s: Annotated[float, Parameter(help="Of the long run over 512 connections; 0 leaves it out.")] = 60.0,
    rivals: Annotated[Path, Parameter(help="Folder with the programs `vllm-router` and `litellm`.")] = Path(
        ".venv-bench/bin"
    ),
    alone: Annotated[bool, Parameter(negative="", help="Without other gateways.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure our gateway beside vllm-router, the LiteLLM proxy and a direct connection, in turn, on loopback."""
    from tasks.bench_gateway import GatewayBenchSpec, bench_gateway

    positive = {"--rounds": rounds, "--seconds": seconds, "--chunks": chunks, "--connections": min(connections or [1])}
    for name, value in positive.items():
        if not 0 < value < 1e6:
            raise InputError(f"{name} must be above 0 and below 1,000,000, not {value}", where=name)
    if not (0.0 <= gap_ms < 1e4 and 0.0 <= soak_s < 1e5):
        raise InputError("--gap-ms and --soak-s must be 0 or more", where="--gap-ms, --soak-s")
    spec = GatewayBenchSpec(
        rivals={} if alone else _rivals(rivals),
        connections=tuple(connections or (1, 64, 512)),
        rounds=rounds,
        seconds=seconds,
        chunks=chunks,
        gap_s=gap_ms / 1e3,
        soak_s=soak_s,
    )
    with counted_progress("gateways", quiet=as_json) as on_progress:
        found = bench_gateway(spec, on_progress=on_progress)
    if as_json:
        print_json(found.to_json())
        return
    _print_gateways(found)


def _rivals(folder: Path) -> dict[TargetName, Path]:
    from typing import get_args

    from tasks.bench_targets import TargetName

    names = [name for name in get_args(TargetName) if name not in {"direct", "coral"}]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"there is no {' and no '.join(missing)}",
            where=str(folder),
            fix="`make bench-rivals` installs them, --alone measures without them",
        )
    return {name: folder / name for name in names}


def _print_gateways(found: GatewayBench) -> None:
    def rows(spells: Sequence[Spell]) -> list[list[object]]:
        kinds = list(dict.fromkeys((one.connections, one.target) for one in spells))
        table: list[list[object]] = []
        for count, name in sorted(kinds, key=lambda kind: kind[0]):
            figures = found.median(spells, name, count)
            errors = sum(one.errors for one in spells if (one.target, one.connections) == (name, count))
            table.append(
                [
                    name,
                    count,
                    f"{figures['requests_per_s']:.0f}",
                    *(None if (value := figures[key]) is None else f"{1e3 * value:.2f}" for key in _PER_REQUEST),
                    errors,
                ]
            )
        return table

    columns = ("target", "connections", "requests/s", "CPU ms/request", *_LATENCY_TITLES, "errors")
    print_table("As fast as it goes (measured)", columns, rows(found.peak))
    print_table(f"At {found.half_requests_per_s:.0f} requests/s, half of ours (measured)", columns, rows(found.half))
    if found.soak is not None:
        soak = found.soak
        print_text(
            f"{soak.connections} connections for {soak.seconds:.0f} s (measured): {soak.requests} requests, {soak.errors} errors, "
            f"memory {soak.settled_bytes / 2**20:.0f} -> {soak.end_bytes / 2**20:.0f} MiB"
        )
    aims = [
        [
            name,
            f"{aim['measured']:.4g}",
            f"{'>=' if 'at_least' in aim else '<='} {aim.get('at_least', aim.get('at_most')):.4g}",
            "met" if aim["met"] else "missed",
        ]
        for name, aim in found.targets().items()
    ]
    print_table("Aims", ("aim", "measured", "wanted", ""), aims)


_PER_REQUEST = ("cpu_s_per_request", "first_event_p50_s", "first_event_p99_s", "whole_p50_s", "whole_p99_s")
_LATENCY_TITLES = ("first p50 ms", "first p99 ms", "whole p50 ms", "whole p99 ms")
