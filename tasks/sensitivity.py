"""How N_max and rho trade a library's size and solve time for the worth of its best template (DESIGN 3.5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from coral_core.config.resolve import ResolvedScenario, on_demand_prices
from coral_core.config.scenario import LibraryMethod
from coral_core.domain.placement import PlacedCombinations
from coral_core.domain.templates import combination_text
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, unknown_name
from tasks.library import build_spec_from_scenario, capacity_tables
from tasks.solve_shard import ShardSpec, shard_templates

_EQUAL_FRAC: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityPoint:
    """One library of one model and phase. `templates` are those kept after dominance pruning.

    `best_per_usd` is the most tokens/s per USD/h of any template in its cheapest region (requests/s where aggregated;
    None without templates), `best_nodes` what it runs on there, at on-demand prices.
    `solve_core_s` is CPU time of placing, `solve_s` its wall time: others may compute too.
    """

    model: str
    phase: str
    n_max: int
    rho: float
    combinations: int
    templates: int
    solve_core_s: float
    solve_s: float
    best_per_usd: float | None
    best_nodes: str
    best_region: str


def sensitivity(
    resolved: ResolvedScenario,
    *,
    models: Sequence[str],
    n_max: Sequence[int],
    rho: Sequence[float],
    phase: Phase = Phase.PREFILL,
    method: LibraryMethod | None = None,
    sold_out: Sequence[str] = (),
) -> Iterator[SensitivityPoint]:
    """One point per model, N_max and rho, in this order, each solved on its own so that its time is its own.

    Configurations with a GPU of `sold_out` are left out.

    Raises InputError for a model or phase that the scenario does not serve, DataGapError where a capacity is unknown.
    """
    served = {model.shape.name: model for model in resolved.models}
    for name in models:
        if name not in served or phase not in served[name].phases:
            raise InputError(
                f"scenario {resolved.scenario.name} does not serve {name} in phase {phase.value}",
                where="models",
                fix=f"choose of {', '.join(sorted(served))}",
            )
    resolved = _without(resolved, sold_out)
    spec = build_spec_from_scenario(resolved, method=method)
    prices = np.nan_to_num(on_demand_prices(resolved), nan=np.inf)
    for name in models:
        builds = tuple(replace(build, phases=(phase,)) for build in spec.models if build.shape.name == name)
        table = capacity_tables(replace(spec, n_max=max(n_max), models=builds))[0]
        shard = ShardSpec(
            library=spec.library,
            table=table,
            n_max=1,
            rho=1.0,
            method=spec.method,
            ilp_time_limit_s=spec.ilp_time_limit_s,
        )
        next(shard_templates(shard, {}))  # loads compiled code, which is not what is measured
        for nodes in n_max:
            for size in rho:
                yield _point(replace(shard, n_max=nodes, rho=size), resolved.scenario.regions, prices)


def _without(resolved: ResolvedScenario, gpus: Sequence[str]) -> ResolvedScenario:
    """The scenario without the configurations of some GPUs. Raises InputError for a GPU that none has, or all."""
    names = sorted({config.gpu.name for config in resolved.configs})
    for gpu in gpus:
        if gpu not in names:
            raise unknown_name("GPU", gpu, names, where="sold_out")
    left = tuple(config for config in resolved.configs if config.gpu.name not in gpus)
    if not left:
        raise InputError("no configuration is left", where="sold_out", fix="leave some GPU")
    return replace(resolved, configs=left)


def _point(shard: ShardSpec, regions: Sequence[str], prices: np.ndarray) -> SensitivityPoint:
    statistics: dict[str, float] = {}
    templates, best, best_row, best_region = 0, 0.0, None, ""
    for placed in shard_templates(shard, statistics):
        templates += len(placed)
        value, row, region = _best(placed, prices)
        if value > best * (1 + _EQUAL_FRAC):
            best, best_row, best_region = value, placed.counts[row], regions[region]
    held = {} if best_row is None else {shard.table.configs[c]: int(best_row[c]) for c in np.flatnonzero(best_row)}
    return SensitivityPoint(
        model=shard.table.model,
        phase=shard.table.phase.value,
        n_max=shard.n_max,
        rho=shard.rho,
        combinations=int(statistics["combinations"]),
        templates=templates,
        solve_core_s=statistics["solve_core_s"],
        solve_s=statistics["solve_s"],
        best_per_usd=best or None,
        best_nodes=combination_text(held),
        best_region=best_region,
    )


def _best(placed: PlacedCombinations, prices: np.ndarray) -> tuple[float, int, int]:
    """(throughput per USD/h, row, region) of the best template; prices (R, C), infinite where not sold."""
    if not len(placed):
        return 0.0, 0, 0
    counts = placed.counts.astype(np.float64)
    usd_per_h = np.stack(
        [np.where(counts > 0, counts * np.where(counts > 0, region, 0.0), 0.0).sum(axis=1) for region in prices]
    )
    value = placed.throughput / usd_per_h
    first = (value >= value.max() * (1 - _EQUAL_FRAC)).any(axis=0).argmax()  # the smallest of those that are as good
    region = value[:, first].argmax()
    return float(value[region, first]), int(first), int(region)
