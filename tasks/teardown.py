"""Teardown: the empty fleet as a goal, in every region that the fleet has ever been in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from artifacts.fleets import read_identity
from coral_core.cloud.ports import Preview
from coral_core.errors import InputError
from tasks.apply import Goal, Job, all_regions, change_lines, limits_of, preview
from tasks.fleet import last_prices
from tasks.observe import account_of, foreign_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a teardown is to do: its goal, the fleet as it is, and the steps."""

    goal: Goal
    found: Preview
    steps: tuple[str, ...]


def release_of(job: Job, regions: Iterable[str] = ()) -> Release:
    """The steps that release all of the fleet now, in all regions it has been in and in `regions`; reads only.

    Raises InputError where neither names any region, ProvisionError for a fleet of another account.
    """
    identity = read_identity(job.store, job.fleet)
    everywhere = all_regions(job, regions)
    if not everywhere:
        raise InputError(
            f"fleet {job.fleet} has never rented anything as far as this store knows",
            where=job.store.url,
            fix="check CORAL_STORE and the fleet's name, or name the regions to look in",
        )
    goal = Goal(
        time=job.provider.clock.now(),
        fleet=account_of(job.provider, job.fleet, identity.account if identity else None),
        mode="teardown",
        plan=None,
        limits=limits_of(last_prices(job), {}, max_nodes=0, max_usd_per_h=math.inf),
        zones={},
        regions=everywhere,
    )
    found = preview(job, goal)
    return Release(goal=goal, found=found, steps=(*change_lines(found), *foreign_lines(found.foreign)))
