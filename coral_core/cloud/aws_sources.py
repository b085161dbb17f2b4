"""What AWS says of supply: one small class for each kind of fact (`observe.Sources`), over the same API port.

Quota codes and pools: Service Quotas console of Amazon EC2, read 2026-11-29; families that are not in the table have no
known pool and make a gap.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coral_core.clock import Clock
from coral_core.cloud.aws_codes import AwsApi, AwsError, as_failure, pages
from coral_core.cloud.observe import Sources
from coral_core.cloud.supply import Reading
from coral_core.cloud.tags import read_tags
from coral_core.domain.fleet import FleetId, NodeTags
from coral_core.domain.hardware import Market

_POOLS: Final[tuple[tuple[str, Market, str], ...]] = (
    (r"(?:g|vt)\d", Market.ON_DEMAND, "L-DB2E81BA"),
    (r"(?:g|vt)\d", Market.SPOT, "L-3819A6DF"),
    (r"p\d", Market.ON_DEMAND, "L-417A185B"),
    (r"p[234]", Market.SPOT, "L-7212CCBC"),
    (r"p5", Market.SPOT, "L-C4BD4855"),
)
"""(instance types, market, quota code): running on-demand G and VT, all G and VT spot requests, on-demand P, ..."""

_PRICING_REGION: Final = "us-east-1"
"""The price list is served from few regions, for all."""


def aws_sources(api: AwsApi, clock: Clock) -> Sources:
    """All sources of supply on AWS."""
    return Sources(
        prices=AwsPrices(api, clock),
        spot=AwsSpotPrices(api, clock),
        offerings=AwsOfferings(api, clock),
        quotas=AwsQuotas(api, clock),
    )


class _Source:
    def __init__(self, api: AwsApi, clock: Clock) -> None:
        self._api, self._clock = api, clock

    def _all(self, service: str, region: str, operation: str, key: str, **parameters: Any) -> list[Any]:  # noqa: ANN401  # the API's own shapes
        try:
            return list(pages(self._api, service, region, operation, key, **parameters))
        except AwsError as error:
            raise as_failure(error, where=region) from error


class AwsPrices(_Source):
    """On-demand prices of Linux on shared hardware, from the Price List API."""

    def on_demand_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[float]]:
        """One query for each configuration; where the list names no price, or two different ones, it is left out."""
        found: dict[str, Reading[float]] = {}
        for config in configs:
            wish = {
                "instanceType": config,
                "regionCode": region,
                "operatingSystem": "Linux",
                "preInstalledSw": "NA",
                "tenancy": "Shared",
                "capacitystatus": "Used",
            }
            filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wish.items()]
            products = self._all(
                "pricing", _PRICING_REGION, "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters
            )
            prices = {price for product in products for price in _hourly_usd(json.loads(product))}
            if len(prices) == 1:
                source = "AWS Price List API"
                found[config] = Reading(value=prices.pop(), source=source, as_of=self._clock.now())
        return found


def _hourly_usd(product: Mapping[str, Any]) -> list[float]:
    """Positive hourly on-demand prices of a price list entry."""
    dimensions = [
        dimension
        for term in product.get("terms", {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
    ]
    prices = [float(d["pricePerUnit"]["USD"]) for d in dimensions if d["unit"] == "Hrs" and "USD" in d["pricePerUnit"]]
    return [price for price in prices if math.isfinite(price) and price > 0]


class AwsSpotPrices(_Source):
    """Current spot prices by zone."""

    def spot_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[tuple[str, str], Reading[float]]:
        """The last price of each (configuration, zone), valid now: a start time of now makes EC2 give just these."""
        now = self._clock.now()
        entries = self._all(
            "ec2",
            region,
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=list(configs),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=now,
        )
        latest: dict[tuple[str, str], Mapping[str, Any]] = {}
        for entry in entries:
            key = (entry["InstanceType"], entry["AvailabilityZone"])
            if key not in latest or entry["Timestamp"] > latest[key]["Timestamp"]:
                latest[key] = entry
        return {
            key: Reading(
                value=float(entry["SpotPrice"]),
                source=f"EC2 spot price history, unchanged since {entry['Timestamp']:%Y-%m-%d %H:%M}",
                as_of=now,
            )
            for key, entry in latest.items()
        }


class AwsOfferings(_Source):
    """Which zones sell a configuration. Offered is not available."""

    def zones(self, region: str, configs: Sequence[str]) -> Reading[Mapping[str, tuple[str, ...]]]:
        """Zones by configuration, sorted."""
        offers = self._all(
            "ec2",
            region,
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": list(configs)}],
        )
        zones = {c: tuple(sorted(o["Location"] for o in offers if o["InstanceType"] == c)) for c in configs}
        return Reading(value=zones, source="EC2 instance type offerings", as_of=self._clock.now())


class AwsQuotas(_Source):
    """vCPU quotas, what the account uses of them beside the fleet, and sizes."""

    def pool(self, config: str, market: Market) -> str | None:
        """The quota code that counts this instance type."""
        return next((code for kind, of, code in _POOLS if of is market and re.match(kind, config)), None)

    def vcpus(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[int]]:
        """Default vCPUs by instance type."""
        # A filter and not a list of types, which would fail as a whole for one that the region does not know.
        wish = [{"Name": "instance-type", "Values": list(configs)}]
        types = self._all("ec2", region, "describe_instance_types", "InstanceTypes", Filters=wish)
        return {
            found["InstanceType"]: Reading(
                value=int(found["VCpuInfo"]["DefaultVCpus"]), source="EC2 instance types", as_of=self._clock.now()
            )
            for found in types
        }

    def limit_vcpus(self, region: str) -> Mapping[str, Reading[float]]:
        """Applied quotas by code; a code that the account does not list is absent."""
        known = {code for _, _, code in _POOLS}
        quotas = self._all("service-quotas", region, "list_service_quotas", "Quotas", ServiceCode="ec2")
        return {
            quota["QuotaCode"]: Reading(value=float(quota["Value"]), source="Service Quotas", as_of=self._clock.now())
            for quota in quotas
            if quota["QuotaCode"] in known
        }

    def others_vcpus(self, fleet: FleetId, region: str) -> Reading[Mapping[str, int]]:
        """VCPUs of all pending and running instances that are not proven the fleet's, by quota code."""
        wish = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        others = [
            found
            for reservation in self._all("ec2", region, "describe_instances", "Reservations", Filters=wish)
            for found in reservation["Instances"]
            if isinstance(_tags(fleet, found, account=reservation["OwnerId"]), str)
        ]
        unsized = {found["InstanceType"] for found in others if "CpuOptions" not in found}
        sizes = self.vcpus(region, sorted(unsized)) if unsized else {}
        used: dict[str, int] = {}
        for found in others:
            market = Market.SPOT if found.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND
            pool = self.pool(found["InstanceType"], market)
            if pool:
                used[pool] = used.get(pool, 0) + _vcpus(found, sizes)
        return Reading(value=used, source="EC2 instances", as_of=self._clock.now())


def _tags(fleet: FleetId, found: Mapping[str, Any], *, account: str) -> NodeTags | str:
    tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
    return read_tags(fleet, tags, account=account, token=found.get("ClientToken", ""))


def _vcpus(found: Mapping[str, Any], sizes: Mapping[str, Reading[int]]) -> int:
    """What an instance counts: its own cores and threads, or the default of its type."""
    cpu = found.get("CpuOptions")
    return cpu["CoreCount"] * cpu["ThreadsPerCore"] if cpu else sizes[found["InstanceType"]].value
