"""`coral teardown`: release all that a fleet holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from coral_core.cli.fleet import open_fleet
from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_text
from coral_core.errors import InputError, ProvisionError

if TYPE_CHECKING:
    from tasks.apply import Job
    from tasks.teardown import Release


def teardown(
    fleet: Annotated[str, Parameter(help="The fleet; it must be named.")],
    *,
    dry_run: Annotated[bool, Parameter(negative="", help="List the steps and change nothing.")] = False,
    yes: Annotated[bool, Parameter(negative="", help="Do not ask.")] = False,
    region: Annotated[
        tuple[str, ...], Parameter(help="Look in this region too, besides all the fleet has ever been in; repeatable.")
    ] = (),
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Drain and release every node of a fleet in every region it has ever been in, and see that nothing is left.

    Nodes of others are never touched, even with copied tags. Exit code 7 where something is left or another run acts.
    """
    from tasks.apply import check_patience
    from tasks.teardown import release_of

    job = open_fleet(fleet, store)
    check_patience(job)
    found = release_of(job, region)
    if not as_json or not (dry_run or yes):
        show_release(found, fleet)
    if dry_run:
        if as_json:
            print_json({"fleet": fleet, "regions": list(found.goal.regions), "steps": list(found.steps)})
        return 0
    if found.steps and not yes:
        confirm(fleet)
    return release(job, region, as_json=as_json)


def release(job: Job, regions: tuple[str, ...], *, as_json: bool) -> int:
    """Do it under the fleet's lease."""
    from artifacts.fleets import Outcome
    from artifacts.leases import LeaseTaken
    from tasks.apply import carry_out, given_back_on_error, take
    from tasks.teardown import release_of

    lease = take(job)
    if isinstance(lease, LeaseTaken):
        raise ProvisionError(str(lease), where=f"fleet {job.fleet}", fix="wait for that run to end, then try again")
    with given_back_on_error(lease):  # nothing has been changed yet
        goal = release_of(job, regions).goal
    done = carry_out(job, lease, goal)
    if as_json:
        print_json({"fleet": job.fleet, "outcome": done.outcome, "reason": done.reason, "url": done.result_url})
    else:
        print_text(f"{done.outcome}: {done.reason}; recorded at {done.result_url}")
    return 0 if done.outcome is Outcome.CONVERGED else ProvisionError.exit_code


def show_release(found: Release, fleet: str) -> None:
    """The steps, one line each."""
    print_text(f"Teardown of fleet {fleet} in {', '.join(found.goal.regions)}: {len(found.steps)} steps")
    for line in found.steps:
        print_text(f"- {line}")


def confirm(fleet: str) -> None:
    """Ask for the fleet's name. Raises InputError for another answer, or where nobody can answer."""
    if not sys.stdin.isatty():
        raise InputError("nobody is there to confirm", where="teardown", fix="give --yes")
    answer = input(f"Release all of this? Type the fleet's name ({fleet}) to go on: ")
    if answer.strip() != fleet:
        raise InputError("not confirmed: nothing was changed", where="teardown")
