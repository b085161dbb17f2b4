"""The file format of `coral allocation solve`: people's own tables in, an allocation out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coral_core.allocation.check import MAX_COUNT, check_problem
from coral_core.config.strict_json import first_error, parse_json, place_of, read_text
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    AllocationResult,
    DemandRow,
    Exclusion,
    Pool,
    Preference,
    Running,
    Shortfall,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.errors import InputError

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
Name = Annotated[str, Field(min_length=1)]
PhaseName = Literal["prefill", "decode", "aggregated"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class _Nodes(_Strict):
    available: Count
    price_usd_per_h: Amount


class _Template(_Strict):
    id: Name
    model: Name
    phase: PhaseName
    variant: Name | None = None
    nodes: Annotated[dict[Name, Count], Field(min_length=1)]
    throughput_tokens_per_s: Amount | None = None
    throughput_requests_per_s: Amount | None = None


class _Demand(_Strict):
    model: Name
    phase: PhaseName
    tokens_per_s: Amount | None = None
    requests_per_s: Amount | None = None
    weight: Amount = 1.0
    min_instances: Count = 0
    max_instances: Count | None = None
    on_demand_frac: Annotated[float, Field(ge=0, le=1)] = 0.0
    spare_instances: Annotated[int, Field(ge=0, le=1)] = 0
    region_fracs: dict[Name, Annotated[float, Field(ge=0, le=1)]] = {}


class _Running(_Strict):
    template: Name
    region: Name
    count: Count


class _Exclusion(_Strict):
    model: Name | None = None
    config: Name | None = None
    region: Name | None = None


class _Preference(_Exclusion):
    price_factor: Annotated[float, Field(gt=0, le=1e15)]


class _Options(_Strict):
    pd_same_region: bool = False
    budget_usd_per_h: Amount | None = None
    gap_frac: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    time_limit_s: Annotated[float, Field(gt=0)] = 60.0
    reduce: bool = True
    solver: Literal["auto", "gurobi", "highs"] = "auto"


class _Pool(_Strict):
    name: Name
    region: Name
    limit: Amount
    units: dict[Name, Amount]


class _Problem(_Strict):
    regions: dict[Name, dict[Name, _Nodes]]
    templates: list[_Template]
    demand: list[_Demand]
    running: list[_Running] = []
    exclusions: list[_Exclusion] = []
    preferences: list[_Preference] = []
    spot_configs: list[Name] = []
    pools: list[_Pool] = []
    churn_k: Amount = 0.0
    options: _Options = _Options()


def read_allocation_file(path: Path) -> tuple[list[AllocationProblem], bool]:
    """The problems of a file (`-`: standard input), and whether it holds a list (all or nothing) or one problem.

    Raises InputError whose place is `file[item]: key path`, or `file:line:column` where it is not JSON.
    """
    document = parse_json(read_text(path), where=place_of(path))
    was_list = isinstance(document, list)
    items = document if isinstance(document, list) else [document]
    problems = []
    for index, item in enumerate(items):
        try:
            problems.append(_problem(item))
        except InputError as error:
            place = f"{place_of(path)}[{index}]" if was_list else place_of(path)
            raise InputError(error.what, where=f"{place}: {error.where}".rstrip(": "), fix=error.fix) from None
    return problems, was_list


def _problem(item: object) -> AllocationProblem:
    if not isinstance(item, dict):
        raise InputError("a problem must be a JSON object")
    try:
        data = _Problem.model_validate(item)
    except ValidationError as error:
        where, what = first_error(error)
        raise InputError(what, where=where) from None
    regions = tuple(data.regions)
    named = [name for nodes in data.regions.values() for name in nodes]
    configs = tuple(dict.fromkeys([*named, *(name for template in data.templates for name in template.nodes)]))
    problem = AllocationProblem(
        regions=regions,
        configs=configs,
        available=_table(data, regions, configs, "available", missing=0).astype(np.int64),
        price_usd_per_h=_table(data, regions, configs, "price_usd_per_h", missing=float("nan")),
        templates=_columns(data.templates, configs),
        demand=tuple(
            DemandRow(  # the same names on both sides
                **{**row.model_dump(), "phase": Phase(row.phase), "region_fracs": tuple(row.region_fracs.items())}
            )
            for row in data.demand
        ),
        running=tuple(Running(template=x.template, region=x.region, count=x.count) for x in data.running),
        exclusions=tuple(Exclusion(**item.model_dump()) for item in data.exclusions),
        preferences=tuple(Preference(**item.model_dump()) for item in data.preferences),
        spot_configs=tuple(data.spot_configs),
        pools=tuple(
            Pool(name=pool.name, region=pool.region, limit=pool.limit, units=tuple(pool.units.items()))
            for pool in data.pools
        ),
        churn_k=data.churn_k,
        options=AllocationOptions(**data.options.model_dump()),
    )
    check_problem(problem)
    return problem


def _table(
    data: _Problem, regions: tuple[str, ...], configs: tuple[str, ...], field: str, *, missing: float
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    table = np.full((len(regions), len(configs)), missing, dtype=np.float64)
    column = {name: c for c, name in enumerate(configs)}
    for r, region in enumerate(regions):
        for name, nodes in data.regions[region].items():
            table[r, column[name]] = getattr(nodes, field)
    return table


def _columns(templates: list[_Template], configs: tuple[str, ...]) -> TemplateColumns:
    column = {name: c for c, name in enumerate(configs)}
    nodes = np.zeros((len(templates), len(configs)), dtype=np.int64)
    for t, template in enumerate(templates):
        for name, count in template.nodes.items():
            nodes[t, column[name]] = count
    return TemplateColumns(
        ids=tuple(template.id for template in templates),
        models=tuple(template.model for template in templates),
        phases=tuple(Phase(template.phase) for template in templates),
        nodes=nodes,
        throughput=np.array([_throughput(i, template) for i, template in enumerate(templates)], dtype=np.float64),
        variants=tuple(template.variant or "" for template in templates) if any(t.variant for t in templates) else None,
    )


def _throughput(index: int, template: _Template) -> float:
    tokens, requests = template.throughput_tokens_per_s, template.throughput_requests_per_s
    aggregated = template.phase == "aggregated"
    own, other = ("requests", "tokens") if aggregated else ("tokens", "requests")
    if (tokens if aggregated else requests) is not None:
        raise InputError(
            f"template {template.id!r} of phase {template.phase} has its throughput in {own}_per_s only",
            where=f"templates[{index}].throughput_{other}_per_s",
        )
    value = requests if aggregated else tokens
    if value is None:
        raise InputError(
            f"template {template.id!r} of phase {template.phase} needs it",
            where=f"templates[{index}].throughput_{own}_per_s",
        )
    return value


def allocation_result_to_json(result: AllocationResult) -> dict[str, Any]:
    """The answer as a JSON object; `shortfall` has one entry per demand row in order, zero fractions included.

    `floor_deficit` is there only where a floor could not be met: row index, model, phase, instances missing;
    `preference_usd_per_h` and a row's `spare_frac` only where they are not zero.
    """
    answer: dict[str, Any] = {
        "status": result.status.value,
        "cost_usd_per_h": result.cost_usd_per_h,
        "churn_usd_per_h": result.churn_usd_per_h,
        "objective_usd_per_h": result.objective_usd_per_h,
        "bound_usd_per_h": result.bound_usd_per_h,
        "gap_frac": result.gap_frac,
        "instances": [
            {"template": item.template, "region": item.region, "count": item.count} for item in result.instances
        ],
        "shortfall": [_shortfall(item) for item in result.shortfall],
    }
    if result.preference_usd_per_h:
        answer["preference_usd_per_h"] = result.preference_usd_per_h
    if result.floor_deficit:
        answer["floor_deficit"] = _deficit(result.floor_deficit, result.shortfall)
    return answer


def _shortfall(item: Shortfall) -> dict[str, Any]:
    unit = "requests_per_s" if item.phase is Phase.AGGREGATED else "tokens_per_s"
    stated = {"model": item.model, "phase": item.phase.value, unit: getattr(item, unit), "frac": item.frac}
    return stated | ({"spare_frac": item.spare_frac} if item.spare_frac else {})


def _deficit(deficit: Mapping[int, int], rows: tuple[Shortfall, ...]) -> list[dict[str, Any]]:
    return [
        {"model": rows[i].model, "phase": rows[i].phase.value, "instances": missing} for i, missing in deficit.items()
    ]
