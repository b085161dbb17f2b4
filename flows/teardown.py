"""Flow `teardown`: lease -> drain and release every node of a fleet, in every region it has ever been in -> verify."""

from __future__ import annotations

from prefect import State, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Completed

from artifacts.fleets import RESULT
from artifacts.leases import Lease, LeaseTaken
from artifacts.prefect_ui import publish_objects, publish_table
from coral_core.config.settings import load_settings
from coral_core.errors import InputError
from flows.events import LEASE_HELD
from flows.parameters import TeardownParameters, artifact_key
from flows.reallocate import Reallocated, ended
from tasks.apply import Done, Goal, Job, carry_out, check_patience, given_back_on_error, holder_text, open_job, take
from tasks.teardown import Release, release_of


@flow(name="teardown", flow_run_name="teardown-{params.fleet_name}")
def teardown(params: TeardownParameters = TeardownParameters()) -> Reallocated | State[Reallocated]:  # noqa: B008 - frozen
    """Release all that a fleet holds, and see that nothing is left; nodes of others are never touched."""
    job = open_job(
        load_settings(),
        store=params.store,
        fleet=params.fleet,
        provider=params.provider or None,
        patience=params.acting.patience,
        holder=holder_text(f"flow run {flow_run.get_name()}"),
    )
    check_patience(job)
    if params.dry_run:
        return show_release(job, release_of(job, params.regions))
    if params.confirm != job.fleet:
        raise InputError(f"fleet {job.fleet} is not confirmed", where="confirm", fix="give the fleet's name there too")
    lease = take(job)
    if isinstance(lease, LeaseTaken):
        held = Reallocated(outcome="lease_held", message=str(lease))
        return Completed(name=LEASE_HELD, message=held.message, data=held)
    with given_back_on_error(lease):  # nothing has been changed yet
        goal = release_of(job, params.regions).goal
    return ended(release(job, lease, goal))


@task(name="release", cache_policy=NO_CACHE)
def release(job: Job, lease: Lease, goal: Goal) -> Done:
    """Drain, stop, look again, and record what was done."""
    done = carry_out(job, lease, goal)
    publish_objects(
        artifact_key("result", job.fleet), job.store, {RESULT: done.result_url}, description="What the run did"
    )
    return done


def show_release(job: Job, found: Release) -> Reallocated:
    """What a teardown would do now."""
    message = f"dry run: {len(found.steps)} steps in {', '.join(found.goal.regions) or 'no region'}"
    get_run_logger().info("%s", "\n".join([message, *found.steps]))
    if found.steps:
        rows = [{"step": line} for line in found.steps]
        publish_table(artifact_key("steps", job.fleet), rows, description=message)
    return Reallocated(outcome="dry_run", message=message)
