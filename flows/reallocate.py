"""Flow `reallocate`: see -> demand -> plan -> (approve) -> lease -> apply -> verify -> record, shown in the UI.

Mode `plan` changes nothing and needs no lease; mode `apply` sees and plans under it. While somebody is asked no lease is
held: what was approved is compared with what is seen under the lease before it is carried out. Where the cloud refuses,
the same run plans again with what could be had, in mode `approve` with another question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Final

from prefect import State, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from artifacts.fleets import RESULT, Outcome
from artifacts.leases import Lease, LeaseTaken
from artifacts.library import open_library
from artifacts.plans import PLAN, StoredPlan
from artifacts.prefect_ui import publish_markdown, publish_objects, publish_table
from artifacts.store import Store
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import load_settings
from coral_core.domain.fleet import Offer
from coral_core.report.figures import usd
from coral_core.report.plan_report import headline, instances_table, unmet_text
from flows.events import LEASE_HELD, tell_shortfall
from flows.parameters import ReallocateParameters, artifact_key
from flows.server import require_server
from tasks.apply import (
    Done,
    Goal,
    Job,
    carry_out,
    change_lines,
    check_limits,
    given_back_on_error,
    holder_text,
    open_job,
    preview,
    take,
)
from tasks.observe import Observation, cost_usd_per_h
from tasks.reallocate import Wish, check_acting, goal_of, plan_from, record_plan, record_unacted, see, why_outdated
from tasks.reallocate import dry_run as what_a_run_would_do

MOST_PLANS: Final = 5
"""Plans that one run makes: a refusal of the cloud or an approval that came too late asks for another."""
STEPS_ASKED: Final = 12
"""Steps that the question shows; all are recorded before the first is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reallocated:
    """What a run came to.

    `outcome` is one of `artifacts.fleets.Outcome`, `dry_run`, or `lease_held` where another run was acting. URLs are
    empty where nothing was recorded.
    """

    outcome: str
    message: str
    plan_url: str = ""
    result_url: str = ""


class Approval(RunInput):
    """The form in which a plan is approved."""

    approve: bool = Field(default=False, description="Carry the plan out.")
    comment: str = Field(default="", description="For the record.")


@flow(name="reallocate", flow_run_name="reallocate-{params.scenario_name}")
def reallocate(params: ReallocateParameters = ReallocateParameters()) -> Reallocated | State[Reallocated]:  # noqa: B008 - frozen
    """Plan the cheapest fleet for a scenario and record it; in the modes `approve` and `apply`, make it so."""
    job, wish = open_run(params)
    if params.dry_run:
        return show_steps(job, wish)
    if params.mode == "plan":
        stored = make_plan(job, wish, observe(job, wish), {})
        return Reallocated(outcome=Outcome.PLANNED, message=headline(stored.plan), plan_url=stored.record.urls[PLAN])
    check_acting(job, wish)
    if params.mode == "approve":
        require_server()  # a server that lives as long as this run has no page to answer in
    lowered: dict[Offer, int] = {}
    for turns_left in reversed(range(MOST_PLANS)):
        done = turn(job, wish, params, lowered)
        if not isinstance(done, Done):
            return done
        if not (done.again and turns_left):
            return ended(done)
        for offer, nodes in done.lowered.items():
            lowered[offer] = min(nodes, lowered.get(offer, nodes))
    raise AssertionError("the last turn returns")


def turn(
    job: Job, wish: Wish, params: ReallocateParameters, lowered: Mapping[Offer, int]
) -> Done | Reallocated | State[Reallocated]:
    """One plan, asked about where that is due, and carried out under one lease."""
    approved = None
    if params.mode == "approve":
        seen = observe(job, wish)
        approved = make_plan(job, wish, seen, lowered)
        asked = goal_of(job, wish, approved, seen, mode="approve")
        check_limits(asked)  # nobody is asked about what cannot be
        unapproved = ask(job, params, approved, change_text(job, asked))
        if unapproved is not None:
            return unapproved
    lease = take(job)
    if isinstance(lease, LeaseTaken):
        get_run_logger().warning("%s", lease)
        held = Reallocated(outcome="lease_held", message=str(lease))
        return Completed(name=LEASE_HELD, message=held.message, data=held)
    with given_back_on_error(lease):  # nothing has been changed yet
        goal = goal_under_lease(job, wish, params, approved, lowered)
    if isinstance(goal, Goal):
        return apply(job, lease, goal)
    lease.give_back()
    return goal


def goal_under_lease(
    job: Job, wish: Wish, params: ReallocateParameters, approved: StoredPlan | None, lowered: Mapping[Offer, int]
) -> Goal | Done:
    """The approved plan if it still holds (else why not), or a plan of what is seen now."""
    seen = observe(job, wish)
    if approved is None:
        stored = make_plan(job, wish, seen, lowered)
        return goal_of(job, wish, stored, seen, mode="apply", lowered=lowered)
    why = why_outdated(wish, approved, seen, max_age_s=params.plan_max_age_s)
    return outdated(job, approved, why) if why else goal_of(job, wish, approved, seen, mode="approve", lowered=lowered)


def open_run(params: ReallocateParameters) -> tuple[Job, Wish]:
    """What the parameters name, with the settings where they are silent."""
    settings = load_settings()
    job = open_job(
        settings,
        store=params.store,
        fleet=params.fleet,
        provider=params.provider or None,
        patience=params.acting.patience,
        holder=holder_text(f"flow run {flow_run.get_name()}"),
    )
    resolved = resolve_scenario(load_scenario(params.scenario), user_models=settings.models)
    max_nodes = settings.max_nodes if params.max_nodes is None else params.max_nodes
    max_usd_per_h = settings.max_usd_per_h if params.max_usd_per_h is None else params.max_usd_per_h
    wish = Wish(
        resolved=resolved,
        snapshot=open_library(job.store, resolved.scenario.library_name, params.library_version),
        demand=params.demand,
        max_nodes=math.inf if max_nodes is None else max_nodes,
        max_usd_per_h=math.inf if max_usd_per_h is None else max_usd_per_h,
        keep_running=params.keep_running and params.mode == "plan",
    )
    return job, wish


@task(name="observe", cache_policy=NO_CACHE)
def observe(job: Job, wish: Wish) -> Observation:
    """The fleet and the supply as they are now."""
    return see(job, wish)


@task(name="plan", cache_policy=NO_CACHE)
def make_plan(job: Job, wish: Wish, seen: Observation, lowered: Mapping[Offer, int]) -> StoredPlan:
    """Solve the allocation for the demand to be planned for, record the answer and show it."""
    stored = record_plan(job, plan_from(job, wish, seen, lowered))
    show_plan(job.store, stored)
    log_plan(stored)
    tell_shortfall(stored)
    return stored


@task(name="apply", cache_policy=NO_CACHE)
def apply(job: Job, lease: Lease, goal: Goal) -> Done:
    """Bring the fleet to the plan, look at it again, and record what was done."""
    get_run_logger().info("lease on fleet %s taken, epoch %d", lease.name, lease.epoch)
    done = carry_out(job, lease, goal)
    publish_objects(
        artifact_key("result", job.fleet), job.store, {RESULT: done.result_url}, description="What the run did"
    )
    return done


def change_text(job: Job, goal: Goal) -> str:
    """What it would change now, as Markdown: both costs, and the first steps."""
    found = preview(job, goal)
    lines = change_lines(found)
    now = cost_usd_per_h(found.nodes, goal.limits.price_usd_per_h)
    before = "not known" if now is None else f"{usd(now)} USD/h"
    more = [f"- and {len(lines) - STEPS_ASKED} more"] if len(lines) > STEPS_ASKED else []
    steps = "\n".join([*(f"- {line}" for line in lines[:STEPS_ASKED]), *more])
    return f"The fleet costs {before} now (measured). {len(lines)} steps:\n\n{steps}"


def ask(
    job: Job, params: ReallocateParameters, stored: StoredPlan, change: str
) -> Reallocated | State[Reallocated] | None:
    """Pause until somebody answers in the UI; None where the plan was approved, else what the run came to."""
    url = stored.record.urls[PLAN]
    text = f"Plan of fleet {job.fleet}: {headline(stored.plan)}\n\n{change}\n\nRecorded at `{url}`."
    form = Approval.with_initial_data(description=text, approve=False)
    poll_s = max(1, math.ceil(params.acting.poll_s))
    try:
        answer = pause_flow_run(wait_for_input=form, timeout=params.approval_timeout_s, poll_interval=poll_s)
    except FlowPauseTimeout:
        outcome, reason = Outcome.UNANSWERED, f"nobody answered within {params.approval_timeout_s} s"
    else:
        if answer.approve:
            get_run_logger().info("approved: %s", answer.comment or "without comment")
            return None
        outcome, reason = Outcome.DECLINED, f"declined: {answer.comment or 'without comment'}"
    result_url = record_unacted(job, stored, outcome, reason)
    found = Reallocated(outcome=outcome, message=reason, plan_url=url, result_url=result_url)
    return Completed(name=outcome.value.capitalize(), message=reason, data=found)


def outdated(job: Job, stored: StoredPlan, why: str) -> Done:
    """An approved plan that must not be carried out any more."""
    get_run_logger().warning("the approved plan is planned anew: %s", why)
    return Done(
        outcome=Outcome.OUTDATED,
        reason=why,
        cost_usd_per_h=None,
        lowered={},
        plan_url=stored.record.urls[PLAN],
        result_url=record_unacted(job, stored, Outcome.OUTDATED, why),
    )


def ended(done: Done) -> Reallocated | State[Reallocated]:
    """The run's end: a failed state, with its reason, where the fleet is not the plan."""
    cost = "not known" if done.cost_usd_per_h is None else f"{usd(done.cost_usd_per_h)} USD/h"
    message = f"{done.outcome}: {done.reason}; the fleet costs {cost} (measured)"
    found = Reallocated(outcome=done.outcome, message=message, plan_url=done.plan_url, result_url=done.result_url)
    get_run_logger().log(INFO if done.outcome is Outcome.CONVERGED else WARNING, "%s", message)
    if done.outcome is Outcome.CONVERGED:
        return Completed(message=message, data=found)
    return Failed(name=done.outcome.value.replace("_", " ").title().replace(" ", ""), message=message, data=found)


def show_steps(job: Job, wish: Wish) -> Reallocated:
    """What a run would do now, in the log and as a table; nothing is recorded or changed."""
    found = what_a_run_would_do(job, wish)
    before = "not known" if found.cost_now_usd_per_h is None else usd(found.cost_now_usd_per_h)
    message = (
        f"dry run: {len(found.steps)} steps, from {before} USD/h (measured) to {usd(found.cost_planned_usd_per_h)} "
        f"USD/h (predicted)"
    )
    get_run_logger().info("%s", "\n".join([message, *found.steps]))
    if found.steps:
        publish_table(artifact_key("steps", job.fleet), [{"step": line} for line in found.steps], description=message)
    return Reallocated(outcome="dry_run", message=message)


def show_plan(store: Store, stored: StoredPlan) -> None:
    """The plan as a table, the report as a page, and where the stored objects lie, in the run's artifacts."""
    key = artifact_key("plan", stored.record.fleet)
    publish_table(key, plan_rows(stored), description=f"Plan of fleet {stored.record.fleet}")
    publish_markdown(f"{key}-report", stored.report_md, description=f"Report on the plan of {stored.record.fleet}")
    publish_objects(f"{key}-stored", store, stored.record.urls, description="What was recorded, and where it lies")


def plan_rows(stored: StoredPlan) -> list[dict[str, object]]:
    """The plan's instances as the command line shows them, one row each and the total."""
    table = instances_table(stored.plan)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def log_plan(stored: StoredPlan) -> None:
    """Cost, proof and what is not met, then what else to know; a warning where the demand is not met."""
    logger = get_run_logger()
    unmet = unmet_text(stored.plan) != "none"
    logger.log(WARNING if unmet else INFO, "plan of fleet %s: %s", stored.record.fleet, headline(stored.plan))
    for note in stored.plan.get("notes", ()):
        logger.info("note: %s", note)
    logger.info("recorded at %s", stored.record.urls[PLAN])
