"""Observe: the fleet's nodes in every region it has ever been in, and what can be had at which price now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import numpy as np

from artifacts.fleets import list_runs
from artifacts.library import LibrarySnapshot
from artifacts.store import Store
from coral_core.cloud.as_allocation import lower, pools_of, running_of
from coral_core.cloud.fleet_view import holdings
from coral_core.cloud.observe import observe_supply
from coral_core.cloud.ports import StartFailure
from coral_core.cloud.provisioner import Refusal
from coral_core.cloud.supply import Gap, OfferState, Reading, Supply, planning_arrays
from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.allocation import AllocationProblem
from coral_core.domain.fleet import FleetId, ForeignNode, Node, NodeState, Offer
from coral_core.domain.hardware import Market, Price, split_market
from coral_core.errors import DataGapError, ProvisionError
from tasks.providers import Provider

COOL_DOWN: Final = timedelta(seconds=1800)
"""How long a refusal of an earlier run is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a run has seen: the fleet (gone nodes included), what carries its name and is not ours, and the supply."""

    at: datetime
    fleet: FleetId
    regions: tuple[str, ...]
    nodes: tuple[Node, ...]
    foreign: tuple[ForeignNode, ...]
    supply: Supply

    @property
    def prices_usd_per_h(self) -> dict[Offer, float]:
        """Every price that is known."""
        return known_prices(self.supply)


def list_fleet(
    provider: Provider, fleet: FleetId, regions: Iterable[str]
) -> tuple[tuple[Node, ...], tuple[ForeignNode, ...]]:
    """All nodes of the fleet in these regions, and the foreign ones. Raises ProvisionError, CloudBusyError."""
    listings = [provider.patiently(partial(provider.provisioner.describe, fleet, region)) for region in regions]
    nodes = tuple(node for listing in listings for node in listing.nodes)
    return nodes, tuple(node for listing in listings for node in listing.foreign)


def observe(
    provider: Provider,
    store: Store,
    fleet: str,
    resolved: ResolvedScenario,
    snapshot: LibrarySnapshot,
    *,
    regions: Iterable[str],
) -> Observation:
    """List the fleet in `regions` and the scenario's, and ask for the supply of the scenario's offers.

    Raises ProvisionError for what no repetition mends, DataGapError where nothing at all is known of any offer.
    """
    identity = FleetId(name=fleet, account=provider.patiently(provider.provisioner.account))
    everywhere = tuple(sorted({*regions, *resolved.scenario.regions}))
    nodes, foreign = list_fleet(provider, identity, everywhere)
    sources, max_age = provider.supply(resolved, snapshot)
    now = provider.clock.now()
    supply = observe_supply(
        sources,
        identity,
        regions=resolved.scenario.regions,
        configs=[config.name for config in resolved.configs],
        markets=sorted({split_market(name)[1] for name in resolved.offers}),
        held=holdings(nodes),
        failures=recent_failures(store, fleet, now=now),
        now=now,
        sleep=provider.sleep,
        max_age=replace(max_age, cool_down_s=COOL_DOWN.total_seconds()),
    )
    if supply.offers and len(supply.gaps) == len(supply.offers):
        (region, config, market), gaps = min(supply.gaps.items())
        raise DataGapError(
            f"nothing is known of any offer; for {config} ({market}): {'; '.join(map(str, gaps))}",
            where=region,
            fix="see that the provider's prices, offerings and quotas can be read",
        )
    return Observation(at=now, fleet=identity, regions=everywhere, nodes=nodes, foreign=foreign, supply=supply)


def observed_problem(
    problem: AllocationProblem,
    seen: Observation,
    *,
    lowered: Mapping[Offer, int],
    max_usd_per_h: float,
) -> AllocationProblem:
    """The scenario's problem with observed prices, availability, shared quotas and running fleet, within the limit of cost.

    What an exclusion of the scenario forbids stays forbidden. Raises DataGapError where something is not known of nodes
    that run.
    """
    columns = [split_market(name) for name in problem.configs]
    arrays = planning_arrays(seen.supply, problem.regions, columns, leave_out_gaps=True)
    arrays = lower(arrays, problem.regions, columns, lowered)
    budget = problem.options.budget_usd_per_h
    limit = min(math.inf if budget is None else budget, max_usd_per_h)
    return replace(
        problem,
        available=np.where(np.isnan(arrays.price_usd_per_h), 0, arrays.available),
        price_usd_per_h=arrays.price_usd_per_h,
        running=tuple(r for r in running_of(seen.nodes) if r.region in problem.regions),
        pools=pools_of(seen.supply, problem.regions, columns),
        options=replace(problem.options, budget_usd_per_h=None if math.isinf(limit) else limit),
    )


def with_observed_prices(resolved: ResolvedScenario, supply: Supply) -> ResolvedScenario:
    """The scenario whose catalogue and spot market hold the observed prices, so that records and notes name these."""
    everything = {
        offer: Price(
            config=offer[1],
            region=offer[0],
            market=offer[2],
            price_usd_per_h=state.price_usd_per_h.value,
            source=state.price_usd_per_h.source,
            as_of=state.price_usd_per_h.as_of.date(),
        )
        for offer, state in supply.offers.items()
        if isinstance(state.price_usd_per_h, Reading)
    }
    observed = {offer: price for offer, price in everything.items() if offer[2] is Market.ON_DEMAND}
    spot = [price for offer, price in everything.items() if offer[2] is Market.SPOT]
    if resolved.spot is not None and spot:
        sources, as_of = tuple(sorted({price.source for price in spot})), min(price.as_of for price in spot)
        resolved = replace(resolved, spot=replace(resolved.spot, sources=sources, as_of=as_of))
    return replace(resolved, catalog=replace(resolved.catalog, prices=observed)) if observed else resolved


def known_prices(supply: Supply) -> dict[Offer, float]:
    """USD/h of every offer whose price is known."""
    return {
        offer: state.price_usd_per_h.value
        for offer, state in supply.offers.items()
        if isinstance(state.price_usd_per_h, Reading)
    }


def cost_usd_per_h(nodes: Iterable[Node], prices: Mapping[Offer, float]) -> float | None:
    """What the nodes that are paid for cost at these prices; None where one's price is not known."""
    paid = [n for n in nodes if n.state not in {NodeState.ENDING, NodeState.GONE}]
    each = [prices.get((n.region, n.tags.config, n.market)) for n in paid]
    return None if None in each else math.fsum(price for price in each if price is not None)


def zones_of(supply: Supply) -> dict[Offer, tuple[str, ...]]:
    """Zones of each offer, best first."""
    return {offer: state.zones for offer, state in supply.offers.items()}


def recent_failures(store: Store, fleet: str, *, now: datetime) -> list[StartFailure]:
    """Refusals that the fleet's runs met within the cool-down."""
    # A run that began earlier may have been refused since; none lasts longer than a cool-down besides.
    runs = list_runs(store, fleet, since=now - 2 * COOL_DOWN)
    return [
        failure
        for run in runs
        if run.result is not None
        for item in run.result.failures
        if (failure := _failure(item)).at >= now - COOL_DOWN
    ]


def supply_document(supply: Supply) -> dict[str, Any]:
    """Supply as JSON values: every figure with its source and age, every gap with its reason."""
    return {
        "as_of": supply.as_of.isoformat(),
        "offers": [_offer(offer, state) for offer, state in sorted(supply.offers.items())],
        "pools": [{"region": pool.region, "pool": pool.pool, "free_vcpus": pool.free_vcpus} for pool in supply.pools],
    }


def gap_lines(supply: Supply) -> list[str]:
    """What is not known, one line each."""
    return [
        f"{config} ({market}) in {region} is left out: {gap}"
        for (region, config, market), gaps in sorted(supply.gaps.items())
        for gap in gaps
    ]


def foreign_lines(foreign: Sequence[ForeignNode]) -> list[str]:
    """Nodes with the fleet's name that are not ours, one line each."""
    return [
        f"{node.node_id} in {node.region} carries the fleet's name and {node.reason}: left alone" for node in foreign
    ]


def account_of(provider: Provider, fleet: str, known: str | None) -> FleetId:
    """The fleet under the account of the credentials. Raises ProvisionError where it is known to be another's."""
    account = provider.patiently(provider.provisioner.account)
    if known is not None and account != known:
        raise ProvisionError(
            f"the credentials belong to account {account}, the fleet to {known}",
            where=f"fleet {fleet}",
            fix="use the fleet's own credentials (profile, role)",
        )
    return FleetId(name=fleet, account=account)


def _offer(offer: Offer, state: OfferState) -> dict[str, Any]:
    region, config, market = offer
    facts = {"available": state.available, "price_usd_per_h": state.price_usd_per_h}
    return {
        "region": region,
        "config": config,
        "market": market.value,
        "held": state.held,
        "zones": list(state.zones),
        **{name: None if isinstance(fact, Gap) else fact.value for name, fact in facts.items()},
        **{f"{name}_source": str(fact) if isinstance(fact, Gap) else fact.source for name, fact in facts.items()},
        **{f"{name}_as_of": None if isinstance(fact, Gap) else fact.as_of.isoformat() for name, fact in facts.items()},
    }


def _failure(item: Mapping[str, Any]) -> StartFailure:
    return StartFailure(
        **{
            **item,
            "at": datetime.fromisoformat(item["at"]),
            "market": Market(item["market"]),
            "refusal": Refusal(item["refusal"]),
        }
    )
