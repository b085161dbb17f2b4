"""The spot market of a scenario: offers of its configurations, and templates on spot nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.catalog.spot import SpotFact, load_spot
from coral_core.config.market_spec import SpotDefault, SpotOffer, SpotSpec
from coral_core.domain.allocation import TemplateColumns
from coral_core.domain.hardware import Market, market_name
from coral_core.errors import DataGapError, unknown_name

HOURS_PER_MONTH: Final = 730.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotMarket:
    """What is to be had on the spot market: (R, K) prices (NaN where none) and nodes (0 there) of K configurations.

    `configs` are the plain names, in the scenario's order, of those that one region at least offers.
    `interruptions_per_h` of one node by (region, configuration), where it is known.
    """

    configs: tuple[str, ...]
    price_usd_per_h: NDArray[np.float64]
    nodes: NDArray[np.int64]
    interruptions_per_h: Mapping[tuple[str, str], float]
    sources: tuple[str, ...]
    as_of: date

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations' names in the spot market."""
        return tuple(market_name(name, Market.SPOT) for name in self.configs)

    def losses_per_h(self, region: str, nodes: Mapping[str, int]) -> float | None:
        """How often one of these nodes (plain names) is taken back; None where that is not known of each of them."""
        rates = [self.interruptions_per_h.get((region, name), math.nan) * count for name, count in nodes.items()]
        total = math.fsum(rates)
        return None if math.isnan(total) else total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    price_usd_per_h: float
    nodes: int
    interruptions_per_h: float | None
    source: str
    as_of: date


def spot_market(
    spec: SpotSpec,
    *,
    catalog: str,
    regions: Sequence[str],
    configs: Sequence[str],
    on_demand_usd_per_h: NDArray[np.float64],
) -> SpotMarket:
    """Look up what `spec` offers of `configs` in `regions`; `on_demand_usd_per_h` is (R, C), NaN where not sold.

    A price of its own wins over the catalogue's discount, and that over the default. Raises InputError for unknown
    names, DataGapError where nothing is offered at all.
    """
    _check_names(spec, regions, configs)
    facts = load_spot(catalog) if spec.from_catalog else {}
    found: dict[tuple[str, str], _Found] = {}
    for c, config in enumerate(configs):
        for r, region in enumerate(regions):
            offer = spec.configs.get(config)
            fact = facts.get((region, config))
            base = float(on_demand_usd_per_h[r, c])
            one = None
            if offer is not None:
                one = _priced(offer, region, base, spec.nodes)
            elif fact is not None and not math.isnan(base):
                one = _of_fact(fact, base, spec.nodes)
            elif spec.default is not None:
                one = _found(spec.default, region, base * spec.default.price_frac, spec.nodes)
            if one is not None:
                found[region, config] = one
    if not found:
        raise DataGapError(
            f"no spot price is known of these configurations in {', '.join(regions)}",
            where="spot",
            fix="name prices in spot.configs or spot.default",
        )
    offered = tuple(config for config in configs if any(name == config for _, name in found))

    def table(value: Callable[[_Found], float], missing: float) -> NDArray[np.float64]:
        rows = [[found.get((region, config)) for config in offered] for region in regions]
        return np.array([[missing if one is None else value(one) for one in row] for row in rows])

    return SpotMarket(
        configs=offered,
        price_usd_per_h=table(lambda one: one.price_usd_per_h, math.nan),
        nodes=table(lambda one: one.nodes, 0).astype(np.int64),
        interruptions_per_h={
            key: one.interruptions_per_h for key, one in found.items() if one.interruptions_per_h is not None
        },
        sources=tuple(sorted({one.source for one in found.values()})),
        as_of=min(one.as_of for one in found.values()),
    )


def with_spot_twins(templates: TemplateColumns, configs: Sequence[str], spot_configs: Sequence[str]) -> TemplateColumns:
    """The templates, and after them each once more on spot nodes, where all its configurations are offered there.

    `templates.nodes` is (n, C) over `configs`; the result's is (n + twins, C + K), with the K spot configurations of
    `spot_configs` (plain names) last. A twin has the market in its id; the library knows neither.
    """
    index = [configs.index(name) for name in spot_configs]
    others = np.setdiff1d(np.arange(len(configs)), index)
    twins = np.flatnonzero(~templates.nodes[:, others].any(axis=1)) if index else np.zeros(0, dtype=np.int64)
    some = twins.tolist()
    n, k = len(templates), len(index)
    nodes = np.zeros((n + len(some), len(configs) + k), dtype=np.int64)
    nodes[:n, : len(configs)] = templates.nodes
    nodes[n:, len(configs) :] = templates.nodes[twins][:, index]
    return TemplateColumns(
        ids=(*templates.ids, *(market_name(templates.ids[t], Market.SPOT) for t in some)),
        models=(*templates.models, *(templates.models[t] for t in some)),
        phases=(*templates.phases, *(templates.phases[t] for t in some)),
        nodes=nodes,
        throughput=np.concatenate((templates.throughput, templates.throughput[twins])),
        variants=None if templates.variants is None else (*templates.variants, *(templates.variants[t] for t in some)),
    )


def _check_names(spec: SpotSpec, regions: Sequence[str], configs: Sequence[str]) -> None:
    for config, offer in spec.configs.items():
        where = f"spot.configs.{config}"
        if config not in configs:
            raise unknown_name("configuration in the scenario", config, configs, where=where)
        _check_regions(offer.price_usd_per_h or (), regions, f"{where}.price_usd_per_h")
        _check_regions(offer.nodes, regions, f"{where}.nodes")
    if spec.default is not None:
        _check_regions(spec.default.nodes, regions, "spot.default.nodes")


def _check_regions(named: Iterable[str], regions: Sequence[str], where: str) -> None:
    for region in named:
        if region not in regions:
            raise unknown_name("region in the scenario", region, regions, where=f"{where}.{region}")


def _priced(offer: SpotOffer, region: str, on_demand_usd_per_h: float, nodes: int) -> _Found | None:
    if offer.price_usd_per_h is not None:
        return _found(offer, region, offer.price_usd_per_h.get(region, math.nan), nodes)
    assert offer.price_frac is not None  # the schema requires one of the two
    return _found(offer, region, on_demand_usd_per_h * offer.price_frac, nodes)


def _found(terms: SpotOffer | SpotDefault, region: str, price_usd_per_h: float, nodes: int) -> _Found | None:
    if math.isnan(price_usd_per_h):
        return None
    return _Found(
        price_usd_per_h=price_usd_per_h,
        nodes=terms.nodes.get(region, nodes),
        interruptions_per_h=terms.interruptions_per_h,
        source=terms.source,
        as_of=terms.as_of,
    )


def _of_fact(fact: SpotFact, on_demand_usd_per_h: float, nodes: int) -> _Found:
    # From the upper end of the range: the share that is gone after a month of a constant rate is 1 - exp(-rate month).
    share = fact.interrupted_frac_per_month_to
    return _Found(
        price_usd_per_h=on_demand_usd_per_h * (1 - fact.saving_frac),
        nodes=nodes,
        interruptions_per_h=None if share is None else -math.log1p(-share) / HOURS_PER_MONTH,
        source=fact.source,
        as_of=fact.as_of,
    )
