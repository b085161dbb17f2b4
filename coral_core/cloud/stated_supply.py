"""Supply as stated and not observed: prices and nodes by offer, from a scenario.

For rehearsals, and for a cloud whose own sources are not there yet. Every reading says that it is stated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coral_core.clock import Clock
from coral_core.cloud.observe import MaxAge, Sources
from coral_core.cloud.supply import Reading
from coral_core.domain.fleet import FleetId, Offer
from coral_core.domain.hardware import Market

STATED_AGES: Final = MaxAge(price_s=math.inf, spot_s=math.inf, offering_s=math.inf, quota_s=math.inf, use_s=math.inf)
"""A statement does not go stale by itself; a refusal is believed as long as anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSupply:
    """All four kinds of source. An offer without a price is not sold; `nodes` that are absent are none."""

    prices: Mapping[Offer, Reading[float]]
    nodes: Mapping[Offer, int]
    zones_by_region: Mapping[str, Sequence[str]]
    source: str
    clock: Clock

    def sources(self) -> Sources:
        """This, as every kind of source."""
        return Sources(prices=self, spot=self, offerings=self, quotas=self)

    def on_demand_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[float]]:
        """Stated on-demand prices."""
        offers = {config: (region, config, Market.ON_DEMAND) for config in configs}
        return {config: self.prices[offer] for config, offer in offers.items() if offer in self.prices}

    def spot_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[tuple[str, str], Reading[float]]:
        """Stated spot prices, the same in every zone."""
        offers = {config: (region, config, Market.SPOT) for config in configs}
        return {
            (config, zone): self.prices[offer]
            for config, offer in offers.items()
            if offer in self.prices
            for zone in self.zones_by_region.get(region, ())
        }

    def zones(self, region: str, configs: Sequence[str]) -> Reading[Mapping[str, tuple[str, ...]]]:
        """Every zone of the region, for a configuration that has a price there."""
        everywhere = tuple(self.zones_by_region.get(region, ()))
        sold = {c: any((region, c, market) in self.prices for market in Market) for c in configs}
        return Reading(
            value={config: everywhere if sold[config] else () for config in configs},
            source=self.source,
            as_of=self.clock.now(),
        )

    def pool(self, config: str, market: Market) -> str | None:
        """A pool of its own for each offer of a region."""
        return f"{config} {market}"

    def vcpus(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[int]]:  # noqa: ARG002  # the port's
        """Counted in nodes: one each."""
        return {config: Reading(value=1, source=self.source, as_of=self.clock.now()) for config in configs}

    def limit_vcpus(self, region: str) -> Mapping[str, Reading[float]]:
        """Nodes of every offer; 0 where none is stated."""
        return {
            f"{config} {market}": Reading(
                value=float(self.nodes.get((where, config, market), 0)), source=self.source, as_of=self.clock.now()
            )
            for where, config, market in {*self.prices, *self.nodes}
            if where == region
        }

    def others_vcpus(self, fleet: FleetId, region: str) -> Reading[Mapping[str, int]]:  # noqa: ARG002  # the port's
        """What is stated is for this fleet alone."""
        return Reading(value={}, source=self.source, as_of=self.clock.now())
