"""Policies x seeds of a scenario: plan, simulate, compare; tables, one JSON document, and a report.

Costs and solve times come from the plans (predicted, at list prices), service from the simulator (simulated). A policy's
plans do not depend on the seed, which draws the requests; confidence intervals are over seeds, and ratios of goodput are
formed per seed, for all policies meet the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from coral_core import __version__
from coral_core.allocation.cost_comparison import CostPart
from coral_core.allocation.policies import Policy
from coral_core.config.headroom import headroom_note, headroom_rows
from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.workload import Phase
from coral_core.errors import CoralError
from coral_core.report.intervals import CONFIDENCE_FRAC, interval
from coral_core.report.published import PUBLISHED, SOURCE
from coral_core.sim import Latencies, ModelMetrics, Routing
from tasks.error_bars import cost_comparison, cost_parts, serves_alike
from tasks.evaluation_facts import evaluation_facts, latency_rows
from tasks.policy_plans import PolicyPlans, instance_counts, plan_epochs, template_prices
from tasks.replay import Replay, fleet_of, replay, why_not_simulated
from tasks.template_source import TemplateSource

SCHEMA_VERSION: Final = 1
SUBJECTS: Final = ("coral", "coral_paper")
"""Policies that others are compared with."""
KINDS: Final = {
    "cost_usd_per_h": "predicted",
    "provisioning_usd_per_h": "predicted",
    "startup_usd_per_h": "predicted",
    "shortfall_frac": "predicted",
    "solve_s": "measured on this machine",
    "billed_usd_per_h": "simulated",
    "goodput_tokens_per_s": "simulated",
    "attainment_frac": "simulated",
    "ttft": "simulated",
    "tpot": "simulated",
}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`document` is the summary, `tables` the figures behind it.

    Tables: epochs, costs, instances (by plan), service (by run), latencies (distributions, of the first seed's run).
    """

    document: Row
    tables: Mapping[str, list[Row]]


def evaluate(
    source: TemplateSource,
    policies: Mapping[str, Policy],
    seeds: Sequence[int],
    *,
    utilization: Mapping[Phase, float] | None = None,
    routing: Routing = Routing.WEIGHTED_ROUND_ROBIN,
    on_step: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Evaluate the policies on the scenario's requests of each seed.

    The headroom in the document holds for all of them: capacities are planned the same, whoever chooses.
    A policy that fails is named, with its reason, in the document's `failed`, and is in no figure; where all fail, the
    first failure is raised.
    """
    resolved = source.resolved
    reason = why_not_simulated(resolved)
    tables: dict[str, list[Row]] = {"epochs": [], "costs": [], "instances": [], "service": [], "latencies": []}
    summaries: dict[str, Row] = {}
    planned: dict[str, PolicyPlans] = {}
    failures: dict[str, CoralError] = {}
    for name, policy in policies.items():
        try:
            on_step(f"{name}: planning {resolved.scenario.epochs.count} epochs")
            plans = plan_epochs(source, policy, utilization=utilization)
            runs: list[Replay] = []
            if not reason:
                fleet = fleet_of(resolved, plans)
                for seed in seeds:
                    on_step(f"{name}: simulating seed {seed}")
                    runs.append(replay(resolved, plans, seed=seed, fleet=fleet, routing=routing))
        except CoralError as error:
            on_step(f"{name}: failed: {error}")
            failures[name] = error
            continue
        tables["epochs"] += _epoch_rows(plans)
        tables["costs"] += _cost_rows(resolved, plans)
        tables["instances"] += _instance_rows(resolved, plans)
        tables["service"] += [row for run in runs for row in _service_rows(run)]
        tables["latencies"] += [row for run in runs[:1] for row in latency_rows(run)]
        summaries[name] = _summary(plans, runs, reason)
        planned[name] = plans
    if not summaries and failures:
        raise next(iter(failures.values()))
    headroom = headroom_rows(resolved, utilization)
    utilizations = {**resolved.scenario.capacity.max_utilization_frac, **(utilization or {})}
    document = {
        "schema_version": SCHEMA_VERSION,
        "code_version": __version__,
        "scenario": resolved.scenario.name,
        "inputs": resolved.scenario.model_dump(mode="json"),
        "max_utilization_frac": {phase.value: utilizations.get(phase, 1.0) for phase in Phase},
        "headroom": headroom,
        "headroom_note": headroom_note(headroom),
        "routing": routing.value,
        "seeds": list(seeds),
        "epochs": resolved.scenario.epochs.count,
        "kinds": KINDS,
        "confidence_frac": CONFIDENCE_FRAC,
        "policies": summaries,
        "failed": {name: str(error) for name, error in failures.items()},
        "ratios": {
            subject: {
                name: {
                    **_cost_comparison(resolved, planned[subject], planned[name]),
                    **_ratio(resolved, summaries, subject, name),
                }
                for name in summaries
                if name != subject
            }
            for subject in SUBJECTS
            if subject in summaries
        },
        "published_source": SOURCE,
        "supply_nodes": source.supply_at(utilization or {}).sum(axis=(1, 2)).tolist(),
        **evaluation_facts(source),
    }
    return Evaluation(document=document, tables=tables)


def _epoch_rows(plans: PolicyPlans) -> list[Row]:
    rows = []
    for epoch, plan in enumerate(plans.epochs):
        counts, result = instance_counts(plans, epoch), plan.result
        rows.append(
            {
                "policy": plans.policy,
                "epoch": epoch,
                "provisioning_usd_per_h": result.cost_usd_per_h,
                "startup_usd_per_h": result.churn_usd_per_h,
                "cost_usd_per_h": result.objective_usd_per_h,
                "bound_usd_per_h": result.bound_usd_per_h,
                "status": result.status.value,
                "shortfall_frac": max((item.frac for item in result.shortfall), default=0.0),
                "solve_s": plan.solve_s,
                **asdict(counts),
            }
        )
    return rows


def _cost_rows(resolved: ResolvedScenario, plans: PolicyPlans) -> list[Row]:
    """By epoch, model and phase; only of templates that the library holds (a fixed pool is one, whole)."""
    prices = template_prices(resolved, plans)
    rows: list[Row] = []
    for epoch, plan in enumerate(plans.epochs):
        sums: dict[tuple[str, str], list[float]] = {}
        for key, count in plan.counts.items():
            if key not in prices:
                continue
            template = plans.templates[key[0]]
            total = sums.setdefault((template.model, template.phase.value), [0.0, 0, 0])
            mixed = len(template.placement.combination) > 1
            for at, value in enumerate((count * prices[key], count, count * mixed)):
                total[at] += value
        rows += [
            {
                "policy": plans.policy,
                "epoch": epoch,
                "model": model,
                "phase": phase,
                "provisioning_usd_per_h": total[0],
                "instances": int(total[1]),
                "mixed_instances": int(total[2]),
            }
            for (model, phase), total in sorted(sums.items())
        ]
    return rows


def _instance_rows(resolved: ResolvedScenario, plans: PolicyPlans) -> list[Row]:
    prices = template_prices(resolved, plans)
    rows = []
    for epoch, plan in enumerate(plans.epochs):
        for (name, region), count in sorted(plan.counts.items()):
            template = plans.templates.get(name)
            rows.append(
                {
                    "policy": plans.policy,
                    "epoch": epoch,
                    "template": name,
                    "region": region,
                    "count": count,
                    "model": template.model if template else None,
                    "phase": template.phase.value if template else None,
                    "stages": [
                        {"layers": stage.layers, "nodes": list(stage.nodes)} for stage in template.placement.stages
                    ]
                    if template
                    else None,
                    "price_usd_per_h": prices.get((name, region)),
                }
            )
    return rows


def _service_rows(run: Replay) -> list[Row]:
    """By epoch and model, `*` for all models; epoch None is the whole run."""
    rows = []
    for epoch, metrics in [*enumerate(run.epochs), (None, run.whole)]:
        for name, one in metrics.items():
            rows.append({"policy": run.policy, "seed": run.seed, "epoch": epoch, "model": name, **_service(one)})
    return rows


def _service(one: ModelMetrics) -> Row:
    return {
        "offered_requests": one.offered_requests,
        "offered_tokens_per_s": one.offered_tokens_per_s,
        "goodput_tokens_per_s": one.goodput_tokens_per_s,
        "attainment_frac": _known(one.attainment_frac),
        "throughput_tokens_per_s": one.throughput_tokens_per_s,
        **_percentiles("ttft", one.ttft),
        **_percentiles("tpot", one.tpot),
        "failed_requests": one.failed_requests,
        "rejected_requests": one.rejected_requests,
        "unfinished_requests": one.unfinished_requests,
    }


def _percentiles(name: str, latencies: Latencies) -> Row:
    return {f"{name}_p{percent:g}_s": _known(value) for percent, value in latencies.percentile_s.items()}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _summary(plans: PolicyPlans, runs: Sequence[Replay], reason: str) -> Row:
    """One policy: means over epochs of its plans, and over seeds of its runs."""
    epochs = _epoch_rows(plans)
    names = ("cost_usd_per_h", "provisioning_usd_per_h", "startup_usd_per_h")
    sizes = ("instances", "mixed_instances", "nodes")
    whole = [run.whole["*"] for run in runs]
    goodput = interval([one.goodput_tokens_per_s for one in whole])
    attainment = interval([one.attainment_frac for one in whole])
    notes = sorted({note for run in runs for note in run.notes})
    return {
        **{name: fmean(row[name] for row in epochs) for name in names},
        **{name: interval([row[name] for row in epochs]).mean for name in sizes},
        "goodput_tokens_per_s": goodput.mean,
        "attainment_frac": attainment.mean,
        "offered_tokens_per_s": interval([one.offered_tokens_per_s for one in whole]).mean,
        "without_handover_attainment_frac": interval([run.without_handover["*"].attainment_frac for run in runs]).mean,
        "billed_usd_per_h": interval([fmean(run.billed_usd_per_h) for run in runs]).mean,
        "shortfall_frac": max(row["shortfall_frac"] for row in epochs),
        "solve_s": {"mean": fmean(row["solve_s"] for row in epochs), "max": max(row["solve_s"] for row in epochs)},
        "library_method": plans.method,
        "intervals": {"goodput_tokens_per_s": asdict(goodput), "attainment_frac": asdict(attainment)},
        "goodput_by_seed_tokens_per_s": [one.goodput_tokens_per_s for one in whole],
        "models": {
            model: {
                name: interval([_service(run.whole[model])[name] for run in runs]).mean
                for name in _service(runs[0].whole[model])
            }
            for model in (runs[0].whole if runs else ())
            if model != "*"
        },
        "digests": [run.digest for run in runs],
        "notes": [*notes, *([f"not simulated: {reason}"] if reason else [])],
    }


def _ratio(resolved: ResolvedScenario, summaries: Mapping[str, Row], subject: str, name: str) -> Row:
    """The subject against another policy: how much dearer that one is, how much more goodput the subject has."""
    ours, theirs = summaries[subject], summaries[name]
    by_seed = list(
        zip(ours["goodput_by_seed_tokens_per_s"], theirs["goodput_by_seed_tokens_per_s"], strict=True),
    )
    goodput = interval([_quotient(a, b) for a, b in by_seed])
    cost = _quotient(theirs["cost_usd_per_h"], ours["cost_usd_per_h"])
    per_usd = None if cost is None else interval([_times(_quotient(a, b), cost) for a, b in by_seed])
    published = PUBLISHED.get((resolved.scenario.name, name))
    return {
        "cost_ratio": cost,
        "goodput_ratio": goodput.mean,
        "goodput_per_usd_ratio": per_usd.mean if per_usd else None,
        "intervals": {"goodput_ratio": asdict(goodput)},
        "published": None
        if published is None
        else {
            "cost_ratio": published.times_dearer,
            "goodput_ratio": published.times_goodput,
            "section": published.section,
        },
    }


def _cost_comparison(resolved: ResolvedScenario, ours: PolicyPlans, theirs: PolicyPlans) -> Row:
    """The costs of two policies' plans, means over epochs, within the error bars of what they rest on."""
    careful = resolved.scenario.capacity.pessimistic

    def parts(plans: PolicyPlans) -> list[CostPart]:
        prices, count = template_prices(resolved, plans), len(plans.epochs)
        return [
            part
            for epoch in plans.epochs
            for part in cost_parts(epoch.result, plans.templates, prices, careful=careful, epochs=count)
        ]

    alike = all(serves_alike(a.result, b.result) for a, b in zip(ours.epochs, theirs.epochs, strict=True))
    return cost_comparison(parts(ours), parts(theirs), same_demand=alike)


def _quotient(a: float, b: float) -> float | None:
    return a / b if b > 0 else None


def _times(a: float | None, b: float) -> float | None:
    return None if a is None else a * b
