"""What can be had at which price: A_r(c) and p_r(c), each with its source and age. Unknown is a gap, never zero. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.fleet import Offer
from coral_core.domain.hardware import Market
from coral_core.errors import DataGapError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[Value]):
    """A value, who says so, and when it was so."""

    value: Value
    source: str
    as_of: datetime


class GapKind(StrEnum):
    """`missing`: no source gives it; `stale`: the last reading is older than allowed."""

    MISSING = "missing"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something that is not known, and why."""

    what: str
    kind: GapKind
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.kind}, {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferState:
    """What is known of one offer. `zones` lists where to try, best first: cheapest, those that lately refused last."""

    available: Reading[int] | Gap
    price_usd_per_h: Reading[float] | Gap
    zones: tuple[str, ...]
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimit:
    """Offers that share a quota: the sum of `vcpus[offer]` x nodes may not pass `free_vcpus` (ours included)."""

    region: str
    pool: str
    free_vcpus: float
    vcpus: Mapping[Offer, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """All offers that were asked for, the quota pools they share, and every gap."""

    as_of: datetime
    offers: Mapping[Offer, OfferState]
    pools: tuple[PoolLimit, ...]

    @property
    def gaps(self) -> dict[Offer, tuple[Gap, ...]]:
        """Offers of which something is not known."""
        found = {
            offer: tuple(x for x in (state.available, state.price_usd_per_h) if isinstance(x, Gap))
            for offer, state in self.offers.items()
        }
        return {offer: gaps for offer, gaps in found.items() if gaps}

    def pool_excess(self, nodes: Mapping[Offer, int]) -> tuple[PoolLimit, ...]:
        """Pools that a plan of `nodes` per offer would pass."""
        return tuple(
            pool
            for pool in self.pools
            if math.fsum(pool.vcpus[offer] * nodes.get(offer, 0) for offer in pool.vcpus) > pool.free_vcpus
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningArrays:
    """Supply as `AllocationProblem` wants it, each array (regions, columns).

    `left_out`: offers with a gap and nothing held; the plan must not use them, and its record must name them.
    """

    available: NDArray[np.int64]
    price_usd_per_h: NDArray[np.float64]
    left_out: tuple[Offer, ...]


def planning_arrays(
    supply: Supply, regions: Sequence[str], columns: Sequence[tuple[str, Market]], *, leave_out_gaps: bool
) -> PlanningArrays:
    """The supply as arrays. An offer that was not observed at all counts as a gap.

    Raises DataGapError for the first gap; with `leave_out_gaps` only where nodes of the offer run (0 would stop them).
    """
    available = np.zeros((len(regions), len(columns)), dtype=np.int64)
    price_usd_per_h = np.full((len(regions), len(columns)), np.nan)
    left_out: list[Offer] = []
    for r, region in enumerate(regions):
        for c, (config, market) in enumerate(columns):
            offer = (region, config, market)
            state = supply.offers.get(offer)
            if state is None or isinstance(state.available, Gap) or _needs_price(state):
                if state is None or not leave_out_gaps or state.held:
                    raise _gap_error(offer, supply.gaps.get(offer, ()), held=state.held if state else 0)
                left_out.append(offer)
                continue
            available[r, c] = state.available.value
            if not isinstance(state.price_usd_per_h, Gap):
                price_usd_per_h[r, c] = state.price_usd_per_h.value
    return PlanningArrays(available=available, price_usd_per_h=price_usd_per_h, left_out=tuple(left_out))


def _needs_price(state: OfferState) -> bool:
    """Whether a missing price matters: not where nothing is to be had."""
    return isinstance(state.price_usd_per_h, Gap) and not (
        isinstance(state.available, Reading) and state.available.value == 0
    )


def _gap_error(offer: Offer, gaps: Sequence[Gap], *, held: int) -> DataGapError:
    region, config, market = offer
    what = "; ".join(map(str, gaps)) or "was not observed"
    running = f" while {held} nodes of it run" if held else ""
    return DataGapError(
        f"{config} ({market}){running}: {what}",
        where=region,
        fix="mend the source, allow older readings, or leave the region or configuration out",
    )
