"""The publication's node configurations, priced: it gives relative costs only (DESIGN 10).

Price of n GPUs of type g in region r = relative cost(g) x price of g6.xlarge in us-east-2 (one L4, relative cost 1)
x n x factor(r, g). The factor is the mean, over instance types with that GPU, of their on-demand price in r over
their price in us-east-2; for a Google Cloud region, of its machine types over the AWS types with as many such GPUs.
A GPU type that is not sold in a region has no factor, hence no price there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.resources.abc import Traversable
from statistics import fmean
from typing import Final

from coral_core.catalog.tables import add_once, read_table
from coral_core.domain.hardware import Catalog, Market, NodeConfig, Price

COST_COLUMNS: Final = ("label", "gpu", "relative_cost", "comparable_aws_configs", "source", "as_of")
GCP_COLUMNS: Final = ("config", "region", "market", "price_usd_per_h", "comparable_aws_config", "source", "as_of")

BASE_REGION: Final = "us-east-2"
BASE_CONFIG: Final = "g6.xlarge"
CORE_REGIONS: Final = (BASE_REGION, "ap-northeast-2")
CORE_GPUS: Final = frozenset({"L40S", "L4", "A10G"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeCost:
    """A GPU's published cost relative to L4, and the AWS types whose prices tell how regions differ for it."""

    gpu: str
    value: float
    comparable: tuple[str, ...]
    source: str
    as_of: date


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a node type costs on demand in a region, and the AWS type it is comparable to (itself on AWS)."""

    config: str
    region: str
    price_usd_per_h: float
    comparable: str
    as_of: date


def read_relative_costs(file: Traversable, aws_configs: Mapping[str, NodeConfig]) -> dict[str, RelativeCost]:
    """Relative costs by GPU name, of a table with COST_COLUMNS."""
    costs: dict[str, RelativeCost] = {}
    for row in read_table(file, COST_COLUMNS):
        cost = RelativeCost(
            gpu=row.text("gpu"),
            value=row.positive("relative_cost"),
            comparable=tuple(config.name for config in row.members("comparable_aws_configs", aws_configs)),
            source=row.text("source"),
            as_of=row.day("as_of"),
        )
        add_once(costs, cost.gpu, cost, row)
    return costs


def read_gcp_offers(file: Traversable, aws_configs: Mapping[str, NodeConfig]) -> tuple[Offer, ...]:
    """Google Cloud's on-demand offers, of a table with GCP_COLUMNS."""
    offers: dict[tuple[str, str], Offer] = {}
    for row in read_table(file, GCP_COLUMNS):
        row.member("market", {Market.ON_DEMAND.value: Market.ON_DEMAND})
        offer = Offer(
            config=row.text("config"),
            region=row.text("region"),
            price_usd_per_h=row.positive("price_usd_per_h"),
            comparable=row.member("comparable_aws_config", aws_configs).name,
            as_of=row.day("as_of"),
        )
        add_once(offers, (offer.region, offer.config), offer, row)
    return tuple(offers.values())


def paper_catalog(
    name: str,
    *,
    configs: Mapping[str, NodeConfig],
    costs: Mapping[str, RelativeCost],
    aws_prices: Mapping[tuple[str, str, Market], Price],
    gcp_offers: tuple[Offer, ...],
) -> Catalog:
    """`paper-core` (12 configurations, two AWS regions) or `paper-extended` (20, and Google Cloud's us-central1)."""
    extended = name == "paper-extended"
    aws_offers = tuple(
        Offer(
            config=price.config,
            region=region,
            price_usd_per_h=price.price_usd_per_h,
            comparable=price.config,
            as_of=price.as_of,
        )
        for (region, _, market), price in aws_prices.items()
        if region in CORE_REGIONS and market is Market.ON_DEMAND
    )
    base = {offer.config: offer for offer in aws_offers if offer.region == BASE_REGION}
    chosen = {key: config for key, config in configs.items() if extended or config.gpu.name in CORE_GPUS}
    offers = aws_offers + gcp_offers if extended else aws_offers
    prices = {
        (price.region, price.config, price.market): price
        for config in chosen.values()
        for price in _prices(config, costs[config.gpu.name], base, offers)
    }
    return Catalog(name=name, configs=chosen, prices=prices, note=_note(base[BASE_CONFIG], extended=extended))


def _prices(
    config: NodeConfig, cost: RelativeCost, base: Mapping[str, Offer], offers: tuple[Offer, ...]
) -> Iterator[Price]:
    """The configuration's price in each region where its GPU type is sold."""
    anchor = base[BASE_CONFIG]
    comparable = [offer for offer in offers if offer.comparable in cost.comparable and offer.comparable in base]
    for region in sorted({offer.region for offer in comparable}):
        sold = [offer for offer in comparable if offer.region == region]
        factor = fmean(offer.price_usd_per_h / base[offer.comparable].price_usd_per_h for offer in sold)
        yield Price(
            config=config.name,
            region=region,
            market=Market.ON_DEMAND,
            price_usd_per_h=cost.value * anchor.price_usd_per_h * config.gpu_count * factor,
            source=f"{cost.source}: {cost.value:g} x L4 price {anchor.price_usd_per_h:g} x {config.gpu_count} GPU "
            f"x regional factor {factor:.4f} (mean of {', '.join(offer.config for offer in sold)})",
            as_of=min(anchor.as_of, *(offer.as_of for offer in sold)),
        )


def _note(anchor: Offer, *, extended: bool) -> str:
    text = (
        f"The publication's configurations. Prices: its relative costs x the L4 price ({anchor.price_usd_per_h:g} USD/h, "
        f"{BASE_CONFIG} in {BASE_REGION}) x GPU count x how the region's prices differ on AWS for that GPU. "
        "NICs are an assumption: the sustained figure of the AWS size with as many GPUs, or its share of the next larger."
    )
    if extended:
        text += (
            " In us-central1 (Google Cloud) the factor compares machine types with as many GPUs as the AWS type; "
            "A10G and L40S are not sold there. A100 is the 80 GB type; its factor is that of 8 x A100 40 GB."
        )
    return text
