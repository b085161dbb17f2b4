"""`coral evaluate`: how settings change what a library or a plan is worth."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson, ScenarioName
from coral_core.cli.output import print_json, print_note, print_table
from coral_core.cli.work import resolved_scenario
from coral_core.config.scenario import LibraryMethod
from coral_core.errors import InputError

app = App(name="evaluate", help="How settings change what a library or a plan is worth.")


@app.command
def sensitivity(
    *,
    scenario: ScenarioName = "paper-extended",
    model: Annotated[tuple[str, ...], Parameter(help="Models of the scenario.", negative="")] = (
        "gpt-oss-120b",
        "llama-3-70b",
    ),
    phase: Annotated[Literal["prefill", "decode", "aggregated"], Parameter(help="Phase of the templates.")] = "prefill",
    n_max: Annotated[tuple[int, ...], Parameter(help="Most nodes in a combination.", negative="")] = (2, 3, 4, 5, 6, 7),
    rho: Annotated[tuple[float, ...], Parameter(help="Memory below rho x model size.", negative="")] = (
        3.0,
        6.0,
        9.0,
        12.0,
        15.0,
    ),
    method: Annotated[
        LibraryMethod, Parameter(help="Of placement; the published sweep is of equal stage budgets: lattice.")
    ] = "lattice",
    sold_out: Annotated[tuple[str, ...], Parameter(help="GPUs that cannot be had, such as L40S.", negative="")] = (),
    chart: Annotated[Path | None, Parameter(help="Write the chart here, as SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sweep N_max and rho around the published (6, 12): templates, solve time, best tokens/s per USD/h."""
    from coral_core.domain.workload import Phase
    from tasks.sensitivity import sensitivity as sweep
    from tasks.sensitivity import sensitivity_chart

    if min(n_max) < 1:
        raise InputError(f"{min(n_max)} nodes cannot hold a model", where="--n-max", fix="give 1 or more")
    if chart is not None and not chart.parent.is_dir():
        raise InputError("no such folder", where=str(chart.parent), fix="create it, or write the chart elsewhere")
    points = []
    for point in sweep(
        resolved_scenario(scenario),
        models=tuple(dict.fromkeys(model)),
        n_max=sorted(set(n_max)),
        rho=sorted(set(rho)),
        phase=Phase(phase),
        method=method,
        sold_out=sold_out,
    ):
        points.append(point)
        print_note(f"{point.model} N_max {point.n_max} rho {point.rho:g}: {point.templates:,} templates")
    if chart is not None:
        chart.write_text(sensitivity_chart(points), encoding="utf-8")
    if as_json:
        print_json([dataclasses.asdict(point) for point in points])
        return
    unit = "requests/s" if phase == "aggregated" else "tokens/s"
    columns = ("model", "N_max", "rho", "combinations", "templates", "solve core s", f"{unit} per USD/h", "on", "in")
    rows = [
        (
            point.model,
            point.n_max,
            point.rho,
            point.combinations,
            point.templates,
            point.solve_core_s,
            point.best_per_usd,
            point.best_nodes,
            point.best_region,
        )
        for point in points
    ]
    without = f", without {', '.join(sold_out)}" if sold_out else ""
    note = "best template of each library in its cheapest region, on demand; throughputs are predicted"
    print_table(
        f"{scenario}, {phase}, {method}{without}: what N_max and rho buy (published: 6, 12)", columns, rows, note=note
    )
    if chart is not None:
        print_note(f"chart -> {chart}")
