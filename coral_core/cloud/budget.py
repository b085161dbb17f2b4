"""Room under a fleet's limits, and the check that a plan fits them at all. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from coral_core.cloud.fleet_view import holdings
from coral_core.domain.fleet import FleetLimits, FleetPlan, Node, Offer
from coral_core.errors import DataGapError, InputError, ProvisionError

_USD_SLACK = 1e-9
"""Sums of the same prices in another order differ by rounding."""


class Budget:
    """What is held, counted against the limits; a start reserves, a stop frees.

    A held node without a known price leaves no room under the limit of USD/h: unknown is never zero.
    """

    def __init__(self, limits: FleetLimits, held: Mapping[Offer, int]) -> None:
        self._limits = limits
        self._held: Counter[Offer] = Counter(held)

    def copy(self) -> Budget:
        """An independent budget with the same holdings."""
        return Budget(self._limits, self._held)

    def take(self, nodes: Mapping[Offer, int]) -> None:
        """Count `nodes` as held."""
        self._held.update(nodes)

    def free(self, nodes: Iterable[Node]) -> None:
        """Count `nodes` as no longer held."""
        self._held.subtract(holdings(nodes))

    def lacks(self, wish: Mapping[Offer, int]) -> tuple[str, frozenset[Offer] | None]:
        """Why `wish` does not fit beside what is held, and the offers whose release would help (None: any offer).

        ("", frozenset()) where it fits.
        """
        short = [
            offer
            for offer, count in sorted(wish.items())
            if self._held[offer] + count > self._limits.max_by_offer.get(offer, math.inf)
        ]
        if short:
            region, config, market = short[0]
            bound = self._limits.max_by_offer[short[0]]
            return f"{bound} nodes of {config} ({market}) in {region} are all there is", frozenset(short)
        if self._held.total() + sum(wish.values()) > self._limits.max_nodes:
            return f"the limit of {self._limits.max_nodes} nodes", None
        if math.isinf(self._limits.max_usd_per_h):
            return "", frozenset()
        unpriced = [o for o, count in self._held.items() if count > 0 and o not in self._limits.price_usd_per_h]
        if unpriced:
            region, config, market = min(unpriced)
            return f"the price of a running {config} ({market}) in {region} is not known", frozenset(unpriced)
        cost_usd_per_h = self._cost_usd_per_h(self._held) + self._cost_usd_per_h(wish)
        if cost_usd_per_h > self._limits.max_usd_per_h + _USD_SLACK:
            return f"the limit of {self._limits.max_usd_per_h:g} USD/h", None
        return "", frozenset()

    def _cost_usd_per_h(self, nodes: Mapping[Offer, int]) -> float:
        price = self._limits.price_usd_per_h
        return math.fsum(price[offer] * count for offer, count in nodes.items() if count > 0)


def check_plan(plan: FleetPlan, limits: FleetLimits) -> None:
    """Raise unless the plan is well-formed and its whole fleet fits the limits.

    InputError for bad numbers and repeated entries, DataGapError where a price is missing, ProvisionError for a plan
    beyond a limit.
    """
    _check_limits(limits)
    seen = set()
    for index, wanted in enumerate(plan.wanted):
        where = f"wanted[{index}]"
        key = (wanted.spec.template_id, wanted.region, wanted.market)
        if key in seen:
            raise InputError(f"template {key[0]} in {key[1]} ({key[2]}) is named twice", where=where)
        seen.add(key)
        if wanted.count < 0 or not wanted.spec.slots:
            raise InputError("a count below 0, or a template without nodes", where=where)
        if not (math.isfinite(wanted.spec.throughput) and wanted.spec.throughput > 0):
            raise InputError(f"throughput {wanted.spec.throughput} is not a positive number", where=where)
    total: Counter[Offer] = Counter()
    for wanted in plan.wanted:
        for config, nodes in wanted.spec.combination.items():
            total[wanted.region, config, wanted.market] += nodes * wanted.count
    total = +total
    for region, config, market in sorted(total):
        if (region, config, market) not in limits.price_usd_per_h:
            raise DataGapError(
                f"no price of {config} ({market}) in {region}", where=f"plan {plan.plan_id}", fix="observe prices again"
            )
    reason, _ = Budget(limits, {}).lacks(total)
    if reason:
        raise ProvisionError(
            f"the plan passes {reason}",
            where=f"plan {plan.plan_id}",
            fix="raise the fleet's limits, or plan with less demand",
        )


def _check_limits(limits: FleetLimits) -> None:
    if limits.max_nodes < 0:
        raise InputError(f"max_nodes is {limits.max_nodes}", where="limits", fix="give a number of at least 0")
    if math.isnan(limits.max_usd_per_h) or limits.max_usd_per_h < 0:
        raise InputError(f"max_usd_per_h is {limits.max_usd_per_h}", where="limits", fix="give a number of at least 0")
    for (region, config, market), price_usd_per_h in limits.price_usd_per_h.items():
        if not (math.isfinite(price_usd_per_h) and price_usd_per_h >= 0):
            raise InputError(f"price {price_usd_per_h} USD/h", where=f"limits.{region}.{config}.{market}")
    for (region, config, market), bound in limits.max_by_offer.items():
        if bound < 0:
            raise InputError(f"availability {bound}", where=f"limits.{region}.{config}.{market}")
