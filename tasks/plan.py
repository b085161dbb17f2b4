"""Plan: templates of a library snapshot -> allocation problem -> cheapest plan, baselines, explanation, record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.library import LibrarySnapshot
from artifacts.templates import row_to_template, template_columns
from coral_core.allocation import explain_allocation, homo, homo_joint, solve_allocation, why_not
from coral_core.allocation.baselines.cauchy import UnsupportedFamilyError, cauchy
from coral_core.allocation.policies import POLICIES
from coral_core.allocation.warm_up import warm_up
from coral_core.allocation.why_not import not_a_choice
from coral_core.config.allocation_file import allocation_result_to_json
from coral_core.config.resolve import ResolvedScenario, allocation_problem
from coral_core.config.spot import with_spot_twins
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    AllocationResult,
    DemandRow,
    Exclusion,
    Pool,
    Preference,
    Running,
)
from coral_core.domain.hardware import split_market
from coral_core.domain.launch import Runtime
from coral_core.domain.templates import ServingTemplate
from coral_core.domain.workload import Phase
from coral_core.engine.runnable import ModelFacts
from coral_core.errors import DataGapError, InputError
from coral_core.report.page import page_or_none
from coral_core.report.plan_page import plan_html
from coral_core.report.plan_report import plan_markdown
from tasks.library import build_spec_from_scenario, capacity_inputs
from tasks.plan_documents import (
    PLAN_SCHEMA_VERSION,
    chosen_templates,
    comparisons_document,
    explanation_document,
    input_record,
    manifest_sha256,
    plan_document,
    selections,
)
from tasks.runtimes import Scope, made_for_runtimes, recorded_scope, runtimes_document, scope_of, state_runtimes

BASELINES = {"homo": homo, "homo_joint": homo_joint, "cauchy": cauchy}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """A plan and all that led to it; `plan`, `decision` and the reports are the documents to record.

    `report_html` is None where it could not be made.
    """

    problem: AllocationProblem
    result: AllocationResult
    templates: Mapping[str, ServingTemplate]
    plan: Mapping[str, Any]
    decision: Mapping[str, Any]
    report_md: str
    report_html: str | None


def make_plan(
    resolved: ResolvedScenario,
    snapshot: LibrarySnapshot,
    *,
    fleet: str,
    now: datetime,
    running: Sequence[Running] = (),
    adjust: Callable[[AllocationProblem], AllocationProblem] | None = None,
    runtimes: Sequence[Runtime] | None = None,
    notes: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
) -> PlanOutcome:
    """The cheapest plan of a scenario from a library snapshot, verified, beside the baselines.

    `adjust` puts what was observed into the scenario's problem; `notes` and `inputs` go into the plan and its decision. Only
    templates that one of `runtimes` can run are used (default: the scenario's; where it names none, all), and what that costs
    is stated. Raises DataGapError where the snapshot lacks a model, variant, phase or SLO of the scenario.
    """
    rows = scenario_templates(resolved, snapshot, for_runtimes=True)
    facts = {model.shape.name: ModelFacts.of(model.shape) for model in resolved.models}
    scope = scope_of(rows, facts, resolved.scenario.runtimes if runtimes is None else runtimes)

    def problem_of(usable: pa.Table) -> AllocationProblem:
        columns = template_columns(usable, [config.name for config in resolved.configs])
        asked = allocation_problem(resolved, columns, running)
        return asked if adjust is None else adjust(asked)

    problem = problem_of(scope.usable)
    warm_up(POLICIES["coral"], problem)  # its solve time, which the decision states, is not that of a compiler
    result = solve_allocation(problem)
    beside = runtimes_document(
        scope,
        result,
        lambda usable: solve_allocation(problem_of(usable)),
        weights=[row.weight for row in problem.demand],
    )
    baselines, left_out = _baselines(problem)
    templates = templates_by_id(rows, chosen_templates([result, *baselines.values()]))
    plan = plan_document(
        resolved, problem, result, templates, snapshot, fleet=fleet, now=now, unrunnable=scope.left_out
    )
    state_runtimes(plan, scope, beside)
    plan["notes"] = [*plan["notes"], *notes]
    decision = {
        **input_record(resolved, snapshot, problem),
        "capacity_sources": sorted(set(rows["source"].to_pylist())),
        "statistics": dict(result.statistics),
        "baselines": {name: allocation_result_to_json(baseline) for name, baseline in baselines.items()},
        "baselines_left_out": left_out,
        "comparisons": comparisons_document(
            problem, result, baselines, templates, careful=resolved.scenario.capacity.pessimistic
        ),
        "explanation": explanation_document(explain_allocation(problem, result)),
        "runtimes": beside,
        **(inputs or {}),
    }
    return PlanOutcome(
        problem=problem,
        result=result,
        templates=templates,
        plan=plan,
        decision=decision,
        report_md=plan_markdown(plan, decision),
        report_html=page_or_none(lambda: plan_html(plan, decision)),
    )


def _baselines(problem: AllocationProblem) -> tuple[dict[str, AllocationResult], dict[str, str]]:
    """The answers of the baselines, and why others have none: they cannot keep what the problem asks for."""
    answers: dict[str, AllocationResult] = {}
    left_out: dict[str, str] = {}
    for name, solve in BASELINES.items():
        try:
            answers[name] = solve(problem)
        except UnsupportedFamilyError as error:
            left_out[name] = error.what
    return answers, left_out


def scenario_templates(
    resolved: ResolvedScenario, snapshot: LibrarySnapshot, *, for_runtimes: bool = False
) -> pa.Table:
    """The snapshot's rows of the scenario's models, variants, phases and SLOs; `for_runtimes`: those made for one too.

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
    return selected_templates(selections(resolved), snapshot, for_runtimes=for_runtimes)


def selected_templates(
    chosen: Sequence[Mapping[str, Any]], snapshot: LibrarySnapshot, *, for_runtimes: bool = False
) -> pa.Table:
    """The snapshot's rows that any of the selections names: model, variant, phases, SLO.

    Those made for a runtime stand beside the best of all and never give more, so they are left out unless asked for.
    """
    rows = selected_rows(chosen, snapshot.read(models=list(dict.fromkeys(item["model"] for item in chosen))))
    return rows if for_runtimes else rows.filter(pc.invert(made_for_runtimes(rows)))


def selected_rows(chosen: Sequence[Mapping[str, Any]], rows: pa.Table) -> pa.Table:
    """Those of a library's rows that any of the selections names."""
    wanted = pa.array(np.zeros(rows.num_rows, dtype=bool))
    for item in chosen:
        mask = pc.is_in(rows["phase"], value_set=pa.array(item["phases"]))
        for name in ("model", "variant", "ttft_s", "tpot_s"):
            mask = pc.and_(mask, pc.equal(rows[name], item[name]))
        wanted = pc.or_(wanted, mask)
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
    made_for = manifest.parameters.get("runtimes")
    known = made_for if isinstance(made_for, list) else []
    lacking = [runtime.value for runtime in spec.runtimes if runtime.value not in known]
    if lacking:
        stale.append(f"it has no templates made for {', '.join(lacking)}")
    built_by = manifest.parameters.get("method")
    if built_by != spec.method and "lattice-free" in (built_by, spec.method):  # the others have the same optimum
        stale.append(f"method is {built_by!r}, not {spec.method!r}")
    for name, digest in capacity_inputs(spec).items():
        if name not in manifest.inputs:
            stale.append(f"{name} is missing")
        elif manifest.inputs[name] != digest:
            stale.append(f"{name} has changed")
    return stale


def templates_by_id(rows: pa.Table, ids: Sequence[str]) -> dict[str, ServingTemplate]:
    """The library's templates with these ids; an id may name the market, which the library does not know."""
    of_library = {name: split_market(name)[0] for name in ids}
    wanted = pa.array(sorted(set(of_library.values())), pa.string())
    chosen = rows.filter(pc.is_in(rows["template_id"], value_set=wanted))
    found = {row["template_id"]: row_to_template(row) for row in chosen.to_pylist()}
    return {name: found[library_id] for name, library_id in of_library.items() if library_id in found}


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
    if decision["schema_version"] > PLAN_SCHEMA_VERSION:
        raise InputError(
            f"the plan is of schema {decision['schema_version']}, this version reads up to {PLAN_SCHEMA_VERSION}",
            where="decision.schema_version",
            fix="use the version of Coral that made it",
        )
    spot = decision.get("spot_configs", ())  # absent in plans of schema 1, as are the families below
    own = [name for name in decision["configs"] if name not in spot]
    columns = template_columns(_recorded_scope(decision, snapshot).usable, own)
    prices = [[np.nan if price is None else price for price in row] for row in decision["price_usd_per_h"]]
    return AllocationProblem(
        regions=tuple(decision["regions"]),
        configs=tuple(decision["configs"]),
        available=np.array(decision["available"], dtype=np.int64),
        price_usd_per_h=np.array(prices, dtype=np.float64),
        templates=with_spot_twins(columns, own, [split_market(name)[0] for name in spot]) if spot else columns,
        demand=tuple(_demand_row(row) for row in decision["demand"]),
        running=tuple(Running(**item) for item in decision["running"]),
        exclusions=tuple(Exclusion(**item) for item in decision.get("exclusions", ())),
        preferences=tuple(Preference(**item) for item in decision.get("preferences", ())),
        spot_configs=tuple(spot),
        pools=tuple(Pool(**{**item, "units": tuple(map(tuple, item["units"]))}) for item in decision.get("pools", ())),
        churn_k=decision["churn_k"],
        options=AllocationOptions(**decision["options"]),
    )


def _demand_row(row: Mapping[str, Any]) -> DemandRow:
    regions = tuple((region, frac) for region, frac in row.get("region_fracs", ()))
    return DemandRow(**{**row, "phase": Phase(row["phase"]), "region_fracs": regions})


def _recorded_scope(decision: Mapping[str, Any], snapshot: LibrarySnapshot) -> Scope:
    return recorded_scope(
        selected_templates(decision["templates"], snapshot, for_runtimes="runtimes" in decision),
        decision.get("runtimes"),
    )


def explain_template(decision: Mapping[str, Any], snapshot: LibrarySnapshot, template: str) -> dict[str, Any]:
    """Why a template is, or is not, in a recorded plan. Raises InputError for a template the library lacks.

    One that none of the plan's runtimes can run was not among its choices: the answer then has no figures of the plan.
    """
    problem = recorded_problem(decision, snapshot)
    against = _recorded_scope(decision, snapshot).against(split_market(template)[0])
    if against:
        return {**asdict(not_a_choice(template)), "reasons": [f"not runnable because {text}" for text in against]}
    answer = asdict(why_not(problem, solve_allocation(problem), template))
    return {**answer, "reasons": list(answer["reasons"])}
