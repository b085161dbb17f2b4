"""Plan: templates of a library snapshot -> allocation problem -> cheapest plan, baselines, explanation, record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.canonical import canonical_json, sha256_hex
from artifacts.library import LibrarySnapshot
from artifacts.templates import row_to_template, template_columns
from coral_core import __version__
from coral_core.allocation.baselines.cauchy import cauchy
from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.explain import AllocationExplanation, Limit, explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.why_not import why_not
from coral_core.config.allocation_file import allocation_result_to_json
from coral_core.config.resolve import ResolvedScenario, allocation_problem, resolve_scenario
from coral_core.config.scenario import Scenario
from coral_core.domain.allocation import AllocationProblem, AllocationResult, InstanceCount, Running
from coral_core.domain.templates import ServingTemplate
from coral_core.errors import DataGapError, InputError
from coral_core.report.plan_report import plan_markdown
from tasks.library import build_spec_from_scenario, capacity_inputs

PLAN_SCHEMA_VERSION = 1
BASELINES = {"homo": homo, "homo_joint": homo_joint, "cauchy": cauchy}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """A plan and all that led to it; `plan`, `decision` and `report_md` are the documents to record."""

    problem: AllocationProblem
    result: AllocationResult
    templates: Mapping[str, ServingTemplate]
    plan: Mapping[str, Any]
    decision: Mapping[str, Any]
    report_md: str


def make_plan(
    resolved: ResolvedScenario,
    snapshot: LibrarySnapshot,
    *,
    fleet: str,
    now: datetime,
    running: Sequence[Running] = (),
) -> PlanOutcome:
    """The cheapest plan of a scenario from a library snapshot, verified, beside the baselines.

    Raises DataGapError where the snapshot lacks a model, variant, phase or SLO of the scenario.
    """
    rows = scenario_templates(resolved, snapshot)
    columns = template_columns(rows, [config.name for config in resolved.configs])
    problem = allocation_problem(resolved, columns, running)
    result = solve_allocation(problem)
    baselines = {name: solve(replace(problem, running=())) for name, solve in BASELINES.items()}
    explanation = explain_allocation(problem, result)
    used = [item.template for item in (*result.instances, *(i for r in baselines.values() for i in r.instances))]
    templates = templates_by_id(rows, used)
    plan = _plan_document(resolved, problem, result, templates, fleet=fleet, now=now)
    decision = {
        **_input_record(resolved, snapshot, problem),
        "capacity_sources": sorted(set(rows["source"].to_pylist())),
        "statistics": dict(result.statistics),
        "baselines": {name: allocation_result_to_json(baseline) for name, baseline in baselines.items()},
        "explanation": explanation_document(explanation),
    }
    return PlanOutcome(
        problem=problem,
        result=result,
        templates=templates,
        plan=plan,
        decision=decision,
        report_md=plan_markdown(plan, decision),
    )


def scenario_templates(resolved: ResolvedScenario, snapshot: LibrarySnapshot) -> pa.Table:
    """The snapshot's rows of the scenario's models, variants, phases and SLOs.

    Raises DataGapError where the snapshot was built from other inputs than the scenario's (`stale_inputs`).
    """
    stale = stale_inputs(resolved, snapshot)
    if stale:
        raise DataGapError(
            f"library {snapshot.manifest.library!r} version {snapshot.manifest.version} was built from other inputs: "
            + "; ".join(stale),
            where=f"scenario {resolved.scenario.name}",
            fix="build it again with `coral library build`; unchanged shards are reused",
        )
    rows = snapshot.read(models=[model.shape.name for model in resolved.models])
    wanted = pa.array(np.zeros(rows.num_rows, dtype=bool))
    for model in resolved.models:
        mask = pc.and_(pc.equal(rows["model"], model.shape.name), pc.equal(rows["variant"], model.variant))
        mask = pc.and_(mask, pc.equal(rows["ttft_s"], model.demand.slo.ttft_s))
        mask = pc.and_(mask, pc.equal(rows["tpot_s"], model.demand.slo.tpot_s))
        phases = pa.array([phase.value for phase in model.phases])
        wanted = pc.or_(wanted, pc.and_(mask, pc.is_in(rows["phase"], value_set=phases)))
    return rows.filter(wanted)


def stale_inputs(resolved: ResolvedScenario, snapshot: LibrarySnapshot) -> list[str]:
    """What the snapshot was built from that differs from the scenario; empty where a plan may rest on it.

    Compared by hash of each capacity table, so prices, demand and availability never make a library stale.
    """
    manifest = snapshot.manifest
    spec = build_spec_from_scenario(resolved)
    stale = [
        f"{name} is {manifest.parameters.get(name)!r}, not {getattr(spec, name)!r}"
        for name in ("n_max", "rho")
        if manifest.parameters.get(name) != getattr(spec, name)
    ]
    for name, digest in capacity_inputs(spec).items():
        if name not in manifest.inputs:
            stale.append(f"{name} is missing")
        elif manifest.inputs[name] != digest:
            stale.append(f"{name} has changed")
    return stale


def templates_by_id(rows: pa.Table, ids: Sequence[str]) -> dict[str, ServingTemplate]:
    """The templates with these ids."""
    chosen = rows.filter(pc.is_in(rows["template_id"], value_set=pa.array(sorted(set(ids)), pa.string())))
    return {row["template_id"]: row_to_template(row) for row in chosen.to_pylist()}


def running_from_plan(plan: Mapping[str, Any]) -> tuple[Running, ...]:
    """The instances of a recorded plan as the running fleet of the next one."""
    return tuple(
        Running(template=item["template"], region=item["region"], count=item["count"]) for item in plan["instances"]
    )


def replay_plan(decision: Mapping[str, Any], snapshot: LibrarySnapshot) -> AllocationResult:
    """Solve the recorded problem anew, from the recorded inputs and the same library snapshot."""
    return solve_allocation(recorded_problem(decision, snapshot))


def recorded_problem(decision: Mapping[str, Any], snapshot: LibrarySnapshot) -> AllocationProblem:
    """The problem that a recorded decision solved. Raises InputError where `snapshot` is not the one it used."""
    if decision["library"]["manifest_sha256"] != manifest_sha256(snapshot):
        raise InputError(
            f"library {snapshot.manifest.library!r} version {snapshot.manifest.version} is not the one of the plan",
            where="decision.library",
            fix="use the store in which the plan was made",
        )
    resolved = resolve_scenario(Scenario.model_validate(decision["scenario"]))
    columns = template_columns(scenario_templates(resolved, snapshot), decision["configs"])
    running = [Running(**item) for item in decision["running"]]
    recorded = [[np.nan if price is None else price for price in row] for row in decision["price_usd_per_h"]]
    available = np.array(decision["available"], dtype=np.int64)
    return replace(
        allocation_problem(resolved, columns, running, available=available),
        price_usd_per_h=np.array(recorded, dtype=np.float64),
        available=available,
    )


def manifest_sha256(snapshot: LibrarySnapshot) -> str:
    """What identifies the snapshot's content."""
    return sha256_hex(canonical_json(snapshot.manifest.model_dump()))


def _plan_document(
    resolved: ResolvedScenario,
    problem: AllocationProblem,
    result: AllocationResult,
    templates: Mapping[str, ServingTemplate],
    *,
    fleet: str,
    now: datetime,
) -> dict[str, Any]:
    answer = allocation_result_to_json(result)
    return {
        "schema_version": PLAN_SCHEMA_VERSION,
        "kind": "predicted",
        "fleet": fleet,
        "scenario": resolved.scenario.name,
        "created_at": now.isoformat(timespec="seconds"),
        "method": result.method,
        **{key: answer[key] for key in answer if key != "instances"},
        "instances": [_instance(item, templates[item.template], problem) for item in result.instances],
        "demand": [
            {
                "model": row.model,
                "phase": row.phase.value,
                "tokens_per_s": row.tokens_per_s,
                "requests_per_s": row.requests_per_s,
            }
            for row in problem.demand
        ],
    }


def _instance(item: InstanceCount, template: ServingTemplate, problem: AllocationProblem) -> dict[str, Any]:
    nodes = template.placement.combination
    prices = problem.price_usd_per_h[problem.regions.index(item.region)]
    each = sum(float(prices[problem.configs.index(name)]) * count for name, count in nodes.items())
    return {
        "template": item.template,
        "model": template.model,
        "variant": template.variant,
        "phase": template.phase.value,
        "region": item.region,
        "count": item.count,
        "nodes": nodes,
        "stages": [{"layers": stage.layers, "nodes": list(stage.nodes)} for stage in template.placement.stages],
        "throughput_tokens_per_s": template.throughput_tokens_per_s,
        "throughput_requests_per_s": template.throughput_requests_per_s,
        "price_usd_per_h": each,
        "cost_usd_per_h": each * item.count,
        "source": template.source.value,
        "error_frac": template.error_frac,
    }


def _input_record(resolved: ResolvedScenario, snapshot: LibrarySnapshot, problem: AllocationProblem) -> dict[str, Any]:
    """All that the plan was made from, with hashes: enough to solve the same problem again."""
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
        "regions": list(problem.regions),
        "configs": list(problem.configs),
        "price_usd_per_h": price,
        "price_sources": sorted({p.source for p in resolved.catalog.prices.values()}),
        "available": problem.available.tolist(),
        "running": [{"template": r.template, "region": r.region, "count": r.count} for r in problem.running],
        "churn_k": problem.churn_k,
        "input_hashes": {
            "scenario": sha256_hex(canonical_json(scenario)),
            "library manifest": manifest_sha256(snapshot),
            "prices": sha256_hex(canonical_json(price)),
            "availability": sha256_hex(canonical_json(problem.available.tolist())),
            "models": sha256_hex(canonical_json([model.shape for model in resolved.models])),
        },
    }


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


def explain_template(decision: Mapping[str, Any], snapshot: LibrarySnapshot, template: str) -> dict[str, Any]:
    """Why a template is, or is not, in a recorded plan. Raises InputError for a template the library lacks."""
    problem = recorded_problem(decision, snapshot)
    answer = asdict(why_not(problem, solve_allocation(problem), template))
    return {**answer, "reasons": list(answer["reasons"])}


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "family": limit.family,
        "what": f"{limit.name[0]} {limit.name[1]}: {limit.used:g} of {limit.limit:g}",
        "shadow_usd_per_h": limit.shadow_usd_per_h,
    }
