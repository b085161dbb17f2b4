"""`coral bench`: what the work takes on this machine, beside the published method in the same run."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson, ScenarioName
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.work import library_progress, resolved_scenario
from coral_core.config.scenario import LibraryMethod
from coral_core.errors import SolverError

if TYPE_CHECKING:
    from tasks.bench_library import LibraryBench

app = App(name="bench", help="Measure what the work takes on this machine, beside the published method.")


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
    as_json: AsJson = False,
) -> int:
    """Build a scenario's library into a temporary store; then solve a sample by integer programs, side by side.

    The exit code is 5 where the two methods disagree. Programs that ran into their time limit are unproven: they count
    neither as agreement nor as disagreement.
    """
    from tasks.bench_library import SampleSpec, bench_library
    from tasks.library import build_spec_from_scenario

    spec = build_spec_from_scenario(resolved_scenario(scenario), method=method, keep_all=keep_all)
    spec = replace(spec, n_max=n_max or spec.n_max, rho=rho or spec.rho)
    with library_progress(spec.library, quiet=as_json) as on_progress:
        report = bench_library(
            scenario,
            spec,
            workers=workers or os.cpu_count() or 1,
            sample=SampleSpec(size=sample, time_limit_s=time_limit_s, solver=solver, seed=seed),
            on_progress=on_progress,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.ilp_sample.different:
        print_note(f"the methods disagree on {report.ilp_sample.different} combinations: please report this as a bug")
        return SolverError.exit_code
    return 0


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
    found = report.ilp_sample
    if found.n:
        print_text(
            f"integer program ({found.solver}) on {found.n} of them: same optimum {found.same_optimum}, unproven after "
            f"{found.time_limit_s:g} s per program {found.unproven}, different {found.different}; "
            f"{found.ilp_core_s_per_combination:.3g} core s each: at least {found.speedup_ratio or 0:,.0f} times as many"
        )
