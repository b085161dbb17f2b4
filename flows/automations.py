"""Automations of the Prefect server: plan anew on news of a fleet, and tell of failed runs and of shortfalls.

Created by name and updated in place: doing it again changes nothing. What somebody switched off stays off.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import RunDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from coral_core.errors import InputError
from flows.events import DEPLOYMENT, PLAN_WANTED, PROFILED, SHORTFALL, deployment_missing, fleet_resource

WEBHOOK_BLOCK: Final = "coral-notifications"
TAG: Final = "coral"
BUILD: Final = "build-library/build-library"


def install_automations(*, fleet: str, notify: str) -> list[str]:
    """Create or update the automations; one line on each, for people.

    `notify`: an http(s) URL that gets a JSON post {"subject", "body", "text"}, or `type/name` of a notification block of
    the server (`slack-webhook/ops`), or empty: nobody is told but the logs. Raises InputError for a block there is not.
    """
    with get_client(sync_client=True) as client:
        told = _notification_block(client, notify)
        wanted = [_plan_on_news(client, fleet), *_build_on_profiles(client), *_notices(told)]
        for automation in wanted:
            _put(client, automation)
        if told is None:
            for stale in _notices(UUID(int=0)):
                for found in client.read_automations_by_name(stale.name):
                    client.delete_automation(found.id)
    lines = [f"automation {automation.name!r}" for automation in wanted]
    return lines if told else [*lines, "nobody is told of failures and shortfalls but the logs: set CORAL_NOTIFY"]


def _plan_on_news(client: SyncPrefectClient, fleet: str) -> AutomationCore:
    try:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
    except ObjectNotFound:
        raise deployment_missing() from None
    return AutomationCore(
        name=f"coral: plan fleet {fleet} anew on news",
        description="The watch over the fleet saw something that cannot wait for the schedule, and no run is under way.",
        tags=[TAG],
        trigger=EventTrigger(
            expect={PLAN_WANTED},
            match={"prefect.resource.id": fleet_resource(fleet)},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[RunDeployment(source="selected", deployment_id=deployment.id, parameters=None, job_variables=None)],
    )


def _build_on_profiles(client: SyncPrefectClient) -> list[AutomationCore]:
    """Where the server has the deployment: profiles change capacities, so libraries are built anew."""
    try:
        deployment = client.read_deployment_by_name(BUILD)
    except ObjectNotFound:
        return []
    return [
        AutomationCore(
            name="coral: build the library anew on new profiles",
            description="A profiling run has published layer times; shards that they do not touch are reused.",
            tags=[TAG],
            trigger=EventTrigger(expect={PROFILED}, posture=Posture.Reactive, threshold=1),
            actions=[
                RunDeployment(source="selected", deployment_id=deployment.id, parameters=None, job_variables=None)
            ],
        )
    ]


def _notices(block: UUID | None) -> list[AutomationCore]:
    if block is None:
        return []
    return [
        AutomationCore(
            name="coral: tell of failed runs",
            description="A run of one of Coral's deployments failed or crashed.",
            tags=[TAG],
            trigger=EventTrigger(
                expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
                match_related={"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"},
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[
                SendNotification(
                    block_document_id=block,
                    subject="Coral: {{ flow_run.name }} {{ flow_run.state.name | lower }}",
                    body="{{ flow_run.state.message }}\n{{ flow_run | ui_url }}",
                )
            ],
        ),
        AutomationCore(
            name="coral: tell of shortfalls",
            description="A plan leaves demand unmet.",
            tags=[TAG],
            trigger=EventTrigger(expect={SHORTFALL}, posture=Posture.Reactive, threshold=1),
            actions=[
                SendNotification(
                    block_document_id=block,
                    subject="Coral: fleet {{ event.payload.fleet }} falls short",
                    body="{{ event.payload.text }}\n{{ event.payload.plan }}",
                )
            ],
        ),
    ]


def _notification_block(client: SyncPrefectClient, notify: str) -> UUID | None:
    """The block that tells, made or changed where `notify` is a URL."""
    if not notify:
        return None
    if notify.startswith(("http://", "https://")):
        message: dict[str, Any] = {"subject": "{{subject}}", "body": "{{body}}", "text": "{{subject}}\n{{body}}"}
        block = CustomWebhookNotificationBlock(name="Coral", url=notify, json_data=message, headers=None, cookies=None)
        return UUID(str(block.save(WEBHOOK_BLOCK, overwrite=True)))
    kind, _, name = notify.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound:
        raise InputError(
            f"the Prefect server has no block {name!r} of type {kind!r}",
            where="CORAL_NOTIFY",
            fix="give an http(s) URL, or create the block on the server's Blocks page and name it `type/name`",
        ) from None


def _put(client: SyncPrefectClient, automation: AutomationCore) -> None:
    known = client.read_automations_by_name(automation.name)
    if not known:
        client.create_automation(automation)
        return
    client.update_automation(known[0].id, automation.model_copy(update={"enabled": known[0].enabled}))
