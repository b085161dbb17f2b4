"""Flow `reallocate`: scenario and library -> cheapest plan, recorded and shown in the UI; changes nothing yet."""

from __future__ import annotations

from datetime import datetime

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from artifacts.index import index_plans
from artifacts.library import open_library
from artifacts.plans import DECISION, PLAN, REPORT, StoredPlan, list_plans, read_plan, write_plan
from artifacts.prefect_ui import publish_link, publish_markdown, publish_table
from artifacts.store import Store, open_store
from coral_core.clock import SystemClock
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import load_settings
from flows.parameters import ReallocateParameters, artifact_key
from tasks.plan import make_plan, running_from_plan


@flow(name="reallocate", flow_run_name="reallocate-{params.scenario}")
def reallocate(params: ReallocateParameters = ReallocateParameters()) -> str:  # noqa: B008 - frozen
    """Make the cheapest plan of a scenario from its template library and record it; the URL of plan.json."""
    settings = load_settings()
    store = open_store(params.store or settings.store_url)
    fleet = params.fleet or settings.fleet
    time = plan_and_record(params, store, fleet)
    stored = read_plan(store, fleet, time)
    show_plan(stored)
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


def show_plan(stored: StoredPlan) -> None:
    """The plan as a table, the report as a page, and links to the stored objects, in the run's artifacts."""
    key = artifact_key("plan", stored.record.fleet)
    publish_table(key, plan_rows(stored), description=f"Plan of fleet {stored.record.fleet}")
    publish_markdown(f"{key}-report", stored.report_md, description=f"Report on the plan of {stored.record.fleet}")
    for name in (PLAN, DECISION, REPORT):
        publish_link(name, stored.record.urls[name])


def plan_rows(stored: StoredPlan) -> list[dict[str, object]]:
    """The plan's instances, one row each, figures as in plan.json."""
    columns = ("region", "model", "phase", "template", "count")
    rows = []
    for item in stored.plan["instances"]:
        nodes = " + ".join(f"{count} x {name}" for name, count in item["nodes"].items())
        layers = " | ".join(str(stage["layers"]) for stage in item["stages"])
        rows.append(
            {
                **{name: item[name] for name in columns},
                "nodes": nodes,
                "layers per stage": layers,
                "tokens/s each": item["throughput_tokens_per_s"],
                "requests/s each": item["throughput_requests_per_s"],
                "USD/h": item["cost_usd_per_h"],
            }
        )
    return rows
