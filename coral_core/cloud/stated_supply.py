"""Supply as stated and not observed: a catalogue's prices and a table of nodes.

For rehearsals, and for a cloud whose own sources are not there yet. Every reading says that it is stated, and how old.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time

from coral_core.clock import Clock
from coral_core.cloud.observe import MaxAge, Sources
from coral_core.cloud.supply import Reading
from coral_core.domain.fleet import FleetId
from coral_core.domain.hardware import Catalog, Market

STATED_AGES = MaxAge(
    price_s=math.inf, spot_s=math.inf, offering_s=math.inf, quota_s=math.inf, use_s=math.inf, cool_down_s=1800.0
)
"""A statement does not go stale by itself; a refusal is believed as long as anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSupply:
    """All four kinds of source. `nodes[region, config]` can be had; absent is none."""

    catalog: Catalog
    nodes: Mapping[tuple[str, str], int]
    zones_by_region: Mapping[str, Sequence[str]]
    clock: Clock

    def sources(self) -> Sources:
        """This, as every kind of source."""
        return Sources(prices=self, spot=self, offerings=self, quotas=self)

    def on_demand_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[float]]:
        """The catalogue's on-demand prices."""
        return {config: reading for config in configs if (reading := self._price(region, config, Market.ON_DEMAND))}

    def spot_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[tuple[str, str], Reading[float]]:
        """The catalogue's spot prices, the same in every zone."""
        return {
            (config, zone): reading
            for config in configs
            if (reading := self._price(region, config, Market.SPOT))
            for zone in self.zones_by_region.get(region, ())
        }

    def zones(self, region: str, configs: Sequence[str]) -> Reading[Mapping[str, tuple[str, ...]]]:
        """Every zone of the region, for a configuration that has a price there."""
        everywhere = tuple(self.zones_by_region.get(region, ()))
        sold = {c: any((region, c, market) in self.catalog.prices for market in Market) for c in configs}
        zones = {config: everywhere if sold[config] else () for config in configs}
        return Reading(value=zones, source=f"catalogue {self.catalog.name}, not observed", as_of=self.clock.now())

    def pool(self, config: str, market: Market) -> str | None:  # noqa: ARG002  # the port's
        """A pool of its own for each configuration, whatever the market."""
        return f"nodes of {config}"

    def vcpus(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[int]]:  # noqa: ARG002  # the port's
        """Counted in nodes: one each."""
        return {config: Reading(value=1, source="stated", as_of=self.clock.now()) for config in configs}

    def limit_vcpus(self, region: str) -> Mapping[str, Reading[float]]:
        """Nodes by configuration."""
        return {
            f"nodes of {config}": Reading(value=float(count), source="stated by the scenario", as_of=self.clock.now())
            for (where, config), count in self.nodes.items()
            if where == region
        }

    def others_vcpus(self, fleet: FleetId, region: str) -> Reading[Mapping[str, int]]:  # noqa: ARG002  # the port's
        """What is stated is for this fleet alone."""
        return Reading(value={}, source="stated", as_of=self.clock.now())

    def _price(self, region: str, config: str, market: Market) -> Reading[float] | None:
        price = self.catalog.prices.get((region, config, market))
        if price is None:
            return None
        as_of = datetime.combine(price.as_of, time(), UTC)
        return Reading(value=price.price_usd_per_h, source=f"catalogue, not observed: {price.source}", as_of=as_of)
