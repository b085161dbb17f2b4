"""GPU facts, node configurations and their prices, from the tables under `data/`.

`aws-real` is as sold; the `paper-*` catalogues are made in `coral_core.catalog.paper`; `local` is this machine, its
devices are no GPUs and in no other catalogue.
"""

from __future__ import annotations

from functools import cache
from importlib.resources.abc import Traversable
from typing import Final

from coral_core.catalog.paper import paper_catalog, read_gcp_offers, read_relative_costs
from coral_core.catalog.tables import add_once, package_table, read_table
from coral_core.domain.hardware import Catalog, Gpu, LinkKind, Market, NodeConfig, Price
from coral_core.errors import unknown_name
from coral_core.units import GB, GBIT_PER_S, MIB, TERA

GPU_COLUMNS: Final = (
    *("gpu", "memory_mib", "memory_bandwidth_gb_per_s"),
    *("fp32_tflops", "fp16_tflops", "bf16_tflops", "fp8_tflops", "int8_tops"),
    *("link_kind", "link_gb_per_s", "source", "as_of"),
)
CONFIG_COLUMNS: Final = ("config", "gpu", "gpu_count", "nic_gbit_per_s", "cloud", "source", "as_of")
PRICE_COLUMNS: Final = ("config", "region", "market", "price_usd_per_h", "source", "as_of")

COMPUTE_COLUMNS: Final = {
    "fp32": "fp32_tflops",
    "fp16": "fp16_tflops",
    "bf16": "bf16_tflops",
    "fp8": "fp8_tflops",
    "int8": "int8_tops",
}

AWS_NOTE: Final = (
    "AWS instance types as sold. Prices are on demand, Linux, from price lists of November 2025 to January 2026 "
    "(as_of is the earlier end); GovCloud and local zones are left out. NICs are sustained baselines. "
    "p5e.48xlarge has no public price, hence none here."
)

LOCAL_NOTE: Final = (
    "This machine: nodes are processes that share its cores. Speeds are estimates for the tiny models only, and prices "
    "are nominal."
)


def catalog_names() -> tuple[str, ...]:
    """The names that `load_catalog` knows."""
    return ("paper-core", "paper-extended", "aws-real", "local")


def load_gpus() -> dict[str, Gpu]:
    """All GPUs by name; `A100` of paper tables is `A100-80` here."""
    return dict(_gpus())


def load_catalog(name: str) -> Catalog:
    """The catalogue called `name` (see `catalog_names`); InputError with near misses for any other."""
    if name not in catalog_names():
        raise unknown_name("catalogue", name, catalog_names())
    return _catalog(name)


def read_gpus(file: Traversable) -> dict[str, Gpu]:
    """GPUs of a table with GPU_COLUMNS; an empty compute cell means that the hardware lacks the dtype."""
    gpus: dict[str, Gpu] = {}
    for row in read_table(file, GPU_COLUMNS):
        peaks = {dtype: row.optional_positive(column) for dtype, column in COMPUTE_COLUMNS.items()}
        gpu = Gpu(
            name=row.text("gpu"),
            memory_bytes=row.count("memory_mib") * MIB,
            memory_bandwidth_bytes_per_s=row.positive("memory_bandwidth_gb_per_s") * GB,
            compute_flops_per_s={dtype: peak * TERA for dtype, peak in peaks.items() if peak is not None},
            link_kind=row.member("link_kind", {kind.value: kind for kind in LinkKind}),
            link_bytes_per_s=row.positive("link_gb_per_s") * GB,
            source=row.text("source"),
            as_of=row.day("as_of"),
        )
        add_once(gpus, gpu.name, gpu, row)
    return gpus


def read_configs(file: Traversable, gpus: dict[str, Gpu]) -> dict[str, NodeConfig]:
    """Node configurations of a table with CONFIG_COLUMNS, over the `gpus` given."""
    configs: dict[str, NodeConfig] = {}
    for row in read_table(file, CONFIG_COLUMNS):
        config = NodeConfig(
            name=row.text("config"),
            gpu=row.member("gpu", gpus),
            gpu_count=row.count("gpu_count"),
            nic_bytes_per_s=row.positive("nic_gbit_per_s") * GBIT_PER_S,
            cloud=row.text("cloud"),
            source=row.text("source"),
            as_of=row.day("as_of"),
        )
        add_once(configs, config.name, config, row)
    return configs


def read_prices(file: Traversable, configs: dict[str, NodeConfig]) -> dict[tuple[str, str, Market], Price]:
    """Prices of a table with PRICE_COLUMNS, of the `configs` given, by (region, config, market)."""
    prices: dict[tuple[str, str, Market], Price] = {}
    for row in read_table(file, PRICE_COLUMNS):
        price = Price(
            config=row.member("config", configs).name,
            region=row.text("region"),
            market=row.member("market", {market.value: market for market in Market}),
            price_usd_per_h=row.positive("price_usd_per_h"),
            source=row.text("source"),
            as_of=row.day("as_of"),
        )
        add_once(prices, (price.region, price.config, price.market), price, row)
    return prices


@cache
def _gpus() -> dict[str, Gpu]:
    return read_gpus(package_table("gpus.csv"))


@cache
def _catalog(name: str) -> Catalog:
    if name == "local":
        configs = read_configs(package_table("local_configs.csv"), read_gpus(package_table("local_devices.csv")))
        prices = read_prices(package_table("local_prices.csv"), configs)
        return Catalog(name=name, configs=configs, prices=prices, note=LOCAL_NOTE)
    aws_configs = read_configs(package_table("aws_configs.csv"), _gpus())
    aws_prices = read_prices(package_table("aws_prices.csv"), aws_configs)
    if name == "aws-real":
        return Catalog(name=name, configs=aws_configs, prices=aws_prices, note=AWS_NOTE)
    return paper_catalog(
        name,
        configs=read_configs(package_table("paper_configs.csv"), _gpus()),
        costs=read_relative_costs(package_table("paper_costs.csv"), aws_configs),
        aws_prices=aws_prices,
        gcp_offers=read_gcp_offers(package_table("gcp_prices.csv"), aws_configs),
    )
