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
from coral_core.report.line_chart import Panel, Series, line_chart
from tasks.library import build_spec_from_scenario, capacity_tables
from tasks.solve_shard import ShardSpec, shard_templates

PUBLISHED: Final = (6, 12.0)
"""(N_max, rho) beyond which the publication saw no more goodput per USD."""

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

    @property
    def is_published(self) -> bool:
        """Whether this is the published setting."""
        return (self.n_max, self.rho) == PUBLISHED


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


def sensitivity_chart(points: Sequence[SensitivityPoint]) -> str:
    """The points as an SVG: a row per model; worth, templates and solve time over N_max, a line per rho."""
    panels = []
    drawn = [point for point in points if point.templates]  # those without a template have no worth to draw
    for model in dict.fromkeys(point.model for point in drawn):
        of_model = [point for point in drawn if point.model == model]
        mark = next((point for point in of_model if point.is_published), None)
        unit = "requests/s" if of_model[0].phase == Phase.AGGREGATED else "tokens/s"
        for title, label, is_log, value in (
            (f"{model} {of_model[0].phase}: best template", f"{unit} per USD/h", False, _worth),
            ("templates kept", "templates", True, _templates),
            ("solve time", "core seconds", True, _core_s),
        ):
            by_rho = {
                rho: tuple((float(p.n_max), value(p)) for p in sorted(of_model, key=_n_max) if p.rho == rho)
                for rho in sorted({point.rho for point in of_model})
            }
            panels.append(
                Panel(
                    title=title,
                    x_label="N_max (nodes)",
                    y_label=label,
                    series=tuple(Series(name=f"rho {rho:g}", points=points) for rho, points in by_rho.items()),
                    is_log=is_log,
                    marked=None if mark is None else (float(mark.n_max), value(mark)),
                    mark_label="published",
                )
            )
    return line_chart(
        "What N_max and rho buy, and what they cost",
        panels,
        columns=3,
        description=_description(points),
    )


def _worth(point: SensitivityPoint) -> float:
    return point.best_per_usd or 0.0


def _templates(point: SensitivityPoint) -> float:
    return float(point.templates)


def _core_s(point: SensitivityPoint) -> float:
    return point.solve_core_s


def _n_max(point: SensitivityPoint) -> int:
    return point.n_max


def _description(points: Sequence[SensitivityPoint]) -> str:
    """The chart in words: for each model how far the published setting is from the best of the sweep."""
    texts = []
    for model in dict.fromkeys(point.model for point in points):
        of_model = [point for point in points if point.model == model and point.best_per_usd]
        if not of_model:
            texts.append(f"{model}: no template at any setting.")
            continue
        best = max(of_model, key=_worth)
        text = (
            f"{model} {best.phase}: the best template gives {best.best_per_usd:.4g} per USD/h at N_max {best.n_max}, "
            f"rho {best.rho:g}, from {best.templates:,} templates in {best.solve_core_s:.2g} core seconds"
        )
        mark = next((point for point in of_model if point.is_published), None)
        if mark is not None:
            text += (
                f"; the published setting gives {_worth(mark) / _worth(best):.1%} of it, from {mark.templates:,} "
                f"templates in {mark.solve_core_s:.2g} core seconds"
            )
        texts.append(text + ".")
    return " ".join(texts)
