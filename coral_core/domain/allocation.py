"""The allocation problem and its answer, solver-neutral (DESIGN 3.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.workload import Phase

SPARE_WEIGHT: Final = 0.1
"""What demand that is served but would not survive a loss counts beside demand that is not served: serving comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateColumns:
    """Templates as arrays, one entry each: all that allocation needs of them.

    `nodes` is (n, C), counts in the order of the problem's `configs`. `throughput` is tokens/s, or requests/s where
    the phase is `aggregated`. `variants` (dtypes of the weights) compete for the model's demand; with `pd_same_region`
    prefill and decode of a request are of one variant, without it the KV cache is taken to pass from any to any. None:
    one variant per model.
    """

    ids: tuple[str, ...]
    models: tuple[str, ...]
    phases: tuple[Phase, ...]
    nodes: NDArray[np.int64]
    throughput: NDArray[np.float64]
    variants: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandRow:
    """What one model needs in one phase.

    `tokens_per_s` for prefill and decode; `requests_per_s` too where aggregated templates may cover the row, and alone
    for phase `aggregated`. `weight` multiplies the missing fraction in the shortfall objective. `min_instances` and
    `max_instances` bound the instances of templates that enter the row. `on_demand_frac` of the demand must be covered
    without spot nodes: what is served counts only as far as that holds for it too.
    `spare_instances` (0 or 1): so many instances may fail, and what is left of the row still covers its demand.
    `region_fracs`: of the demand, the fraction that must be served in a region, by region (sum at most 1, the rest anywhere).
    """

    model: str
    phase: Phase
    tokens_per_s: float | None
    requests_per_s: float | None = None
    weight: float = 1.0
    min_instances: int = 0
    max_instances: int | None = None
    on_demand_frac: float = 0.0
    spare_instances: int = 0
    region_fracs: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """`count` instances of `template` that run in `region` now."""

    template: str
    region: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """What must not be used: templates of `model` on nodes of `config` in `region`; None stands for all of them."""

    model: str | None = None
    config: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Nodes of `config` in `region` under templates of `model` (None: all of them) count `price_factor` times their price.

    Above 1 they are avoided, below 1 sought. Several that match multiply. What is paid, and the budget, stay in real USD.
    """

    model: str | None = None
    config: str | None = None
    region: str | None = None
    price_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A quota that configurations share in a region: the sum of `units` per node (vCPUs, say) x nodes is at most `limit`."""

    name: str
    region: str
    limit: float
    units: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationOptions:
    """Switches of the named constraint families, and the solver's limits.

    `budget_usd_per_h` bounds the cost of what is held, churn apart; what it does not pay for is shortfall.
    """

    pd_same_region: bool = False
    budget_usd_per_h: float | None = None
    gap_frac: float = 1e-6
    time_limit_s: float = 60.0
    reduce: bool = True
    solver: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationProblem:
    """Which templates to run how often in which region.

    `available` (R, C) counts all nodes we may hold, those running included. `price_usd_per_h` is (R, C), NaN where a
    configuration is not sold (then `available` must be 0). A configuration is of one market: those in `spot_configs` may be
    taken away at any time. `pools`: what configurations share, beside `available`. `churn_k` = start-up time / interval.
    """

    regions: tuple[str, ...]
    configs: tuple[str, ...]
    available: NDArray[np.int64]
    price_usd_per_h: NDArray[np.float64]
    templates: TemplateColumns
    demand: tuple[DemandRow, ...]
    running: tuple[Running, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    preferences: tuple[Preference, ...] = ()
    spot_configs: tuple[str, ...] = ()
    pools: tuple[Pool, ...] = ()
    churn_k: float = 0.0
    options: AllocationOptions = field(default_factory=AllocationOptions)


class AllocationStatus(StrEnum):
    """`optimal`: the gap is proven to be within the wish; `gap`: it is not (see `gap_frac`)."""

    OPTIMAL = "optimal"
    GAP = "gap"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCount:
    """`count` instances of a template in a region."""

    template: str
    region: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Demand of a row that no affordable or available capacity meets; `frac` of the row's demand.

    `spare_frac` is the part of `frac` that is served, and only lacks what `spare_instances` asks for: SPARE_WEIGHT times the
    fraction of the demand that is served now and would not be after the worst loss.
    """

    model: str
    phase: Phase
    tokens_per_s: float | None
    requests_per_s: float | None
    frac: float
    spare_frac: float = 0.0

    @property
    def unserved_frac(self) -> float:
        """The fraction of the demand that is not served."""
        return self.frac - self.spare_frac

    @property
    def after_loss_frac(self) -> float:
        """The fraction that would not be served after the worst loss, where a spare is asked for; else `unserved_frac`."""
        return self.unserved_frac + self.spare_frac / SPARE_WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationResult:
    """An allocation, its cost, and how good it is proven to be.

    objective = cost + churn + preference; `gap_frac` = (objective - bound) / max(objective, 1e-9). `preference_usd_per_h` is what
    preferences add to the cost (below 0 where they seek what is used): nobody pays it. `shortfall` has one entry per
    demand row, in the problem's order. `floor_deficit` maps the index of a demand row to instances missing from its
    floor (only rows with a deficit). `statistics`: columns before and after each reduction, seconds, ...
    """

    status: AllocationStatus
    cost_usd_per_h: float
    churn_usd_per_h: float
    bound_usd_per_h: float
    instances: tuple[InstanceCount, ...]
    shortfall: tuple[Shortfall, ...]
    method: str
    preference_usd_per_h: float = 0.0
    floor_deficit: Mapping[int, int] = field(default_factory=dict)
    statistics: Mapping[str, float] = field(default_factory=dict)

    @property
    def objective_usd_per_h(self) -> float:
        """Cost plus churn plus what preferences add."""
        return self.cost_usd_per_h + self.churn_usd_per_h + self.preference_usd_per_h

    @property
    def gap_frac(self) -> float:
        """Proven relative distance to the optimum."""
        return (self.objective_usd_per_h - self.bound_usd_per_h) / max(self.objective_usd_per_h, 1e-9)

    @property
    def full(self) -> bool:
        """Whether every demand and floor is met."""
        return all(item.frac == 0 for item in self.shortfall) and not self.floor_deficit
