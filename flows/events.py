"""Coral's own events on the Prefect server, and what its runs are up to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.schemas.events import Event, Resource
from prefect.exceptions import ObjectNotFound, PrefectException

from artifacts.plans import PLAN, StoredPlan
from coral_core.cloud.events import FleetCondition
from coral_core.errors import CoralError, InputError
from coral_core.report.plan_report import unmet_text
from tasks.watch import RunsSeen

PLAN_WANTED: Final = "coral.fleet.plan-wanted"
SHORTFALL: Final = "coral.plan.shortfall"
PROFILED: Final = "coral.profile.published"
DEPLOYMENT: Final = "reallocate/reallocate"
LEASE_HELD: Final = "LeaseHeld"
"""The state in which a run ends that found another one acting."""
_FEW: Final = 20
_LOG: Final = logging.getLogger(__name__)


def fleet_resource(fleet: str) -> str:
    """A fleet's name as a resource of events."""
    return f"coral.fleet.{fleet}"


class PrefectRuns:
    """The runs of the deployment `reallocate` on the server that is set.

    Methods raise CoralError where the server does not answer, InputError where it has no such deployment.
    """

    def __init__(self, fleet: str) -> None:
        self.fleet = fleet

    def seen(self, now_s: float) -> RunsSeen:
        """What the newest runs are up to, whoever started them; a run that is scheduled for later does not count."""
        due = FlowRunFilterExpectedStartTime.model_validate({"before_": datetime.fromtimestamp(now_s, UTC)})
        try:
            with get_client(sync_client=True) as client:
                deployment = client.read_deployment_by_name(DEPLOYMENT)
                runs = client.read_flow_runs(
                    deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
                    flow_run_filter=FlowRunFilter(expected_start_time=due),
                    sort=FlowRunSort.EXPECTED_START_TIME_DESC,
                    limit=_FEW,
                )
        except ObjectNotFound:
            raise deployment_missing() from None
        except (httpx.HTTPError, PrefectException) as error:
            raise _away(error) from error
        return runs_seen(runs)

    def ask(self, news: Sequence[FleetCondition]) -> None:
        """Tell the server that a plan is wanted; its automation starts the run."""
        emit(PLAN_WANTED, self.fleet, {"news": [condition.detail for condition in news]})

    def tell(self, news: Sequence[FleetCondition]) -> None:
        """Put each piece of news into the server's event feed."""
        for condition in news:
            emit(f"coral.fleet.{condition.kind}", self.fleet, {"subject": condition.subject, "text": condition.detail})


def runs_seen(runs: Sequence[FlowRun]) -> RunsSeen:
    """What runs are up to; one that found the lease taken has seen nothing, so that it has not begun after any news."""
    begun = [
        run.start_time.timestamp()
        for run in runs
        if run.start_time is not None and not (run.state is not None and run.state.name == LEASE_HELD)
    ]
    return RunsSeen(
        running=any(run.state is not None and not run.state.is_final() for run in runs),
        last_start_s=max(begun, default=None),
    )


def tell_shortfall(stored: StoredPlan) -> None:
    """An event where a plan leaves demand unmet, for the automation that tells people. A server that is away is logged."""
    unmet = unmet_text(stored.plan)
    if unmet == "none":
        return
    fleet = stored.record.fleet
    try:
        emit(SHORTFALL, fleet, {"fleet": fleet, "text": f"not met: {unmet}", "plan": stored.record.urls[PLAN]})
    except CoralError as error:
        _LOG.warning("nobody was told of the shortfall: %s", error)


def tell_profiled(fleet: str, model: str, keys: Sequence[str]) -> None:
    """An event for new profiles; the automation builds libraries anew. A server that is away is logged."""
    try:
        emit(PROFILED, fleet, {"fleet": fleet, "model": model, "text": f"new profiles of {model}", "keys": list(keys)})
    except CoralError as error:
        _LOG.warning("nobody was told of the new profiles: %s", error)


def emit(event: str, fleet: str, payload: Mapping[str, Any]) -> None:
    """Post an event about a fleet; it has arrived when this returns. Raises CoralError where the server does not answer."""
    resource = Resource({"prefect.resource.id": fleet_resource(fleet), "prefect.resource.name": fleet})
    body = Event(event=event, resource=resource, payload=dict(payload)).model_dump(mode="json")
    try:
        with get_client(sync_client=True) as client:
            client.request("POST", "/events", json=[body]).raise_for_status()
    except (httpx.HTTPError, PrefectException) as error:
        raise _away(error) from error


def deployment_missing() -> InputError:
    """The error for a server that nobody has served the deployments to."""
    return InputError(
        f"the Prefect server has no deployment {DEPLOYMENT}", where="PREFECT_API_URL", fix="run `coral flows serve`"
    )


def _away(error: Exception) -> CoralError:
    return CoralError(
        f"the Prefect server does not answer: {error}", where="PREFECT_API_URL", fix="start it with `coral flows serve`"
    )
