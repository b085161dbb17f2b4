"""The flows as deployments: a form, a schedule and a run history each in the Prefect UI."""

from __future__ import annotations

from typing import Final, cast

import httpx
from prefect import serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron
from prefect.settings import get_current_settings
from prefect.types.entrypoint import EntrypointType

from coral_core.errors import InputError
from flows.build_library import build_library
from flows.evaluate import evaluate
from flows.reallocate import reallocate

REALLOCATE_CRON: Final = "*/10 * * * *"


def deployments() -> list[RunnerDeployment]:
    """One deployment per flow. The schedule of `reallocate` is there and off: switch it on in the UI."""
    # One at a time, as a convenience only: Prefect's limit is no lock (docs/operations.md), and planning needs none.
    one_at_a_time = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    module = EntrypointType.MODULE_PATH
    build = build_library.to_deployment("build-library", tags=["coral"], entrypoint_type=module)
    plan = reallocate.to_deployment(
        "reallocate",
        schedule=Cron(REALLOCATE_CRON, timezone="UTC", active=False),
        concurrency_limit=one_at_a_time,
        tags=["coral"],
        entrypoint_type=module,
    )
    compare = evaluate.to_deployment("evaluate", tags=["coral"], entrypoint_type=module)
    return [
        cast("RunnerDeployment", deployment) for deployment in (build, plan, compare)
    ]  # coroutines only inside a loop


def serve_all(*, limit: int = 2) -> None:
    """Register the deployments and run what the server asks for, at most `limit` runs at once, until stopped.

    Raises InputError where no server is set or none answers.
    """
    require_server()
    serve(*deployments(), limit=limit)


def require_server() -> str:
    """The URL of the Prefect server's API, which answers; InputError otherwise."""
    url = get_current_settings().api.url
    fix = "run `prefect server start`, and set PREFECT_API_URL=http://127.0.0.1:4200/api"
    if not url:
        raise InputError("no Prefect server is set", where="PREFECT_API_URL", fix=fix)
    try:
        httpx.get(f"{url}/health", timeout=10).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"no Prefect server answers at {url}: {error}", where="PREFECT_API_URL", fix=fix) from error
    return url
