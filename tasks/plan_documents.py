"""The documents of a plan: what is rented, what it covers, what changes, what it was made from, and what to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import date, datetime, timedelta
from typing import Any, Final

import numpy as np

from artifacts.canonical import canonical_json, sha256_hex
from artifacts.library import LibrarySnapshot
from coral_core import __version__
from coral_core.allocation.cost_comparison import CostPart
from coral_core.allocation.explain import AllocationExplanation
from coral_core.allocation.limits import Limit
from coral_core.config.allocation_file import allocation_result_to_json
from coral_core.config.headroom import headroom_note, headroom_rows
from coral_core.config.resolve import ResolvedModel, ResolvedScenario
from coral_core.domain.allocation import AllocationProblem, AllocationResult, DemandRow, InstanceCount
from coral_core.domain.hardware import Market, market_name, split_market
from coral_core.domain.model_math import weight_bytes
from coral_core.domain.templates import CapacitySource, ServingTemplate
from coral_core.domain.workload import Phase
from coral_core.units import GB
from tasks.error_bars import (
    cost_comparison,
    cost_parts,
    error_bar_notes,
    serves_alike,
    unprofiled_notes,
    with_error_bars,
)

PLAN_SCHEMA_VERSION: Final = 2
"""1 knew neither markets nor exclusions and preferences; plans of it are still read."""
STALE_PRICES: Final = timedelta(days=180)


def plan_document(
    resolved: ResolvedScenario,
    problem: AllocationProblem,
    result: AllocationResult,
    templates: Mapping[str, ServingTemplate],
    snapshot: LibrarySnapshot,
    *,
    fleet: str,
    now: datetime,
    unrunnable: Collection[tuple[str, Phase]] = (),
) -> dict[str, Any]:
    """What to rent, what it costs and covers, what changes against what runs, and notes. All figures are predicted.

    `unrunnable`: models and phases whose every template is left out because the plan's runtimes cannot run it.
    """
    answer = allocation_result_to_json(result)
    careful = resolved.scenario.capacity.pessimistic
    return {
        "schema_version": PLAN_SCHEMA_VERSION,
        "kind": "predicted",
        "fleet": fleet,
        "scenario": resolved.scenario.name,
        "created_at": now.isoformat(timespec="seconds"),
        "method": result.method,
        **{key: answer[key] for key in answer if key != "instances"},
        "instances": (
            rows := [_instance(item, templates[item.template], problem, resolved) for item in result.instances]
        ),
        "demand": [_demand(row) for row in problem.demand],
        "coverage": (
            coverage := [_coverage(row, problem, result, templates, careful=careful) for row in problem.demand]
        ),
        "changes": _changes(problem, result),
        "notes": _failed_shards(snapshot)
        + _notes(resolved, problem, result, now, unrunnable)
        + _pipelines(result, templates)
        + error_bar_notes(coverage)
        + unprofiled_notes(rows, resolved.scenario.capacity.profiles),
    }


def comparisons_document(
    problem: AllocationProblem,
    result: AllocationResult,
    baselines: Mapping[str, AllocationResult],
    templates: Mapping[str, ServingTemplate],
    *,
    careful: bool,
) -> dict[str, dict[str, Any]]:
    """Each baseline's cost beside the plan's, and whether the error bars of their capacities leave a winner."""

    def parts(answer: AllocationResult) -> list[CostPart]:
        prices = {
            (item.template, item.region): _price_usd_per_h(item, templates[item.template], problem)
            for item in answer.instances
        }
        return cost_parts(answer, templates, prices, careful=careful)

    return {
        name: cost_comparison(parts(result), parts(answer), same_demand=serves_alike(result, answer))
        for name, answer in baselines.items()
    }


def input_record(resolved: ResolvedScenario, snapshot: LibrarySnapshot, problem: AllocationProblem) -> dict[str, Any]:
    """All that the plan was made from, with hashes: the problem can be solved again from this and the library alone."""
    price = [[None if np.isnan(p) else float(p) for p in row] for row in problem.price_usd_per_h]
    scenario = resolved.scenario.model_dump(mode="json")
    manifest = snapshot.manifest
    return {
        "schema_version": PLAN_SCHEMA_VERSION,
        "code_version": __version__,
        "scenario": scenario,
        "library": {
            "name": manifest.library,
            "version": manifest.version,
            "manifest_sha256": manifest_sha256(snapshot),
        },
        "templates": selections(resolved),
        "regions": list(problem.regions),
        "configs": list(problem.configs),
        "price_usd_per_h": price,
        "price_sources": sorted({p.source for p in resolved.catalog.prices.values()}.union(_spot_sources(resolved))),
        "price_as_of": _oldest_price(resolved).isoformat(),
        "available": problem.available.tolist(),
        "demand": [{**asdict(row), "phase": row.phase.value} for row in problem.demand],
        "running": [asdict(running) for running in problem.running],
        "exclusions": [asdict(item) for item in problem.exclusions],
        "preferences": [asdict(item) for item in problem.preferences],
        "spot_configs": list(problem.spot_configs),
        "pools": [asdict(item) for item in problem.pools],
        "churn_k": problem.churn_k,
        "options": asdict(problem.options),
        "headroom": headroom_rows(resolved),
        "input_hashes": {
            "scenario": sha256_hex(canonical_json(scenario)),
            "library manifest": manifest_sha256(snapshot),
            "prices": sha256_hex(canonical_json(price)),
            "availability": sha256_hex(canonical_json(problem.available.tolist())),
            "models": sha256_hex(canonical_json([model.shape for model in resolved.models])),
        },
    }


def manifest_sha256(snapshot: LibrarySnapshot) -> str:
    """What identifies the snapshot's content."""
    return sha256_hex(canonical_json(snapshot.manifest.model_dump()))


def explanation_document(explanation: AllocationExplanation) -> dict[str, Any]:
    """The explanation as JSON values: what binds, what one more node would save, what the next unit costs."""
    return {
        "source": explanation.source,
        "relaxed_objective_usd_per_h": explanation.relaxed_objective_usd_per_h,
        "binding": [_limit(limit) for limit in explanation.binding],
        "shadow_prices": [_limit(limit) for limit in explanation.limits if limit.shadow_usd_per_h > 0],
        "marginal_costs": [
            {
                "model": cost.model,
                "phase": cost.phase.value,
                "unit": cost.unit,
                "usd_per_h_per_unit": cost.usd_per_h_per_unit,
                "missing_frac": cost.missing_frac,
            }
            for cost in explanation.marginal
        ],
    }


def _instance(
    item: InstanceCount, template: ServingTemplate, problem: AllocationProblem, resolved: ResolvedScenario
) -> dict[str, Any]:
    nodes = template.placement.combination
    market = split_market(item.template)[1]
    each = _price_usd_per_h(item, template, problem)
    return {
        "template": item.template,
        "model": template.model,
        "variant": template.variant,
        "phase": template.phase.value,
        "region": item.region,
        "market": market.value,
        "count": item.count,
        "nodes": nodes,
        "stages": [
            {
                "layers": stage.layers,
                "nodes": list(stage.nodes),
                "budget_frac": stage.budget_frac or 1 / len(template.placement.stages),
            }
            for stage in template.placement.stages
        ],
        "throughput_tokens_per_s": template.throughput_tokens_per_s,
        "throughput_requests_per_s": template.throughput_requests_per_s,
        "price_usd_per_h": each,
        "cost_usd_per_h": each * item.count,
        "interruptions_per_h": _interruptions_per_h(nodes, item.region, market, resolved),
        "source": template.source.value,
        "error_frac": template.error_frac,
    }


def _price_usd_per_h(item: InstanceCount, template: ServingTemplate, problem: AllocationProblem) -> float:
    """Of one instance, where it runs and on the market that it is of."""
    market = split_market(item.template)[1]
    prices = problem.price_usd_per_h[problem.regions.index(item.region)]
    nodes = template.placement.combination.items()
    return sum(float(prices[problem.configs.index(market_name(name, market))]) * count for name, count in nodes)


def _interruptions_per_h(
    nodes: Mapping[str, int], region: str, market: Market, resolved: ResolvedScenario
) -> float | None:
    """How often one instance is expected to lose a node to the spot market; None where that is not known."""
    if market is Market.ON_DEMAND or resolved.spot is None:
        return 0.0
    return resolved.spot.losses_per_h(region, nodes)


def _oldest_price(resolved: ResolvedScenario) -> date:
    oldest = min(price.as_of for price in resolved.catalog.prices.values())
    return oldest if resolved.spot is None else min(oldest, resolved.spot.as_of)


def _spot_sources(resolved: ResolvedScenario) -> tuple[str, ...]:
    return () if resolved.spot is None else resolved.spot.sources


def _demand(row: DemandRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "phase": row.phase.value,
        "tokens_per_s": row.tokens_per_s,
        "requests_per_s": row.requests_per_s,
        "on_demand_frac": row.on_demand_frac,
        "spare_instances": row.spare_instances,
        "region_fracs": dict(row.region_fracs),
    }


def _coverage(
    row: DemandRow,
    problem: AllocationProblem,
    result: AllocationResult,
    templates: Mapping[str, ServingTemplate],
    *,
    careful: bool,
) -> dict[str, Any]:
    """Demand against the capacity of all chosen templates that enter the row, in the row's own unit, with error bars.

    `careful`: estimates are at the slow end of their bars already.
    """
    index = {template: i for i, template in enumerate(problem.templates.ids)}
    demand = row.tokens_per_s if row.tokens_per_s is not None else row.requests_per_s
    assert demand is not None
    parts: list[tuple[float, float | None]] = []
    at_slow_end = 0.0
    for item in result.instances:
        i = index[item.template]
        if problem.templates.models[i] != row.model:
            continue
        phase, throughput = problem.templates.phases[i], float(problem.templates.throughput[i]) * item.count
        template = templates[item.template]
        if phase is Phase.AGGREGATED and phase is not row.phase and row.tokens_per_s is not None and row.requests_per_s:
            throughput *= row.tokens_per_s / row.requests_per_s
        elif phase is not row.phase:
            continue
        if careful and template.source is CapacitySource.ESTIMATED:
            at_slow_end += throughput
        else:
            parts.append((throughput, template.error_frac))
    capacity = at_slow_end + sum(throughput for throughput, _ in parts)
    return {
        "model": row.model,
        "phase": row.phase.value,
        "unit": "requests/s" if row.tokens_per_s is None else "tokens/s",
        "demand": demand,
        "capacity": capacity,
        "utilization_frac": min(demand / capacity, 1.0) if capacity else None,
        **with_error_bars(parts, at_slow_end=at_slow_end),
    }


def _changes(problem: AllocationProblem, result: AllocationResult) -> list[dict[str, Any]]:
    """Instances running and planned of every template and region that has either."""
    running = Counter({(item.template, item.region): item.count for item in problem.running})
    planned = Counter({(item.template, item.region): item.count for item in result.instances})
    return [
        {"template": key[0], "region": key[1], "running": running[key], "planned": planned[key]}
        for key in sorted(running | planned)
    ]


def _failed_shards(snapshot: LibrarySnapshot) -> list[str]:
    """A partial library makes plans dearer than need be, and models look unservable that are not."""
    failed = Counter(f"{r.shard.model} {r.shard.phase.value}" for r in snapshot.manifest.failed)
    parts = ", ".join(f"{name} ({count} shards)" for name, count in sorted(failed.items()))
    return [f"the library is partial, this plan may be dearer than need be; failed: {parts}"] if failed else []


def _notes(
    resolved: ResolvedScenario,
    problem: AllocationProblem,
    result: AllocationResult,
    now: datetime,
    unrunnable: Collection[tuple[str, Phase]],
) -> list[str]:
    """What a reader must know beside the figures."""
    unservable = _without_templates(resolved, problem)
    lacking = {model.shape.name: phase.value for model, phase in unservable}
    notes = [
        _unservable(model, phase, resolved, left_out=(model.shape.name, phase) in unrunnable)
        for model, phase in unservable
    ]
    notes += [
        f"{item.model} {item.phase.value}: {item.unserved_frac:.1%} of the demand is not met "
        + (f"since its {lacking[item.model]} cannot be served" if item.model in lacking else "for want of nodes")
        for item in result.shortfall
        if item.unserved_frac > 0 and item.phase in _phases_with_templates(problem, item.model)
    ]
    notes += [
        f"{item.model} {item.phase.value}: {item.after_loss_frac:.1%} of the demand would not be met after the loss of an "
        "instance: there is no spare for it"
        for item in result.shortfall
        if item.spare_frac > 0
    ]
    sold = (~np.isnan(problem.price_usd_per_h)).tolist()
    nowhere = [name for c, name in enumerate(problem.configs) if not any(row[c] for row in sold)]
    if nowhere:
        notes.append(f"no price is known in these regions, so never rented: {', '.join(nowhere)}")
    empty = [region for region, row in zip(problem.regions, sold, strict=True) if not any(row)]
    if empty:
        notes.append(f"none of the configurations is sold in {', '.join(empty)}")
    oldest = _oldest_price(resolved)
    if now.date() - oldest > STALE_PRICES:
        notes.append(f"prices are as old as {oldest} ({(now.date() - oldest).days} days)")
    on_spot = sum(item.count for item in result.instances if split_market(item.template)[1] is Market.SPOT)
    if on_spot and resolved.spot is not None:
        notes.append(
            f"{on_spot} instances run on spot nodes, which may be taken back at any time; "
            f"spot prices are as of {resolved.spot.as_of}"
        )
    if resolved.scenario.capacity.pessimistic:
        notes.append("capacities are the lower ends of their error bars (--pessimistic, `capacity.pessimistic: true`)")
    notes.append(headroom_note(headroom_rows(resolved)))
    apart = [m.shape.name for m in resolved.models if Phase.AGGREGATED not in m.phases]
    if apart:
        notes.append(
            f"only prefill and decode on separate nodes were considered for {', '.join(apart)}; "
            "`phases: [prefill, decode, aggregated]` lets both on the same nodes compete"
        )
    return notes


def _pipelines(result: AllocationResult, templates: Mapping[str, ServingTemplate]) -> list[str]:
    """Replicas whose capacity depends on how the runtime splits its steps."""
    chosen = [templates[item.template] for item in result.instances]
    names = sorted({f"{one.model} {one.phase.value}" for one in chosen if _splits_steps(one)})
    if not names:
        return []
    return [
        (
            f"{', '.join(names)}: replicas in several stages, some of several nodes; they serve what is planned where each "
            "step is computed whole, every node waiting for all of its part, as in the simulator; Coral's own runtime does not yet"
        )
    ]


def _splits_steps(template: ServingTemplate) -> bool:
    stages = template.placement.stages
    return len(stages) > 1 and any(len(stage.nodes) > 1 for stage in stages)


def _without_templates(resolved: ResolvedScenario, problem: AllocationProblem) -> list[tuple[ResolvedModel, Phase]]:
    """Phases of models with demand that not one template serves."""
    by_name = {model.shape.name: model for model in resolved.models}
    return [
        (by_name[row.model], row.phase)
        for row in problem.demand
        if (row.tokens_per_s or row.requests_per_s)
        and row.phase not in _phases_with_templates(problem, row.model)
        and Phase.AGGREGATED not in _phases_with_templates(problem, row.model)
    ]


def _phases_with_templates(problem: AllocationProblem, model: str) -> set[Phase]:
    pairs = set(zip(problem.templates.models, problem.templates.phases, strict=True))
    return {phase for name, phase in pairs if name == model}


def _unservable(model: ResolvedModel, phase: Phase, resolved: ResolvedScenario, *, left_out: bool) -> str:
    """Why no template serves a phase: no runtime runs one, the weights fit nowhere, or no placement meets the bound."""
    weights = min(weight_bytes(model.shape, variant) for variant in model.variants)
    library = resolved.scenario.library
    largest = library.n_max * max(config.memory_bytes for config in resolved.configs)
    head = f"{model.shape.name} {phase.value} cannot be served at all: "
    if left_out:
        return f"{head}the library has templates, and what the plan may rely on can run none of them"
    if weights >= largest:
        return (
            f"{head}its weights take {weights / GB:.0f} GB and the largest combination holds {largest / GB:.0f} GB; "
            "raise library.n_max or add larger configurations"
        )
    slo = model.demand.slo
    bound = {
        Phase.PREFILL: f"TTFT {slo.ttft_s} s",
        Phase.DECODE: f"TPOT {slo.tpot_s} s",
        Phase.AGGREGATED: f"TTFT {slo.ttft_s} s and TPOT {slo.tpot_s} s",
    }[phase]
    return (
        f"{head}no combination of up to {library.n_max} of these nodes holds it within {bound} and the memory limit "
        f"of {library.rho:g} x its size; loosen the bound, raise library.n_max or library.rho, or add configurations"
    )


def _selection(model: ResolvedModel, variant: str) -> dict[str, Any]:
    """Which of a library's templates are the model's, in one variant."""
    return {
        "model": model.shape.name,
        "variant": variant,
        "phases": [phase.value for phase in model.phases],
        "ttft_s": model.demand.slo.ttft_s,
        "tpot_s": model.demand.slo.tpot_s,
    }


def selections(resolved: ResolvedScenario) -> list[dict[str, Any]]:
    """Which of a library's templates are the scenario's, one entry per model and variant."""
    return [_selection(model, variant) for model in resolved.models for variant in model.variants]


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "family": limit.family,
        "what": f"{limit.name[0]} {limit.name[1]}: {limit.used:g} of {limit.limit:g}",
        "shadow_usd_per_h": limit.shadow_usd_per_h,
    }


def chosen_templates(results: Sequence[AllocationResult]) -> list[str]:
    """Ids of the templates that any of the results uses."""
    return sorted({item.template for result in results for item in result.instances})
