"""Refuse an allocation problem that has no clear meaning, naming the key path as in the file format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np

from coral_core.allocation.coverage import members_by_kind
from coral_core.allocation.preferences import node_usd_per_h
from coral_core.domain.allocation import (
    AllocationProblem,
    DemandRow,
    Exclusion,
    Preference,
    Running,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.solver.choose import Preference as SolverPreference

_SUM_NOISE = 1e-9
MAX_COUNT = 10**9
"""Nodes, instances: above this a count is a typing error, and products would leave int64."""
MIN_DEMAND = 1e-100
"""Requests/s, tokens/s: a demand below this is none, and fractions of it would leave the range of floats."""


def check_problem(problem: AllocationProblem) -> None:
    """Raise InputError unless every name is known, every number has a meaning, and no key appears twice.

    A running template that is not among the templates is legal (it is stopped at no cost), so is a demand without any
    template (shortfall) and a template without demand (never used).
    """
    if not problem.regions and (problem.demand or len(problem.templates)):
        raise InputError("no region to rent nodes in", where="regions", fix="name at least one")
    _unique(problem.regions, "regions")
    _unique(problem.configs, "configs")
    _check_nodes(problem)
    _check_spot(problem)
    _check_templates(problem.templates, len(problem.configs))
    _check_demand(problem)
    _check_running(problem.running, problem.regions)
    _check_exclusions(problem)
    _check_preferences(problem)
    _check_guarantees(problem)
    _check_pools(problem)
    _amount(problem.churn_k, "churn_k")
    options = problem.options
    if not 0 <= options.gap_frac < 1:
        raise InputError(f"{options.gap_frac} is not in [0, 1)", where="options.gap_frac")
    if options.solver not in get_args(SolverPreference):
        known = ", ".join(get_args(SolverPreference))
        raise InputError(f"unknown solver {options.solver!r}", where="options.solver", fix=f"one of {known}")
    if options.budget_usd_per_h is not None:
        _amount(options.budget_usd_per_h, "options.budget_usd_per_h")
    if not options.time_limit_s > 0:
        raise InputError(f"{options.time_limit_s} is not above 0", where="options.time_limit_s")


def _unique(names: Sequence[str], where: str) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise InputError(f"{name!r} appears twice", where=f"{where}[{index}]")
        seen.add(name)


def _amount(value: float, where: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{value} is not a finite number >= 0", where=where)


def _rate(value: float, where: str) -> None:
    _amount(value, where)
    if 0 < value < MIN_DEMAND:
        raise InputError(f"{value} is below {MIN_DEMAND}", where=where, fix="state 0 for no demand")


def _count(value: int, where: str) -> None:
    if not 0 <= value <= MAX_COUNT:
        raise InputError(f"{value} is not a count between 0 and {MAX_COUNT}", where=where)


def _check_nodes(problem: AllocationProblem) -> None:
    shape = (len(problem.regions), len(problem.configs))
    for name, array in (("available", problem.available), ("price_usd_per_h", problem.price_usd_per_h)):
        if array.shape != shape:
            raise InputError(f"shape {array.shape}, not (regions, configs) = {shape}", where=name)
    for r, c in zip(*np.nonzero((problem.available < 0) | (problem.available > MAX_COUNT)), strict=True):
        place = f"regions.{problem.regions[r]}.{problem.configs[c]}.available"
        _count(int(problem.available[r, c]), place)
    unsold = np.isnan(problem.price_usd_per_h)
    for r, c in zip(*np.nonzero(unsold & (problem.available > 0)), strict=True):
        place = f"regions.{problem.regions[r]}.{problem.configs[c]}.price_usd_per_h"
        raise InputError("nodes are available but have no price", where=place)
    bad = ~unsold & ~((problem.price_usd_per_h >= 0) & (problem.price_usd_per_h < math.inf))
    for r, c in zip(*np.nonzero(bad), strict=True):
        place = f"regions.{problem.regions[r]}.{problem.configs[c]}.price_usd_per_h"
        _amount(float(problem.price_usd_per_h[r, c]), place)


def _check_templates(templates: TemplateColumns, n_configs: int) -> None:
    n = len(templates)
    lengths = (len(templates.models), len(templates.phases), len(templates.throughput))
    if templates.variants is not None and len(templates.variants) != n:
        raise InputError(f"{len(templates.variants)} variants of {n} templates", where="templates")
    if lengths != (n, n, n) or templates.nodes.shape != (n, n_configs):
        raise InputError(f"arrays of unequal length: {(n, *lengths)}, nodes {templates.nodes.shape}", where="templates")
    _unique(templates.ids, "templates")
    for index in np.flatnonzero(~(np.isfinite(templates.throughput) & (templates.throughput >= 0))):
        _amount(float(templates.throughput[index]), f"templates[{index}].throughput")
    nodes = templates.nodes
    if nodes.size and not 0 <= nodes.min() <= nodes.max() <= MAX_COUNT:
        bad = int(np.flatnonzero(((nodes < 0) | (nodes > MAX_COUNT)).any(axis=1))[0])
        raise InputError(f"not every node count is between 0 and {MAX_COUNT}", where=f"templates[{bad}].nodes")
    for index in np.flatnonzero(~nodes.any(axis=1)):
        raise InputError(f"template {templates.ids[index]!r} has no nodes", where=f"templates[{index}].nodes")


def _check_demand(problem: AllocationProblem) -> None:
    some = Phase.AGGREGATED in problem.templates.phases
    kinds = members_by_kind(problem.templates) if some else ()
    aggregated = {model for model, phase in kinds if phase is Phase.AGGREGATED}
    phases: dict[str, set[Phase]] = {}
    for index, row in enumerate(problem.demand):
        where = f"demand[{index}]"
        seen = phases.setdefault(row.model, set())
        if row.phase in seen:
            raise InputError(f"model {row.model!r} has two rows of phase {row.phase}", where=where)
        seen.add(row.phase)
        if Phase.AGGREGATED in seen and len(seen) > 1:
            raise InputError(
                f"model {row.model!r} has an aggregated row beside a prefill or decode row",
                where=where,
                fix="an aggregated template would count for both: state the demand once",
            )
        _check_row(row, where, has_aggregated=row.model in aggregated)


def _check_row(row: DemandRow, where: str, *, has_aggregated: bool) -> None:
    needed = "requests_per_s" if row.phase is Phase.AGGREGATED else "tokens_per_s"
    if getattr(row, needed) is None:
        raise InputError(f"a row of phase {row.phase} needs {needed}", where=where)
    if row.phase is Phase.AGGREGATED and row.tokens_per_s is not None:
        raise InputError("an aggregated row is in requests_per_s only", where=f"{where}.tokens_per_s")
    for name in ("tokens_per_s", "requests_per_s"):
        value = getattr(row, name)
        if value is not None:
            _rate(value, f"{where}.{name}")
    if row.phase is not Phase.AGGREGATED and has_aggregated and row.requests_per_s is None:
        raise InputError(f"model {row.model!r} has aggregated templates, so its rows need requests_per_s", where=where)
    if row.tokens_per_s and row.requests_per_s == 0:
        raise InputError("0 requests/s cannot need tokens/s", where=f"{where}.requests_per_s")
    _amount(row.weight, f"{where}.weight")
    if not 0 <= row.on_demand_frac <= 1:
        raise InputError(f"{row.on_demand_frac} is not in [0, 1]", where=f"{where}.on_demand_frac")
    _count(row.min_instances, f"{where}.min_instances")
    if row.max_instances is not None:
        _count(row.max_instances, f"{where}.max_instances")
        if row.max_instances < row.min_instances:
            raise InputError(
                f"max_instances {row.max_instances} is below min_instances {row.min_instances}",
                where=f"{where}.max_instances",
            )


def _check_spot(problem: AllocationProblem) -> None:
    _unique(problem.spot_configs, "spot_configs")
    for index, name in enumerate(problem.spot_configs):
        if name not in problem.configs:
            known = f"known: {list(problem.configs)}"
            raise InputError(f"unknown config {name!r}", where=f"spot_configs[{index}]", fix=known)


def _check_exclusions(problem: AllocationProblem) -> None:
    for index, item in enumerate(problem.exclusions):
        where = f"exclusions[{index}]"
        if item == Exclusion():
            raise InputError("it excludes everything", where=where, fix="name a model, config or region")
        _check_names(problem, item, where)


def _check_preferences(problem: AllocationProblem) -> None:
    for index, item in enumerate(problem.preferences):
        where = f"preferences[{index}]"
        if not (math.isfinite(item.price_factor) and item.price_factor > 0):
            raise InputError(f"{item.price_factor} is not a finite number > 0", where=f"{where}.price_factor")
        if (item.model, item.config, item.region) == (None, None, None):
            raise InputError("it prefers nothing to anything", where=where, fix="name a model, config or region")
        _check_names(problem, item, where)
    # infinite, they would exclude: a demand that could be met would be stated as missing
    with np.errstate(over="ignore", invalid="ignore"):
        for model in sorted({str(item.model) for item in problem.preferences}):
            for r, c in np.argwhere(~np.isfinite(node_usd_per_h(problem, model)))[:1].tolist():
                place = f"{problem.configs[c]!r} in {problem.regions[r]!r}"
                raise InputError(f"together they make the price of {place} infinite", where="preferences")


def _check_pools(problem: AllocationProblem) -> None:
    seen: set[tuple[str, str]] = set()
    for index, pool in enumerate(problem.pools):
        where = f"pools[{index}]"
        if pool.region not in problem.regions:
            known = f"known: {list(problem.regions)}"
            raise InputError(f"unknown region {pool.region!r}", where=f"{where}.region", fix=known)
        if (pool.name, pool.region) in seen:
            raise InputError(f"{pool.name!r} in {pool.region!r} appears twice", where=where)
        seen.add((pool.name, pool.region))
        _amount(pool.limit, f"{where}.limit")
        _unique([config for config, _ in pool.units], f"{where}.units")
        for config, amount in pool.units:
            place = f"{where}.units.{config}"
            if config not in problem.configs:
                raise InputError(f"unknown config {config!r}", where=place, fix=f"known: {list(problem.configs)}")
            if not 0 < amount < math.inf:
                raise InputError(f"{amount} is not a finite number > 0", where=place)


def _check_names(problem: AllocationProblem, item: Exclusion | Preference, where: str) -> None:
    models = {row.model for row in problem.demand} | set(problem.templates.models)
    for kind, name, known in (
        ("model", item.model, models),
        ("config", item.config, problem.configs),
        ("region", item.region, problem.regions),
    ):
        if name is not None and name not in known:
            raise InputError(f"unknown {kind} {name!r}", where=f"{where}.{kind}", fix=f"known: {sorted(known)}")


def _check_guarantees(problem: AllocationProblem) -> None:
    asked: dict[str, dict[str, float]] = {}
    for index, row in enumerate(problem.demand):
        if row.spare_instances not in (0, 1):
            raise InputError(f"{row.spare_instances} is neither 0 nor 1", where=f"demand[{index}].spare_instances")
        where = f"demand[{index}].region_fracs"
        _unique([region for region, _ in row.region_fracs], where)
        together = asked.setdefault(row.model, {}) if problem.options.pd_same_region else {}
        for region, frac in row.region_fracs:
            if region not in problem.regions:
                known = f"known: {list(problem.regions)}"
                raise InputError(f"unknown region {region!r}", where=f"{where}.{region}", fix=known)
            if not 0 <= frac <= 1:
                raise InputError(f"{frac} is not in [0, 1]", where=f"{where}.{region}")
            together[region] = max(frac, together.get(region, 0.0))
        if math.fsum(frac for _, frac in row.region_fracs) > 1 + _SUM_NOISE:
            raise InputError("the fractions add up to more than 1", where=where)
        if math.fsum(together.values()) > 1 + _SUM_NOISE:
            raise InputError(
                f"with those of the other phase of {row.model!r} the fractions add up to more than 1",
                where=where,
                fix="state the same fractions for both phases: pd_same_region serves them together",
            )


def _check_running(running: Sequence[Running], regions: Sequence[str]) -> None:
    seen: set[tuple[str, str]] = set()
    for index, item in enumerate(running):
        where = f"running[{index}]"
        if item.region not in regions:
            raise InputError(f"unknown region {item.region!r}", where=f"{where}.region", fix=f"known: {list(regions)}")
        if (item.template, item.region) in seen:
            raise InputError(f"{item.template!r} in {item.region!r} appears twice", where=where, fix="add the counts")
        seen.add((item.template, item.region))
        _count(item.count, f"{where}.count")
