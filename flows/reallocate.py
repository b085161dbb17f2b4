"""Flow `reallocate`: scenario and library -> cheapest plan, recorded and shown in the UI; changes nothing yet."""

from __future__ import annotations

from datetime import datetime
from logging import INFO, WARNING

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from artifacts.browse import link_of
from artifacts.index import index_plans
from artifacts.library import open_library
from artifacts.plans import DECISION, PLAN, REPORT, StoredPlan, list_plans, read_plan, write_plan
from artifacts.prefect_ui import publish_link, publish_markdown, publish_table
from artifacts.store import Store, open_store
from coral_core.clock import SystemClock
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import load_settings
from coral_core.report.plan_report import headline, instances_table, unmet_text
from flows.parameters import ReallocateParameters, artifact_key
from tasks.plan import make_plan, running_from_plan


@flow(name="reallocate", flow_run_name="reallocate-{params.scenario_name}")
def reallocate(params: ReallocateParameters = ReallocateParameters()) -> str:  # noqa: B008 - frozen
    """Make the cheapest plan of a scenario from its template library and record it; the URL of plan.json."""
    settings = load_settings()
    store = open_store(params.store or settings.store_url)
    fleet = params.fleet or settings.fleet
    time = plan_and_record(params, store, fleet)
    stored = read_plan(store, fleet, time)
    show_plan(store, stored)
    log_result(stored)
    return stored.record.urls[PLAN]


@task(name="plan", cache_policy=NO_CACHE)
def plan_and_record(params: ReallocateParameters, store: Store, fleet: str) -> datetime:
    """Solve the allocation, with the fleet's last plan as what runs where that is asked for, and record the answer."""
    resolved = resolve_scenario(load_scenario(params.scenario), user_models=load_settings().models)
    snapshot = open_library(store, resolved.scenario.library_name, params.library_version)
    last = read_plan(store, fleet) if params.keep_running and list_plans(store, fleet) else None
    running = running_from_plan(last.plan) if last else ()
    now = SystemClock().now()
    outcome = make_plan(resolved, snapshot, fleet=fleet, now=now, running=running)
    write_plan(store, fleet, now, plan=outcome.plan, decision=outcome.decision, report_md=outcome.report_md)
    index_plans(store, fleet)
    return now


def show_plan(store: Store, stored: StoredPlan) -> None:
    """The plan as a table, the report as a page, and links to the stored objects, in the run's artifacts."""
    key = artifact_key("plan", stored.record.fleet)
    publish_table(key, plan_rows(stored), description=f"Plan of fleet {stored.record.fleet}")
    publish_markdown(f"{key}-report", stored.report_md, description=f"Report on the plan of {stored.record.fleet}")
    for name in (PLAN, DECISION, REPORT):
        publish_link(name, link_of(store, stored.record.keys[name]))


def plan_rows(stored: StoredPlan) -> list[dict[str, object]]:
    """The plan's instances as the command line shows them, one row each and the total."""
    table = instances_table(stored.plan)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def log_result(stored: StoredPlan) -> None:
    """Cost, proof and what is not met, then what else to know; a warning where the demand is not met."""
    logger = get_run_logger()
    unmet = unmet_text(stored.plan) != "none"
    logger.log(WARNING if unmet else INFO, "plan of fleet %s: %s", stored.record.fleet, headline(stored.plan))
    for note in stored.plan.get("notes", ()):
        logger.info("note: %s", note)
    logger.info("recorded at %s", stored.record.urls[PLAN])
