"""The flows as deployments: a form, a schedule and a run history each in the Prefect UI."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

from prefect import Flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.schedules import Cron, Interval, Schedule
from prefect.types.entrypoint import EntrypointType

from coral_core.config.settings import load_settings
from coral_core.errors import InputError
from flows.automations import TAG, install_automations
from flows.build_library import build_library
from flows.evaluate import evaluate
from flows.parameters import ReallocateParameters
from flows.profile_gpus import profile_gpus
from flows.reallocate import reallocate
from flows.server import DEFAULT_PORT, require_server, server_at_hand
from flows.teardown import teardown

REALLOCATE_CRON: Final = "*/10 * * * *"
SHORTEST_INTERVAL_S: Final = 1.0

__all__ = ["deployments", "reallocate_schedule", "require_server", "serve_all"]


def deployments(
    begin_with: ReallocateParameters | None = None, *, schedule: Schedule | None = None
) -> list[RunnerDeployment]:
    """One deployment per flow.

    `begin_with` is what the form of `reallocate` shows at first, and what scheduled runs and those started by events use.
    `schedule` is its schedule; without one it is there, every 10 minutes, and off: switch it on in the UI.
    """
    # One at a time, as a convenience only: Prefect's limit is no lock (docs/operations.md), the flow takes its own lease.
    one_at_a_time = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    given = begin_with.model_dump(mode="json", exclude_unset=True) if begin_with else {}
    shared = {key: value for key, value in given.items() if key == "scenario"}
    return [
        _served(build_library, shared),
        _served(
            reallocate,
            given,
            schedule=schedule or Cron(REALLOCATE_CRON, timezone="UTC", active=False),
            concurrency_limit=one_at_a_time,
        ),
        _served(evaluate, shared),
        _served(profile_gpus, {}, concurrency_limit=one_at_a_time),
        _served(
            teardown, {key: value for key, value in given.items() if key == "fleet"}, concurrency_limit=one_at_a_time
        ),
    ]


def reallocate_schedule(every: str) -> Schedule | None:
    """A schedule that is on: `every` so many seconds, or by a cron expression (UTC); None where it is empty.

    Raises InputError for anything else.
    """
    if not every:
        return None
    fix = "give seconds between runs, such as 600, or a cron expression, such as '*/10 * * * *'"
    try:
        seconds = float(every)
    except ValueError:
        try:
            return Cron(every, timezone="UTC")
        except ValueError as error:
            raise InputError(f"{every!r} is no schedule: {error}", where="--every", fix=fix) from None
    if not SHORTEST_INTERVAL_S <= seconds <= timedelta.max.total_seconds():
        raise InputError(f"{every} s is no interval", where="--every", fix=fix)
    return Interval(timedelta(seconds=seconds))


def serve_all(
    begin_with: ReallocateParameters | None = None,
    *,
    limit: int = 2,
    port: int = DEFAULT_PORT,
    every: str = "",
    notify: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Serve the deployments until stopped: to the server that is set, else to one of our own with its UI.

    At most `limit` runs at once. All that was started ends with this call: runs under way are cancelled, schedules paused
    until they are served again, our own server stopped. Raises InputError where the server that is set does not answer.
    """
    schedule = reallocate_schedule(every)
    fleet = (begin_with.fleet if begin_with else "") or load_settings().fleet
    with server_at_hand(port) as (url, own):
        runner = Runner(limit=limit)
        for deployment in deployments(begin_with, schedule=schedule):
            runner.add_deployment(deployment)
            say(f"deployment {deployment.flow_name}/{deployment.name}")
        for line in install_automations(fleet=fleet, notify=notify):
            say(line)
        state = (
            f"on, {every}" if schedule else f"off ({REALLOCATE_CRON}): switch it on in the UI, or serve with --every"
        )
        say(f"schedule of reallocate: {state}")
        say(f"{'own server' if own else 'server'} at {url.removesuffix('/api')}  (Ctrl-C ends what was started here)")
        _run(runner)


def absolute_scenario(name_or_path: str) -> str:
    """A scenario file by its full path, since runs may start elsewhere; a shipped scenario by its name."""
    is_file = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    return str(Path(name_or_path).resolve()) if is_file else name_or_path


def _run(runner: Runner) -> None:
    """Until SIGINT or SIGTERM; both end runs under way, which an interrupt alone would leave behind."""
    before = signal.signal(signal.SIGINT, runner.handle_sigterm)
    try:
        asyncio.run(runner.start())
    finally:
        signal.signal(signal.SIGINT, before)


def _served(
    flow: Flow[..., Any],
    defaults: Mapping[str, object],
    *,
    schedule: Schedule | None = None,
    concurrency_limit: ConcurrencyLimitConfig | None = None,
) -> RunnerDeployment:
    found = flow.to_deployment(
        flow.name,
        tags=[TAG],
        entrypoint_type=EntrypointType.MODULE_PATH,
        parameters={"params": dict(defaults)} if defaults else None,
        schedule=schedule,
        concurrency_limit=concurrency_limit,
    )
    return cast("RunnerDeployment", found)  # a coroutine only inside a loop
