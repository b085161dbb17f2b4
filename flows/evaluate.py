"""Flow `evaluate`: libraries -> plans by several policies -> the same simulated requests -> tables and a report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from artifacts.evaluations import SUMMARY, latest_sensitivity, write_evaluation
from artifacts.group_pages import index_group
from artifacts.keys import scenario_group
from artifacts.library import LibrarySnapshot
from artifacts.prefect_ui import publish_markdown, publish_objects, publish_table
from artifacts.store import Store, open_store
from coral_core.clock import SystemClock
from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import ResolvedScenario, resolve_scenario
from coral_core.config.scenario import LibraryMethod, load_scenario
from coral_core.config.settings import load_settings
from coral_core.domain.workload import Phase
from coral_core.report.evaluation_page import evaluation_html
from coral_core.report.evaluation_report import evaluation_markdown, evaluation_notes, evaluation_tables
from coral_core.report.page import page_or_none
from flows.parameters import EvaluateParameters, artifact_key
from tasks.evaluate import Evaluation
from tasks.evaluate import evaluate as evaluated
from tasks.executor import InlineExecutor
from tasks.template_source import TemplateSource, fresh_library, needed_methods, with_method


@flow(name="evaluate", flow_run_name="evaluate-{params.scenario_name}")
def evaluate(params: EvaluateParameters = EvaluateParameters()) -> str:  # noqa: B008 - frozen
    """Compare policies on a scenario in the simulator and record the figures; the URL of summary.json."""
    settings = load_settings()
    store = open_store(params.store or settings.store_url)
    resolved = resolve_scenario(load_scenario(params.scenario), user_models=settings.models)
    policies = scenario_policies(resolved, list(dict.fromkeys(params.policies)) or None)
    methods = needed_methods(resolved, list(policies.values()))
    snapshots = {method: library(resolved, store, method, workers=params.workers) for method in methods}
    found = compare(resolved, snapshots, params)
    urls = record(store, found, SystemClock().now())
    show(store, found.document, urls)
    return urls[SUMMARY]


@task(name="library", task_run_name="library-{method}", cache_policy=NO_CACHE)
def library(resolved: ResolvedScenario, store: Store, method: LibraryMethod, *, workers: int) -> LibrarySnapshot:
    """The templates made by one method, built first where they are missing or stale."""
    return fresh_library(with_method(resolved, method), store, InlineExecutor(processes=workers))


@task(name="compare", cache_policy=NO_CACHE)
def compare(
    resolved: ResolvedScenario, snapshots: Mapping[LibraryMethod, LibrarySnapshot], params: EvaluateParameters
) -> Evaluation:
    """Plan by every policy and simulate every seed."""
    given = {Phase.PREFILL: params.prefill_utilization, Phase.DECODE: params.decode_utilization}
    return evaluated(
        TemplateSource(resolved, snapshots),
        scenario_policies(resolved, list(dict.fromkeys(params.policies)) or None),
        list(dict.fromkeys(params.seeds)) or list(resolved.scenario.seeds),
        utilization={phase: value for phase, value in given.items() if value is not None},
        on_step=get_run_logger().info,
    )


@task(name="record", cache_policy=NO_CACHE)
def record(store: Store, found: Evaluation, now: datetime) -> dict[str, str]:
    """Write summary, tables, reports and index pages; URLs by file name."""
    scenario = found.document["scenario"]
    urls = write_evaluation(
        store,
        scenario,
        now,
        document=found.document,
        tables=found.tables,
        report_md=evaluation_markdown(found.document),
        report_html=page_or_none(
            lambda: evaluation_html(
                found.document,
                found.tables,
                time=now.isoformat(timespec="seconds"),
                sensitivity=latest_sensitivity(store, scenario),
            )
        ),
    )
    index_group(store, scenario_group(scenario))
    return urls


def show(store: Store, document: Mapping[str, Any], urls: Mapping[str, str]) -> None:
    """The tables, the report as a page, and where the stored objects lie, in the run's artifacts."""
    key = artifact_key("evaluation", document["scenario"])
    for number, table in enumerate(evaluation_tables(document)):
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        publish_table(f"{key}-{number}", rows, description=table.title)
    publish_markdown(
        f"{key}-report", evaluation_markdown(document), description=f"Evaluation of {document['scenario']}"
    )
    publish_objects(f"{key}-stored", store, urls, description="What was recorded, and where it lies")
    for name, why in document["failed"].items():
        get_run_logger().warning("policy %s failed: %s", name, why)
    for note in evaluation_notes(document):
        get_run_logger().info("note: %s", note)
