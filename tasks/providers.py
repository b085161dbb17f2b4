"""Where nodes are rented: the provider that the settings name, its sources of supply, and its serving side."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar, cast

import numpy as np

from artifacts.library import LibrarySnapshot
from artifacts.templates import template_columns
from coral_core.catalog import catalog_names, load_catalog
from coral_core.clock import Clock, SystemClock
from coral_core.cloud.assumed_engine import ASSUMED_NOTE, AssumedEngine
from coral_core.cloud.aws_codes import AwsApi
from coral_core.cloud.aws_provisioner import AwsLaunch, AwsProvisioner
from coral_core.cloud.aws_sources import aws_sources
from coral_core.cloud.engine_port import Engine
from coral_core.cloud.gcp import GcpLaunch, GcpProvisioner
from coral_core.cloud.observe import MaxAge, Sources
from coral_core.cloud.provisioner import CloudBusyError, Provisioner
from coral_core.cloud.rehearsal import RehearsalCloud
from coral_core.cloud.stated_supply import STATED_AGES, StatedSupply
from coral_core.cloud.supply import Reading
from coral_core.config.resolve import ResolvedScenario, available_nodes, node_prices
from coral_core.config.settings import ProviderName, Settings
from coral_core.domain.fleet import Offer
from coral_core.domain.hardware import split_market
from coral_core.errors import InputError
from tasks.gateway_engine import GatewayEngine
from tasks.local_nodes import LOCAL_ZONES, local_provisioner
from tasks.plan import scenario_templates

Answer = TypeVar("Answer")

AWS_SETTLE_S: Final = 60.0
"""What EC2 takes at most, by our own margin, to list what it has started."""
_PAUSES_S: Final = (1.0, 3.0, 9.0)
"""Between attempts of a read that finds the cloud busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A cloud as runs use it. `settle_s` is the longest that it takes to list what it has started.

    `supply(resolved, snapshot)` gives the sources of prices and availability and how old they may be; `sources` are those
    that need no scenario, where there are any. `notes` go into every run's record.
    """

    name: ProviderName
    provisioner: Provisioner
    engine: Engine
    clock: Clock
    sleep: Callable[[float], None]
    settle_s: float
    supply: Callable[[ResolvedScenario, LibrarySnapshot], tuple[Sources, MaxAge]]
    notes: tuple[str, ...]
    sources: Sources | None = None

    def patiently(self, read: Callable[[], Answer]) -> Answer:
        """The answer of a read, repeated a few times while the cloud is busy."""
        for pause_s in _PAUSES_S:
            try:
                return read()
            except CloudBusyError:
                self.sleep(pause_s)
        return read()


def open_provider(settings: Settings, name: ProviderName | None = None) -> Provider:
    """The provider of this name (default: the settings'). Raises InputError for settings that it lacks."""
    chosen = name or settings.provider
    return {"fake": _fake, "local": _local, "aws": _aws, "gcp": _gcp}[chosen](settings)


def _fake(settings: Settings) -> Provider:
    clock = SystemClock()
    zones = rehearsal_zones()
    return Provider(
        name="fake",
        provisioner=RehearsalCloud(settings.rehearsal, clock=clock, zones=zones),
        engine=AssumedEngine(),
        clock=clock,
        sleep=time.sleep,
        settle_s=0.0,
        supply=lambda resolved, snapshot: stated_supply(resolved, snapshot, zones, clock),
        notes=("a rehearsal: nothing was rented, and prices and supply are the scenario's", ASSUMED_NOTE),
    )


def _local(settings: Settings) -> Provider:
    clock = SystemClock()
    engine, notes = serving_side(settings)
    return Provider(
        name="local",
        provisioner=local_provisioner(settings, clock),
        engine=engine,
        clock=clock,
        sleep=time.sleep,
        settle_s=0.0,
        supply=lambda resolved, snapshot: stated_supply(resolved, snapshot, LOCAL_ZONES, clock),
        notes=("nodes are processes of this machine; prices and supply are the scenario's", *notes),
    )


def _aws(settings: Settings) -> Provider:
    api, clock = _boto3(settings), SystemClock()
    engine, notes = serving_side(settings)
    sources = aws_sources(api, clock)
    launch = AwsLaunch(
        launch_template=settings.aws_launch_template,
        subnets=settings.aws_subnets,
        home_region=settings.aws_home_region,
    )
    return Provider(
        name="aws",
        provisioner=AwsProvisioner(api, launch),
        engine=engine,
        clock=clock,
        sleep=time.sleep,
        settle_s=AWS_SETTLE_S,
        supply=lambda _resolved, _snapshot: (sources, MaxAge()),
        notes=notes,
        sources=sources,
    )


def _gcp(settings: Settings) -> Provider:
    if not settings.gcp_project or not settings.gcp_zones:
        raise InputError(
            "the provider gcp needs a project and the zones of each region",
            where="CORAL_GCP_PROJECT, CORAL_GCP_ZONES",
            fix="""set them, for instance CORAL_GCP_ZONES='{"us-central1": ["us-central1-a"]}'""",
        )
    clock = SystemClock()
    engine, notes = serving_side(settings)
    launch = GcpLaunch(
        project=settings.gcp_project, instance_template=settings.gcp_instance_template, zones=settings.gcp_zones
    )
    return Provider(
        name="gcp",
        provisioner=GcpProvisioner(launch),
        engine=engine,
        clock=clock,
        sleep=time.sleep,
        settle_s=60.0,
        supply=lambda resolved, snapshot: stated_supply(resolved, snapshot, settings.gcp_zones, clock),
        notes=("prices and supply are the scenario's: there is no source of GCP's own", *notes),
    )


def serving_side(settings: Settings) -> tuple[Engine, tuple[str, ...]]:
    """The gateway that the settings name, with its notes; without one, readiness is assumed, and the notes say so.

    Raises InputError for an address without a token, a token without an address, and a token that cannot be read.
    """
    url, token_file = settings.gateway_admin_url, settings.gateway_token_file
    if not url and token_file is None:
        return AssumedEngine(), (ASSUMED_NOTE,)
    if not url or token_file is None:
        raise InputError(
            "the gateway's admin side needs both its address and its token",
            where="CORAL_GATEWAY_ADMIN_URL, CORAL_GATEWAY_TOKEN_FILE",
            fix="set both, or none (then readiness is assumed)",
        )
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the admin token: {error}", where="CORAL_GATEWAY_TOKEN_FILE") from None
    if len(token) < 32 or not token.isascii() or not token.isprintable():
        raise InputError(
            "holds no admin token: at least 32 printable characters on one line",
            where=f"CORAL_GATEWAY_TOKEN_FILE: {token_file}",
        )
    return GatewayEngine(url=url.rstrip("/"), token=token), (f"readiness, weights and draining: the gateway at {url}",)


def _boto3(settings: Settings) -> AwsApi:
    """The API through boto3, which is no part of the base install and slow to import."""
    try:
        aws = importlib.import_module("coral_core.cloud.aws")
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed", where="provider aws", fix="pip install 'coral-serve[aws]'"
        ) from None
    return cast("AwsApi", aws.Boto3Api(profile=settings.aws_profile))


def rehearsal_zones() -> dict[str, tuple[str, ...]]:
    """Two zones in every region that any catalogue knows."""
    regions = {region for name in catalog_names() for region in load_catalog(name).regions}
    return {region: (f"{region}-x", f"{region}-y") for region in sorted(regions)}


def stated_supply(
    resolved: ResolvedScenario, snapshot: LibrarySnapshot, zones: Mapping[str, tuple[str, ...]], clock: Clock
) -> tuple[Sources, MaxAge]:
    """The scenario's own prices, and its supply in the first epoch."""
    columns = template_columns(scenario_templates(resolved, snapshot), [config.name for config in resolved.configs])
    available, price = available_nodes(resolved, columns)[0], node_prices(resolved)
    source, as_of = f"stated by scenario {resolved.scenario.name}", clock.now().astimezone(UTC)
    prices: dict[Offer, Reading[float]] = {}
    nodes: dict[Offer, int] = {}
    for r, region in enumerate(resolved.scenario.regions):
        for c, name in enumerate(resolved.offers):
            if not np.isnan(price[r, c]):
                offer = (region, *split_market(name))
                prices[offer] = _stated_price(resolved, offer, float(price[r, c]), source, as_of)
                nodes[offer] = int(available[r, c])
    stated = StatedSupply(prices=prices, nodes=nodes, zones_by_region=zones, source=source, clock=clock)
    return stated.sources(), STATED_AGES


def _stated_price(
    resolved: ResolvedScenario, offer: Offer, usd_per_h: float, source: str, now: datetime
) -> Reading[float]:
    """As old as the catalogue says; spot prices of a scenario carry one date for all."""
    known = resolved.catalog.prices.get(offer)
    date = known.as_of if known else resolved.spot.as_of if resolved.spot else now.date()
    return Reading(value=usd_per_h, source=source, as_of=datetime(date.year, date.month, date.day, tzinfo=UTC))
