"""Observe supply: ask narrow sources, one per kind of fact, and derive A_r(c) and p_r(c) from what they say.

For an offer (region r, configuration c, market):
    A = max(held, floor((quota - used by others) / vCPUs of c)); 0 where no zone sells c;
        while a refusal cools down, at most max(held, nodes held when it was refused).
`held` counts our own nodes, which A includes (DESIGN 3.6). A refusal for want of capacity lowers A only when every zone
that sells c has refused. Offers of one quota pool share it: `PoolLimit` says how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import product
from typing import Protocol, TypeVar

from coral_core.cloud.ports import StartFailure
from coral_core.cloud.provisioner import CloudBusyError, Refusal
from coral_core.cloud.supply import Gap, GapKind, OfferState, PoolLimit, Reading, Supply
from coral_core.domain.fleet import FleetId, Offer
from coral_core.domain.hardware import Market
from coral_core.errors import CoralError

Value = TypeVar("Value")


class PriceSource(Protocol):
    """On-demand prices."""

    def on_demand_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[float]]:
        """USD/h by configuration; those not sold or not known are absent."""
        ...


class SpotSource(Protocol):
    """Spot prices."""

    def spot_usd_per_h(self, region: str, configs: Sequence[str]) -> Mapping[tuple[str, str], Reading[float]]:
        """USD/h by (configuration, zone), now."""
        ...


class OfferingSource(Protocol):
    """What is sold where."""

    def zones(self, region: str, configs: Sequence[str]) -> Reading[Mapping[str, tuple[str, ...]]]:
        """Zones that sell each configuration; () for one that is not sold in the region."""
        ...


class QuotaSource(Protocol):
    """The account's limits, in vCPUs of a pool of instance families."""

    def pool(self, config: str, market: Market) -> str | None:
        """The pool that a configuration counts in; None where it is not known."""
        ...

    def vcpus(self, region: str, configs: Sequence[str]) -> Mapping[str, Reading[int]]:
        """VCPUs of one node."""
        ...

    def limit_vcpus(self, region: str) -> Mapping[str, Reading[float]]:
        """Limit by pool."""
        ...

    def others_vcpus(self, fleet: FleetId, region: str) -> Reading[Mapping[str, int]]:
        """VCPUs by pool that machines of the account use which are not the fleet's (a pool without any may be absent)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where each kind of fact comes from."""

    prices: PriceSource
    spot: SpotSource
    offerings: OfferingSource
    quotas: QuotaSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxAge:
    """Older readings are gaps."""

    price_s: float = 7 * 86400.0
    spot_s: float = 3600.0
    offering_s: float = 7 * 86400.0
    quota_s: float = 86400.0
    use_s: float = 900.0
    cool_down_s: float = 1800.0
    """How long a refusal is believed."""


def observe_supply(
    sources: Sources,
    fleet: FleetId,
    *,
    regions: Sequence[str],
    configs: Sequence[str],
    markets: Sequence[Market],
    held: Mapping[Offer, int],
    failures: Iterable[StartFailure],
    now: datetime,
    sleep: Callable[[float], None],
    max_age: MaxAge | None = None,
) -> Supply:
    """Ask every source about the offers of these regions, configurations and markets and about all that is held.

    What is held and no longer planned with needs a price too, or nothing could be started beside it (`Budget`). A busy
    source is asked up to three times; one that fails makes gaps of what it should have said, with its reason.
    """
    ages = max_age or MaxAge()
    recent = [f for f in failures if now - f.at <= timedelta(seconds=ages.cool_down_s)]
    offers: dict[Offer, OfferState] = {}
    pools: list[PoolLimit] = []
    asked = dict.fromkeys([*product(regions, configs, markets), *sorted(held)])
    for region in dict.fromkeys(region for region, _, _ in asked):
        here = [(config, market) for place, config, market in asked if place == region]
        of = list(dict.fromkeys(config for config, _ in here))
        view = _RegionView(sources, fleet, region, of, now=now, ages=ages, held=held, recent=recent, sleep=sleep)
        offers |= {(region, config, market): view.state(config, market) for config, market in here}
        pools += view.pools(here)
    return Supply(as_of=now, offers=offers, pools=tuple(pools))


def _asked(call: Callable[[], Value], sleep: Callable[[float], None]) -> tuple[Value | None, str]:
    """The answer of a source, or None and why there is none."""
    for pause_s in (1.0, 3.0, None):
        try:
            return call(), ""
        except CoralError as error:
            if pause_s is None or not isinstance(error, CloudBusyError):
                return None, str(error)
            sleep(pause_s)
    raise AssertionError("the last attempt returns")


class _UnknownError(Exception):
    """Carries a gap to where it is stated; never leaves this module."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(gap)
        self.gap = gap


def _or_gap(call: Callable[[], Reading[Value]]) -> Reading[Value] | Gap:
    try:
        return call()
    except _UnknownError as error:
        return error.gap


class _RegionView:
    """The facts of one region, each asked for once."""

    def __init__(
        self,
        sources: Sources,
        fleet: FleetId,
        region: str,
        configs: Sequence[str],
        *,
        now: datetime,
        ages: MaxAge,
        held: Mapping[Offer, int],
        recent: Sequence[StartFailure],
        sleep: Callable[[float], None],
    ) -> None:
        self.region, self.now, self.ages, self.held, self.recent = region, now, ages, held, recent
        self.quotas = sources.quotas
        price, self.price_fault = _asked(lambda: sources.prices.on_demand_usd_per_h(region, configs), sleep)
        spot, self.spot_fault = _asked(lambda: sources.spot.spot_usd_per_h(region, configs), sleep)
        size, self.size_fault = _asked(lambda: sources.quotas.vcpus(region, configs), sleep)
        limit, self.limit_fault = _asked(lambda: sources.quotas.limit_vcpus(region), sleep)
        self.price, self.spot, self.size, self.limit = price or {}, spot or {}, size or {}, limit or {}
        self.sold, self.sold_fault = _asked(lambda: sources.offerings.zones(region, configs), sleep)
        self.others, self.others_fault = _asked(lambda: sources.quotas.others_vcpus(fleet, region), sleep)

    def state(self, config: str, market: Market) -> OfferState:
        """Availability, price and zones of one offer."""
        sold = self.sold.value.get(config, ()) if self.sold else ()
        return OfferState(
            available=_or_gap(lambda: self._available(config, market)),
            price_usd_per_h=_or_gap(lambda: self._price(config, market, sold)),
            zones=self._best_first(config, market, sold),
            held=self._held(config, market),
        )

    def pools(self, offers: Iterable[tuple[str, Market]]) -> list[PoolLimit]:
        """The quota pools of which all is known."""
        members: dict[str, dict[Offer, int]] = {}
        for config, market in offers:
            pool = self.quotas.pool(config, market)
            if pool is not None and config in self.size:
                members.setdefault(pool, {})[self.region, config, market] = self.size[config].value
        free = {pool: _or_gap(partial(self._free_vcpus, pool)) for pool in sorted(members)}
        return [
            PoolLimit(region=self.region, pool=pool, free_vcpus=reading.value, vcpus=members[pool])
            for pool, reading in free.items()
            if isinstance(reading, Reading)
        ]

    def _held(self, config: str, market: Market) -> int:
        return self.held.get((self.region, config, market), 0)

    def _available(self, config: str, market: Market) -> Reading[int]:
        what = f"availability of {config}"
        offered = self._fresh("offerings", self.sold, self.ages.offering_s, self.sold_fault)
        held = self._held(config, market)
        if config not in offered.value:
            raise _UnknownError(Gap(what=what, kind=GapKind.MISSING, reason=f"{offered.source} says nothing of it"))
        if not offered.value[config]:
            return Reading(value=held, source=f"{offered.source}: no zone sells it", as_of=offered.as_of)
        pool = self.quotas.pool(config, market)
        if pool is None:
            raise _UnknownError(Gap(what=what, kind=GapKind.MISSING, reason="no quota pool is known for it"))
        free = self._free_vcpus(pool)
        size = self._fresh(f"vCPUs of {config}", self.size.get(config), self.ages.offering_s, self.size_fault)
        # Beyond a quota that was lowered nothing can be swapped: what is to take the place of a node would be refused.
        over = free.value < self._held_vcpus(pool)
        nodes = held if over else max(held, math.floor(free.value / size.value))
        refused = self._refused(config, market, offered.value[config])
        if refused is not None and max(held, refused.held) < nodes:
            source = f"refused at {refused.at:%H:%M} UTC ({refused.code}), believed for {self.ages.cool_down_s:.0f} s"
            return Reading(value=max(held, refused.held), source=source, as_of=refused.at)
        as_of = min(free.as_of, size.as_of, offered.as_of)
        return Reading(value=nodes, source=f"{free.source}, {size.value} vCPUs each", as_of=as_of)

    def _held_vcpus(self, pool: str) -> int:
        """What the fleet's own nodes take of a pool, as far as their sizes are known."""
        return sum(
            self.size[config].value * nodes
            for (region, config, market), nodes in self.held.items()
            if region == self.region and config in self.size and self.quotas.pool(config, market) == pool
        )

    def _free_vcpus(self, pool: str) -> Reading[float]:
        """What is left of a pool for us, our own use included."""
        limit = self._fresh(f"quota {pool}", self.limit.get(pool), self.ages.quota_s, self.limit_fault)
        others = self._fresh("use of quotas by others", self.others, self.ages.use_s, self.others_fault)
        used = others.value.get(pool, 0)
        source = f"{limit.source}: {limit.value:g} vCPUs in {pool}, {used} used by others"
        return Reading(value=limit.value - used, source=source, as_of=min(limit.as_of, others.as_of))

    def _refused(self, config: str, market: Market, sold: Sequence[str]) -> StartFailure | None:
        """The refusal that bounds an offer: the latest for quota, or the mildest where every zone refused."""
        mine = [f for f in self.recent if f.offer == (self.region, config, market)]
        quota = [f for f in mine if f.refusal is Refusal.QUOTA]
        if quota:
            return max(quota, key=lambda f: f.at)
        if set(sold) <= {f.zone for f in mine}:
            return max(mine, key=lambda f: f.held)
        return None

    def _price(self, config: str, market: Market, sold: Sequence[str]) -> Reading[float]:
        """The on-demand price, or the spot price of the zone that a start is tried in first."""
        what = f"{market} price of {config}"
        if market is Market.ON_DEMAND:
            return self._fresh(what, self.price.get(config), self.ages.price_s, self.price_fault)
        priced = [zone for zone in sold if (config, zone) in self.spot]
        willing = [zone for zone in priced if zone not in self._refusing(config, market)] or priced
        readings = [self.spot[config, zone] for zone in willing]
        young = [reading for reading in readings if self._age_s(reading) <= self.ages.spot_s]
        cheapest = min(young or readings, key=lambda reading: reading.value, default=None)
        return self._fresh(what, cheapest, self.ages.spot_s, self.spot_fault)

    def _best_first(self, config: str, market: Market, sold: Sequence[str]) -> tuple[str, ...]:
        refused = self._refusing(config, market)

        def rank(zone: str) -> tuple[bool, float, str]:
            price = self.spot.get((config, zone)) if market is Market.SPOT else None
            return (zone in refused, price.value if price else math.inf, zone)

        return tuple(sorted(sold, key=rank))

    def _refusing(self, config: str, market: Market) -> set[str]:
        """Zones that lately refused an offer."""
        return {f.zone for f in self.recent if f.offer == (self.region, config, market)}

    def _age_s(self, reading: Reading[Value]) -> float:
        return (self.now - reading.as_of).total_seconds()

    def _fresh(self, what: str, reading: Reading[Value] | None, max_age_s: float, fault: str) -> Reading[Value]:
        """The reading; _UnknownError where there is none, it is too old, or no number that can be meant."""
        kind, reason = GapKind.MISSING, ""
        if reading is None:
            reason = fault or f"no source says so for {self.region}"
        elif self._age_s(reading) > max_age_s:
            kind = GapKind.STALE
            reason = f"{reading.source} of {reading.as_of:%Y-%m-%d %H:%M} is older than {max_age_s:.0f} s"
        elif isinstance(reading.value, int | float) and not (math.isfinite(reading.value) and reading.value >= 0):
            reason = f"{reading.source} says {reading.value}"
        if reading is None or reason:
            raise _UnknownError(Gap(what=what, kind=kind, reason=reason))
        return reading
