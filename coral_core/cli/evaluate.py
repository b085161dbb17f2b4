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
    evaluation_page_of,
    prepared,
    show_evaluation,
    step_note,
)
from coral_core.cli.options import AsJson, ScenarioName, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.report_file import ReportPath, check_file, check_report, write_file, write_report
from coral_core.cli.work import open_configured_store, resolved_scenario
from coral_core.config.scenario import LibraryMethod
from coral_core.errors import InputError, NoSolutionError

app = App(name="evaluate", help="Policies compared on a scenario, in the simulator; how settings change a library.")

app.command(
    "coral_core.cli.evaluate_split:split",
    name="split",
    help="What the free latency split is worth beside the published one.",
)
app.command(
    "coral_core.cli.evaluate_levers:levers",
    name="levers",
    help="What each lever beyond homo_joint is worth, alone and together.",
)
app.command(
    "coral_core.cli.evaluate_results:assumptions",
    name="assumptions",
    help="Which assumption a ratio to a baseline depends on.",
)
app.command("coral_core.cli.evaluate_results:tables", name="tables", help="Markdown tables of results.")


@app.default
def evaluate(
    scenario: Scenario = "tiny",
    *,
    policies: Policies = (),
    seeds: Seeds = (),
    prefill_utilization: Prefill = None,
    decode_utilization: Decode = None,
    report: ReportPath = None,
    dry_run: Annotated[bool, Parameter(negative="", help="Record nothing but the libraries.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Plan a scenario by several policies, simulate the same requests on each fleet, compare, and record the figures.

    Coral plans from templates that split the latency bound freely, the others from those of the published equal split:
    two libraries, built first where they are missing. Costs are predicted, service is simulated. Exit code 3 where a
    policy failed; the others are reported.
    """
    from artifacts.evaluations import PAGE, REPORT, write_evaluation
    from artifacts.group_pages import index_group
    from artifacts.keys import scenario_group
    from coral_core.clock import SystemClock
    from coral_core.report.evaluation_report import evaluation_markdown
    from tasks.evaluate import evaluate as evaluated

    utilization = chosen_utilization(prefill_utilization, decode_utilization)
    check_report(report)
    source, chosen = prepared(scenario, policies, store=store, quiet=as_json)
    found = evaluated(
        source,
        chosen,
        list(dict.fromkeys(seeds)) or list(source.resolved.scenario.seeds),
        utilization=utilization,
        on_step=step_note(quiet=as_json),
    )
    opened, now = open_configured_store(store), SystemClock().now()
    page = evaluation_page_of(found, opened, now)
    url = None
    if not dry_run:
        name = found.document["scenario"]
        urls = write_evaluation(
            opened,
            name,
            now,
            document=found.document,
            tables=found.tables,
            report_md=evaluation_markdown(found.document),
            report_html=page,
        )
        index_group(opened, scenario_group(name))
        url = urls.get(PAGE, urls[REPORT])
    write_report(report, page)
    if as_json:
        print_json({**found.document, "url": url})
    else:
        show_evaluation(found.document)
        print_text(f"\nwritten to {url}" if url else "\ndry run: nothing was recorded")
    return NoSolutionError.exit_code if found.document["failed"] else 0


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
    chart: Annotated[Path | None, Parameter(help="Write the chart here too, as SVG.")] = None,
    dry_run: Annotated[bool, Parameter(negative="", help="Record nothing.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Sweep N_max and rho around the published (6, 12): templates, solve time, best tokens/s per USD/h.

    Recorded with the scenario's evaluations, whose later reports show it.
    """
    from artifacts.evaluations import SENSITIVITY, write_sensitivity
    from artifacts.group_pages import index_group
    from artifacts.keys import scenario_group
    from coral_core.clock import SystemClock
    from coral_core.domain.workload import Phase
    from coral_core.report.sensitivity_report import sensitivity_chart
    from tasks.sensitivity import sensitivity as sweep

    if min(n_max) < 1:
        raise InputError(f"{min(n_max)} nodes cannot hold a model", where="--n-max", fix="give 1 or more")
    check_file(chart, such_as="sensitivity.svg")
    resolved, points = resolved_scenario(scenario), []
    for point in sweep(
        resolved,
        models=tuple(dict.fromkeys(model)),
        n_max=sorted(set(n_max)),
        rho=sorted(set(rho)),
        phase=Phase(phase),
        method=method,
        sold_out=sold_out,
    ):
        points.append(point)
        print_note(f"{point.model} N_max {point.n_max} rho {point.rho:g}: {point.templates:,} templates")
    rows_found = [dataclasses.asdict(point) for point in points]
    drawn = sensitivity_chart(rows_found) if any(point.templates for point in points) else None
    if chart is not None:
        if drawn is None:
            raise InputError("no library has a template: there is nothing to draw", where="--chart")
        write_file(chart, drawn)
        print_note(f"chart -> {chart}")
    url = None
    if not dry_run:
        opened, name = open_configured_store(store), resolved.scenario.name
        urls = write_sensitivity(opened, name, SystemClock().now(), points=rows_found, chart_svg=drawn)
        index_group(opened, scenario_group(name))
        url = urls[SENSITIVITY]
    if as_json:
        print_json(rows_found)
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
    print_note(f"recorded at {url}" if url else "dry run: nothing was recorded")
