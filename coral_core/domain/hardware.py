"""Hardware and offers: GPUs, node configurations, and what a node costs where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Final


class Market(StrEnum):
    """How a node is paid for."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"


_SPOT: Final = f"@{Market.SPOT}"


def market_name(name: str, market: Market) -> str:
    """The name of a configuration or template in a market: `g5.xlarge` is on demand, `g5.xlarge@spot` is spot."""
    return f"{name}{_SPOT}" if market is Market.SPOT else name


def split_market(name: str) -> tuple[str, Market]:
    """The name and the market that `market_name` has joined."""
    return (name.removesuffix(_SPOT), Market.SPOT) if name.endswith(_SPOT) else (name, Market.ON_DEMAND)


class LinkKind(StrEnum):
    """What joins the GPUs of one node; decides the all-reduce model."""

    NVLINK = "nvlink"
    PCIE = "pcie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator type; vendor peaks, dense (never the sparse marketing figure).

    `memory_bytes` is what the driver shows, not the nominal size. `compute_flops_per_s` maps a dtype
    (`fp32 fp16 bf16 fp8 int8`) to dense peak FLOP/s; a dtype that is absent is not supported in hardware.
    `link_bytes_per_s` is per GPU and direction inside a node.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    compute_flops_per_s: Mapping[str, float]
    link_kind: LinkKind
    link_bytes_per_s: float
    source: str
    as_of: date


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """An instance type: `gpu_count` GPUs of one type behind one NIC (sustained baseline, per direction)."""

    name: str
    gpu: Gpu
    gpu_count: int
    nic_bytes_per_s: float
    cloud: str
    source: str
    as_of: date

    @property
    def memory_bytes(self) -> int:
        """Memory of all the node's GPUs together."""
        return self.gpu.memory_bytes * self.gpu_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one node of a configuration costs in a region and market."""

    config: str
    region: str
    market: Market
    price_usd_per_h: float
    source: str
    as_of: date


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Node configurations and their prices; a pair without a price is not sold there (never free).

    `configs` is keyed by name, `prices` by (region, config, market).
    """

    name: str
    configs: Mapping[str, NodeConfig]
    prices: Mapping[tuple[str, str, Market], Price]
    note: str = ""

    @property
    def regions(self) -> tuple[str, ...]:
        """All regions with at least one price, sorted."""
        return tuple(sorted({region for region, _, _ in self.prices}))
