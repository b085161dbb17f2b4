"""`coral evaluate`: policies compared on a scenario, and how settings change what a library is worth."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from coral_core.cli.evaluate_scenario import (
    Decode,
    Policies,
    Prefill,
    Scenario,
    Seeds,
    chosen_utilization,
    prepared,
    show_evaluation,
    step_note,
)
from coral_core.cli.options import AsJson, ScenarioName, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.work import open_configured_store, resolved_scenario
from coral_core.config.scenario import LibraryMethod
from coral_core.errors import InputError

app = App(name="evaluate", help="Policies compared on a scenario, in the simulator; how settings change a library.")

app.command("coral_core.cli.evaluate_split:split", name="split")


@app.default
def evaluate(
    scenario: Scenario = "tiny",
    *,
    policies: Policies = (),
    seeds: Seeds = (),
    prefill_utilization: Prefill = None,
    decode_utilization: Decode = None,
    dry_run: Annotated[bool, Parameter(negative="", help="Record nothing but the libraries.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Plan a scenario by several policies, simulate the same requests on each fleet, compare, and record the figures.

    Coral plans from templates that split the latency bound freely, the others from those of the published equal split:
    two libraries, built first where they are missing. Costs are predicted, service is simulated.
    """
    from artifacts.evaluations import REPORT, write_evaluation
    from artifacts.group_pages import index_group
    from artifacts.keys import scenario_group
    from coral_core.clock import SystemClock
    from coral_core.report.evaluation_report import evaluation_markdown
    from tasks.evaluate import evaluate as evaluated

    utilization = chosen_utilization(prefill_utilization, decode_utilization)
    source, chosen = prepared(scenario, policies, store=store, quiet=as_json)
    found = evaluated(
        source,
        chosen,
        list(dict.fromkeys(seeds)) or list(source.resolved.scenario.seeds),
        utilization=utilization,
        on_step=step_note(quiet=as_json),
    )
    url = None
    if not dry_run:
        opened = open_configured_store(store)
        urls = write_evaluation(
            opened,
            found.document["scenario"],
            SystemClock().now(),
            document=found.document,
            tables=found.tables,
            report_md=evaluation_markdown(found.document),
        )
        index_group(opened, scenario_group(found.document["scenario"]))
        url = urls[REPORT]
    if as_json:
        print_json({**found.document, "url": url})
        return
    show_evaluation(found.document)
    print_text(f"\nwritten to {url}" if url else "\ndry run: nothing was recorded")


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
