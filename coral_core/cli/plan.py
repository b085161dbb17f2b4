"""`coral plan`: the cheapest plan for a scenario, why it is so, and the record of earlier ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from coral_core.cli.library import ExecutorName
from coral_core.cli.options import AsJson, ScenarioName, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.report_file import ReportPath, check_report, write_report
from coral_core.cli.work import choose_executor, library_progress, open_configured_store, resolved_scenario
from coral_core.config.settings import load_settings
from coral_core.errors import NoSolutionError, StoreError

if TYPE_CHECKING:
    from artifacts.library import LibrarySnapshot
    from artifacts.plans import StoredPlan
    from artifacts.store import Store
    from coral_core.config.resolve import ResolvedScenario

app = App(name="plan", help="The cheapest plan for a scenario, and why it is so.")
app.command(
    "coral_core.cli.plan_one_more:one_more",
    name="one-more",
    help="What one more node of each scarce configuration would save.",
)
app.command("coral_core.cli.plan_launch:launch", name="launch", help="The commands that start an instance by hand.")

Fleet = Annotated[str | None, Parameter(help="Fleet the plan belongs to; default: CORAL_FLEET, else `default`.")]
At = Annotated[str, Parameter(help="Time of a recorded plan (`coral plan list`), or `latest`.")]


@app.default
def plan(
    *,
    scenario: ScenarioName = "tiny",
    dry_run: Annotated[bool, Parameter(negative="", help="Print the plan and record nothing.")] = False,
    report: ReportPath = None,
    pessimistic: Annotated[
        bool,
        Parameter(negative="", help="Plan with the slow end of the estimates' error bars (`capacity.pessimistic`)."),
    ] = False,
    keep_running: Annotated[
        bool, Parameter(negative="", help="Take the fleet's last recorded plan as what runs now (start-ups cost).")
    ] = False,
    require_full: Annotated[
        bool, Parameter(negative="", help="Exit with code 3 where a demand or a floor is not fully met.")
    ] = False,
    library_version: Annotated[int | None, Parameter(help="Default: the newest; built first where missing.")] = None,
    executor: ExecutorName = "auto",
    fleet: Fleet = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Find the cheapest plan of a scenario, beside the baselines, and record it (nothing is rented)."""
    from artifacts.index import index_plans
    from artifacts.plans import PLAN, list_plans, read_plan, write_plan
    from coral_core.clock import SystemClock
    from tasks.plan import make_plan, running_from_plan

    check_report(report)
    resolved = resolved_scenario(scenario, pessimistic=pessimistic)
    opened = open_configured_store(store)
    fleet = fleet or load_settings().fleet
    snapshot = usable_library(
        resolved, opened, version=library_version, executor=executor, dry_run=dry_run, quiet=as_json
    )
    has_plan = keep_running and bool(list_plans(opened, fleet))
    running = running_from_plan(read_plan(opened, fleet).plan) if has_plan else ()
    now = SystemClock().now()
    outcome = make_plan(resolved, snapshot, fleet=fleet, now=now, running=running)
    where = None
    if not dry_run:
        record = write_plan(
            opened,
            fleet,
            now,
            plan=outcome.plan,
            decision=outcome.decision,
            report_md=outcome.report_md,
            report_html=outcome.report_html,
        )
        index_plans(opened, fleet)
        where = record.urls[PLAN]
    write_report(report, outcome.report_html)
    if as_json:
        beside = {name: outcome.decision[name] for name in ("baselines", "comparisons")}
        print_json({**outcome.plan, **beside, "url": where})
    else:
        show_plan(outcome.plan, outcome.decision)
        print_text(f"written to {where}" if where else "dry run: nothing was written")
    if require_full and not outcome.result.full:
        print_note("coral: the demand is not fully met")
        return NoSolutionError.exit_code
    return 0


@app.command
def explain(
    *,
    at: At = "latest",
    template: Annotated[str | None, Parameter(help="Say why this template was not chosen.")] = None,
    fleet: Fleet = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Explain a recorded plan: binding limits, shadow prices, marginal costs; why a named template was not chosen."""
    from artifacts.library import open_library

    opened = open_configured_store(store)
    record = recorded_plan(opened, fleet, at)
    if template is None:
        explanation = record.decision["explanation"]
        if as_json:
            print_json(explanation)
        else:
            show_explanation(record)
        return
    from tasks.plan import explain_template

    library = record.decision["library"]
    answer = explain_template(record.decision, open_library(opened, library["name"], library["version"]), template)
    if as_json:
        print_json(answer)
    else:
        show_template(answer)


@app.command
def replay(*, at: At = "latest", fleet: Fleet = None, store: StoreUrl = None, as_json: AsJson = False) -> int:
    """Solve a recorded plan's problem anew and say whether the answer is the same (exit code 3 where it is not)."""
    from artifacts.library import open_library
    from tasks.plan import replay_plan

    opened = open_configured_store(store)
    record = recorded_plan(opened, fleet, at)
    library = record.decision["library"]
    result = replay_plan(record.decision, open_library(opened, library["name"], library["version"]))
    then = sorted((i["template"], i["region"], i["count"]) for i in record.plan["instances"])
    now = sorted((i.template, i.region, i.count) for i in result.instances)
    document = {
        "same_instances": then == now,
        "recorded_objective_usd_per_h": record.plan["objective_usd_per_h"],
        "replayed_objective_usd_per_h": result.objective_usd_per_h,
    }
    if as_json:
        print_json(document)
    else:
        print_table("Replay", ("what", "value"), list(document.items()))
    return 0 if then == now else NoSolutionError.exit_code


@app.command(name="list")
def list_recorded(*, fleet: Fleet = None, store: StoreUrl = None, as_json: AsJson = False) -> int:
    """List the recorded plans of a fleet, newest last: scenario, cost, and what they do not meet.

    A damaged plan is reported and passed over; the exit code is then 6.
    """
    from artifacts.keys import time_text
    from artifacts.plans import list_plans, read_plan
    from coral_core.report.figures import usd
    from coral_core.report.plan_report import unmet_text

    opened, fleet = open_configured_store(store), fleet or load_settings().fleet
    found, damaged = [], False
    for time in list_plans(opened, fleet):
        try:
            found.append((time_text(time), read_plan(opened, fleet, time).plan))
        except StoreError as error:
            print_note(f"coral: {error}")
            damaged = True
    if as_json:
        print_json(
            [
                {
                    "time": time,
                    **{name: plan[name] for name in ("scenario", "status", "cost_usd_per_h", "churn_usd_per_h")},
                    "shortfall": [row for row in plan["shortfall"] if row["frac"] > 0],
                }
                for time, plan in found
            ]
        )
        return StoreError.exit_code if damaged else 0
    rows = [
        (time, plan["scenario"], usd(plan["cost_usd_per_h"]), usd(plan["churn_usd_per_h"]), unmet_text(plan))
        for time, plan in found
    ]
    columns = ("time", "scenario", "USD/h", "start-up USD/h", "demand not met")
    print_table(f"Plans of fleet {fleet}", columns, rows)
    return StoreError.exit_code if damaged else 0


@app.command
def show(*, at: At = "latest", fleet: Fleet = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show a recorded plan."""
    record = recorded_plan(open_configured_store(store), fleet, at)
    if as_json:
        print_json({"plan": record.plan, "decision": record.decision})
    else:
        show_plan(record.plan, record.decision)


def recorded_plan(store: Store, fleet: str | None, at: str) -> StoredPlan:
    """The plan of a fleet (default: the settings' one) as it was recorded at a time, or the latest."""
    from artifacts.keys import parse_time
    from artifacts.plans import read_plan

    return read_plan(store, fleet or load_settings().fleet, None if at == "latest" else parse_time(at))


def usable_library(
    resolved: ResolvedScenario,
    store: Store,
    *,
    version: int | None,
    executor: Any,  # noqa: ANN401 - the command's own literal
    dry_run: bool,
    quiet: bool,
) -> LibrarySnapshot:
    """The asked snapshot; or the newest, built first where it is missing or stale (in memory on a dry run)."""
    from artifacts.library import list_libraries, open_library
    from artifacts.store import open_store
    from tasks.library import build_library, build_spec_from_scenario
    from tasks.plan import stale_inputs

    name = resolved.scenario.library_name
    if version is not None:
        return open_library(store, name, version)
    if name in list_libraries(store):
        snapshot = open_library(store, name)
        stale = stale_inputs(resolved, snapshot)
        if not stale:
            return snapshot
        print_note(f"library {name} version {snapshot.manifest.version} is stale: {'; '.join(stale)}")
    spec = build_spec_from_scenario(resolved)
    target = open_store("memory://dry-run") if dry_run else store
    run = choose_executor("inline" if dry_run else executor, workers=1 if dry_run else os.cpu_count() or 1, spec=spec)
    with library_progress(name, quiet=quiet) as on_progress:
        manifest = build_library(spec, target, run, on_progress=on_progress)
    return open_library(target, name, manifest.version)


def show_plan(plan: Mapping[str, Any], decision: Mapping[str, Any]) -> None:
    """Cost and what is not met in the first line; then what to rent, its coverage, and the baselines."""
    from coral_core.report.plan_report import headline, plan_tables

    print_text(f"Plan for {plan['scenario']} (all figures predicted): {headline(plan)}")
    for note in plan.get("notes", ()):
        print_text(f"note: {note}")
    for table in plan_tables(plan, decision, separator="\n"):
        print_text("")
        print_table(table.title, table.columns, table.rows)
    print_text(f"\nsolved by {plan['method']}; why it is so: coral plan explain")


def show_explanation(record: StoredPlan) -> None:
    """What binds and what one more would save, what the next tokens cost, and how that compares with the plan."""
    from coral_core.report.plan_explained import limits_table, marginal_table, relaxation_text

    explanation = record.decision["explanation"]
    columns, rows = limits_table(explanation)
    if rows:
        print_table("Limits that hold the plan back", columns, rows)
    else:
        print_text("No limit holds the plan back besides the demand itself.")
    print_table("What more of each would cost", *marginal_table(explanation))
    print_text(relaxation_text(explanation, record.plan))


def show_template(answer: Mapping[str, Any]) -> None:
    """Why one template is in the plan or not, as sentences, and the facts behind them."""
    from coral_core.report.plan_explained import template_facts

    state = "in the plan" if answer["chosen_count"] else "not in the plan"
    print_text(f"{answer['template']} is {state}:")
    for reason in answer["reasons"]:
        print_text(f"- {reason}")
    facts = template_facts(answer)
    if facts:
        print_table("Facts", ("what", "value"), facts)
