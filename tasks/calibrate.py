"""How much headroom a plan needs, by model and phase, found in the simulator (DESIGN 3.1).

A capacity holds for requests of mean length that never wait. Two shares make room for the rest: `slo_frac`, the share of
the latency bound that steps are planned against, and `max_utilization_frac`, the share of the throughput counted on.

Data: one model of the scenario at a time, alone, at ample supply, one epoch; requests of each seed.
Variables: for each phase both shares, on grids.
Constraint: the simulated goodput of the plan is at least `target_frac` of the offered tokens/s, for every seed.
Objective: the plan's cost.

Search: start from the smallest planned share of the bounds at which the model can be served at all, and the lowest
utilisation; where that fails, at the next larger shares. Then phase by phase, the others held: for each `slo_frac` whose
plan at full utilisation is cheaper than the best so far, the highest utilisation that meets the target, by bisection. The
first round leaves half of what may be late to the phases not yet searched; a second one may use all of it. In the end
`max_utilization_frac` is lowered to what the plan found makes of it: no other demand is then planned for at a utilisation
that was not tried. What is found was simulated and meets the target; since goodput falls with either share only by and
large, cheaper plans may go unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Final

import pyarrow as pa

from artifacts.library import open_library
from artifacts.store import Store
from coral_core.allocation.policies import Policy
from coral_core.config.resolve import ResolvedModel, ResolvedScenario
from coral_core.config.scenario import Ample, HeadroomSpec
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.sim import ModelMetrics
from tasks.calibration_notes import calibration_notes
from tasks.executor import Executor
from tasks.library import build_library, build_spec_from_scenario, capacity_tables
from tasks.plan import selected_templates
from tasks.plan_documents import selections
from tasks.policy_plans import PolicyPlans, plan_epochs
from tasks.replay import Replay, fleet_of, replay
from tasks.template_source import TemplateSource, policy_method, with_method

TARGET_FRAC: Final = 0.995
"""Half a percent above the 99% that a plan is to reach, for requests other than those it is tried with."""
UTILIZATIONS: Final = tuple(round(0.3 + 0.05 * step, 2) for step in range(15))
"""0.3 to 1.0 in steps of 0.05."""
SLO_FRACS: Final = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SEEDS: Final = (101, 102, 103)
"""Not those of any shipped evaluation, so that what is found is tried on other requests there."""

SAME_FRAC: Final = 1e-3
"""Costs are the same within the gap that a plan's optimality is proven to."""

Headroom = Mapping[Phase, tuple[float, float]]
"""(slo_frac, max_utilization_frac) by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One model's plan at one headroom, simulated. `goodput_frac` is its goodput over its offered tokens/s, of the worst seed.

    `latencies_s` holds 99th percentiles beside their bounds, means over the seeds, so that it shows which bound is broken.
    `load_frac` is each phase's demand over the whole capacity of what was planned for it, at most its utilisation; empty
    where several phases share the demand.
    """

    model: str
    slo_frac: Mapping[str, float]
    utilization: Mapping[str, float]
    cost_usd_per_h: float
    planned_full: bool
    goodput_frac: float
    without_handover_goodput_frac: float
    latencies_s: Mapping[str, float] = field(default_factory=dict)
    load_frac: Mapping[str, float] = field(default_factory=dict)

    def meets(self, *, target_frac: float, handover: bool) -> bool:
        """Whether all demand is planned for and goodput reaches the target, the time per output token counted as asked."""
        share = self.goodput_frac if handover else self.without_handover_goodput_frac
        return self.planned_full and share >= target_frac


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalibration:
    """What was found for one model: None where no headroom tried meets the target. `without` is its plan without any."""

    model: str
    found: Trial | None
    without: Trial
    trials: tuple[Trial, ...]

    @property
    def shown(self) -> Trial:
        """What was found, or the trial that came nearest."""
        return self.found or max(self.trials, key=lambda trial: trial.goodput_frac)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found for all models of a scenario."""

    scenario: str
    policy: str
    target_frac: float
    handover: bool
    seeds: tuple[int, ...]
    models: tuple[ModelCalibration, ...]
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every model meets the target."""
        return all(one.found is not None for one in self.models)

    @property
    def headroom(self) -> dict[str, dict[str, dict[str, float]]]:
        """What `capacity.headroom` of the scenario should hold, of the models that meet the target."""
        return {
            one.model: {"slo_frac": dict(one.found.slo_frac), "max_utilization_frac": dict(one.found.utilization)}
            for one in self.models
            if one.found is not None
        }

    @property
    def capacity_yaml(self) -> str:
        """The scenario's `capacity` with this headroom, as YAML."""
        seeds = " ".join(map(str, self.seeds))
        command = f"coral calibrate {self.scenario} --policy {self.policy} --seeds {seeds}"
        lines = ["capacity:", f"  headroom_source: simulated, {command}", "  headroom:"]
        for model, shares in self.headroom.items():
            lines.append(f"    {model}:")
            for name, by_phase in shares.items():
                lines.append(
                    f"      {name}: {{{', '.join(f'{phase}: {share:g}' for phase, share in by_phase.items())}}}"
                )
        return "\n".join(lines)

    @property
    def document(self) -> dict[str, Any]:
        """As JSON has it; every goodput in it is simulated, every cost predicted."""
        kinds = {"goodput_frac": "simulated", "latencies_s": "simulated", "cost_usd_per_h": "predicted"}
        return {**asdict(self), "complete": self.complete, "headroom": self.headroom, "kinds": kinds}


def calibrate(
    resolved: ResolvedScenario,
    policy: Policy,
    store: Store,
    executor: Executor,
    *,
    seeds: Sequence[int] = SEEDS,
    slo_fracs: Sequence[float] = SLO_FRACS,
    utilizations: Sequence[float] = UTILIZATIONS,
    target_frac: float = TARGET_FRAC,
    handover: bool = True,
    n_max: int | None = None,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> Calibration:
    """Calibrate every model that something is asked of. `handover` counts hand-over as time per output token.

    `n_max` bounds the combinations' nodes instead of the scenario's library: faster, and to be checked by an evaluation.

    The templates go to libraries of their own in `store`, one per phase and `slo_frac`, and are found there again.
    Raises InputError for unusable grids, target or scenario.
    """
    for name, grid in (("slo_fracs", slo_fracs), ("utilizations", utilizations)):
        if not grid or not 0 < min(grid) <= max(grid) <= 1:
            raise InputError(f"the grid {list(grid)} is not within (0, 1]", where=name)
    if not 0 < target_frac <= 1:
        raise InputError(f"{target_frac!r} is not in (0, 1]", where="target_frac")
    found = []
    for index, model in enumerate(resolved.models):
        if model.demand.requests_per_s > 0:
            alone = _alone(resolved, index, n_max or resolved.scenario.library.n_max)
            trials = Trials(alone, policy, store, executor, seeds=seeds, on_trial=on_trial)
            search = Search(
                trials.planned,
                trials.simulated,
                phases=model.phases,
                slo_fracs=sorted(set(slo_fracs)),
                utilizations=sorted(set(utilizations)),
                handover=handover,
            )
            found.append(search.calibration(model.shape.name, target_frac))
    return Calibration(
        scenario=resolved.scenario.name,
        policy=policy.name,
        target_frac=target_frac,
        handover=handover,
        seeds=tuple(seeds),
        models=tuple(found),
        notes=calibration_notes(resolved, seeds),
    )


class Search:
    """The search over both shares of every phase; `planned` costs the plan at a headroom, `simulated` tries it as well."""

    def __init__(
        self,
        planned: Callable[[Headroom], Trial],
        simulated: Callable[[Headroom], Trial],
        *,
        phases: Sequence[Phase],
        slo_fracs: Sequence[float],
        utilizations: Sequence[float],
        handover: bool,
    ) -> None:
        self.planned = planned
        self.simulated = simulated
        self.phases = phases
        self.slo_fracs = slo_fracs
        self.utilizations = utilizations
        self.handover = handover
        self.trials: list[Trial] = []

    def calibration(self, model: str, target_frac: float) -> ModelCalibration:
        """The cheapest headroom found that meets the target."""
        without = self._simulated(dict.fromkeys(self.phases, (1.0, 1.0)))
        at = self._start(target_frac)
        if at is not None:
            half = (1 + target_frac) / 2
            for target in (half, target_frac):
                for phase in self.phases:
                    at = self._cheapest(at, phase, target_frac if phase is self.phases[-1] else target)
            at = self._tightened(at, target_frac)
        return ModelCalibration(
            model=model,
            found=None if at is None else self._simulated(at),
            without=without,
            trials=tuple(self.trials),
        )

    def _start(self, target_frac: float) -> dict[Phase, tuple[float, float]] | None:
        """The roomiest headroom that can be planned, or the next one that meets the target."""
        lowest = min(self.utilizations)
        least = dict.fromkeys(self.phases, len(self.slo_fracs) - 1)
        for phase in self.phases:
            for k, slo_frac in enumerate(self.slo_fracs):
                others = dict.fromkeys(self.phases, (max(self.slo_fracs), lowest))
                if self.planned({**others, phase: (slo_frac, lowest)}).planned_full:
                    least[phase] = k
                    break
        for more in range(len(self.slo_fracs)):
            rows = {phase: min(k + more, len(self.slo_fracs) - 1) for phase, k in least.items()}
            at = {phase: (self.slo_fracs[k], lowest) for phase, k in rows.items()}
            if self._meets(at, target_frac):
                return at
        return None

    def _cheapest(
        self, at: dict[Phase, tuple[float, float]], phase: Phase, target_frac: float
    ) -> dict[Phase, tuple[float, float]]:
        """The best shares of one phase, the others held at `at`; `at` itself where none is cheaper."""
        best, cost = at, self.planned(at).cost_usd_per_h
        for slo_frac in self.slo_fracs:
            full = self.planned({**at, phase: (slo_frac, self.utilizations[-1])})
            if not full.planned_full or full.cost_usd_per_h >= cost:
                continue
            low, high = -1, len(self.utilizations)
            while high - low > 1:
                middle = (low + high) // 2
                there = {**at, phase: (slo_frac, self.utilizations[middle])}
                dearer = self.planned(there).cost_usd_per_h >= cost
                if dearer or self._meets(there, target_frac):
                    low = middle
                    if not dearer:
                        best, cost = there, self.planned(there).cost_usd_per_h
                else:
                    high = middle
        return best

    def _tightened(self, at: dict[Phase, tuple[float, float]], target_frac: float) -> dict[Phase, tuple[float, float]]:
        """The utilisations that the plan comes to, where the plan made with them is as cheap and good."""
        load_frac, cost = self.planned(at).load_frac, self.planned(at).cost_usd_per_h
        tight = {
            phase: (slo_frac, min(math.ceil(1000 * load_frac.get(phase.value, share)) / 1000, share))
            for phase, (slo_frac, share) in at.items()
        }
        as_cheap = self.planned(tight).cost_usd_per_h <= cost * (1 + SAME_FRAC)
        return tight if as_cheap and self._meets(tight, target_frac) else at

    def _meets(self, at: Headroom, target_frac: float) -> bool:
        return self._simulated(at).meets(target_frac=target_frac, handover=self.handover)

    def _simulated(self, at: Headroom) -> Trial:
        trial = self.simulated(at)
        if trial not in self.trials:
            self.trials.append(trial)
        return trial


class Trials:
    """Plans of one model at any headroom, each costed and simulated once."""

    def __init__(
        self,
        resolved: ResolvedScenario,
        policy: Policy,
        store: Store,
        executor: Executor,
        *,
        seeds: Sequence[int],
        on_trial: Callable[[Trial], None],
    ) -> None:
        self.resolved = resolved
        self.policy = policy
        self.store = store
        self.executor = executor
        self.seeds = seeds
        self.on_trial = on_trial
        self._templates: dict[tuple[Phase, float], tuple[pa.Table, list[CapacityTable]]] = {}
        self._sources: dict[tuple[tuple[Phase, float], ...], TemplateSource] = {}
        self._plans: dict[tuple[tuple[Phase, tuple[float, float]], ...], PolicyPlans] = {}
        self._runs: dict[Any, list[Replay]] = {}

    def planned(self, headroom: Headroom) -> Trial:
        """The plan at a headroom and its cost; its goodput is left at 0."""
        result = self._planned(headroom).epochs[0].result
        return Trial(
            model=self.resolved.models[0].shape.name,
            slo_frac={phase.value: slo_frac for phase, (slo_frac, _) in headroom.items()},
            utilization={phase.value: share for phase, (_, share) in headroom.items()},
            cost_usd_per_h=result.cost_usd_per_h,
            planned_full=result.full,
            goodput_frac=0.0,
            without_handover_goodput_frac=0.0,
            load_frac=_load_frac(self.resolved.models[0], self._planned(headroom)),
        )

    def simulated(self, headroom: Headroom) -> Trial:
        """The plan at a headroom, and the goodput of its fleet; a plan that leaves demand unmet is not simulated."""
        trial, plans = self.planned(headroom), self._planned(headroom)
        if not trial.planned_full:
            return trial
        resolved = self._source(headroom).resolved
        # What is simulated depends on the fleet and on the engines' limits, not on the utilisation that led to them.
        key = (tuple(trial.slo_frac.items()), frozenset(plans.epochs[0].counts.items()))
        is_new = key not in self._runs
        if is_new:
            tables = [
                table
                for phase, (slo_frac, _) in headroom.items()
                for table in self._phase_templates(phase, slo_frac)[1]
            ]
            fleet = fleet_of(resolved, plans, tables=tables)
            self._runs[key] = [replay(resolved, plans, seed=seed, fleet=fleet) for seed in self.seeds]
        runs = self._runs[key]
        trial = replace(
            trial,
            goodput_frac=_goodput_frac(trial.model, [run.whole for run in runs]),
            without_handover_goodput_frac=_goodput_frac(trial.model, [run.without_handover for run in runs]),
            latencies_s=_latencies_s(resolved, [run.whole for run in runs]),
        )
        if is_new:
            self.on_trial(trial)
        return trial

    def _planned(self, headroom: Headroom) -> PolicyPlans:
        key = tuple(headroom.items())
        if key not in self._plans:
            utilization = {phase: share for phase, (_, share) in headroom.items()}
            self._plans[key] = plan_epochs(self._source(headroom), self.policy, utilization=utilization)
        return self._plans[key]

    def _source(self, headroom: Headroom) -> TemplateSource:
        slo_fracs = {phase: slo_frac for phase, (slo_frac, _) in headroom.items()}
        key = tuple(slo_fracs.items())
        if key not in self._sources:
            parts = [self._phase_templates(phase, slo_frac)[0] for phase, slo_frac in key]
            method = policy_method(self.resolved, self.policy)
            self._sources[key] = TemplateSource(
                _planned_against(self.resolved, slo_fracs), {}, rows={method: pa.concat_tables(parts)}
            )
        return self._sources[key]

    def _phase_templates(self, phase: Phase, slo_frac: float) -> tuple[pa.Table, list[CapacityTable]]:
        """The phase's templates at one share of its bound, and the capacities they rest on."""
        key = (phase, slo_frac)
        if key not in self._templates:
            resolved = with_method(self.resolved, policy_method(self.resolved, self.policy))
            spec = build_spec_from_scenario(_planned_against(resolved, {phase: slo_frac}))
            spec = replace(
                spec,
                library=f"{spec.library}-calibration",
                models=tuple(replace(build, phases=(phase,)) for build in spec.models),
            )
            manifest = build_library(spec, self.store, self.executor)
            rows = selected_templates(selections(resolved), open_library(self.store, spec.library, manifest.version))
            self._templates[key] = (rows, capacity_tables(spec))
        return self._templates[key]


def _alone(resolved: ResolvedScenario, index: int, n_max: int) -> ResolvedScenario:
    """One model of the scenario, at ample supply for one epoch: its fleet is ready from the start, so load alone matters."""
    scenario, model = resolved.scenario, resolved.models[index]
    capacity = scenario.capacity.model_copy(update={"slo_frac": {}, "max_utilization_frac": {}, "headroom": {}})
    update = {
        "models": (scenario.models[index],),
        "capacity": capacity,
        "epochs": scenario.epochs.model_copy(update={"count": 1}),
        "availability": Ample(),
        "library": scenario.library.model_copy(update={"n_max": n_max, "name": scenario.library_name}),
    }
    return replace(resolved, scenario=scenario.model_copy(update=update), models=(model,))


def _planned_against(resolved: ResolvedScenario, slo_fracs: Mapping[Phase, float]) -> ResolvedScenario:
    scenario = resolved.scenario
    headroom = {model.shape.name: HeadroomSpec(slo_frac=dict(slo_fracs)) for model in resolved.models}
    capacity = scenario.capacity.model_copy(update={"headroom": headroom})
    return replace(resolved, scenario=scenario.model_copy(update={"capacity": capacity}))


def _load_frac(model: ResolvedModel, plans: PolicyPlans) -> dict[str, float]:
    """Demand over capacity by phase; templates of these plans carry their whole capacity."""
    if set(model.phases) not in ({Phase.PREFILL, Phase.DECODE}, {Phase.AGGREGATED}):
        return {}
    capacity = dict.fromkeys(model.phases, 0.0)
    for (name, _), count in plans.epochs[0].counts.items():
        template = plans.templates[name]
        capacity[template.phase] += count * template.throughput
    demand, rate = model.demand, model.demand.requests_per_s
    asked = {phase: rate if phase is Phase.AGGREGATED else demand.tokens_per_s(phase) for phase in model.phases}
    return {phase.value: asked[phase] / capacity[phase] for phase in model.phases if capacity[phase] > 0}


def _goodput_frac(model: str, runs: Sequence[Mapping[str, ModelMetrics]]) -> float:
    """The model's goodput over what was offered, of the run where it is least."""
    return min(run[model].goodput_tokens_per_s / run[model].offered_tokens_per_s for run in runs)


def _latencies_s(resolved: ResolvedScenario, runs: Sequence[Mapping[str, ModelMetrics]]) -> dict[str, float]:
    """Bounds beside 99th percentiles, means over the runs; empty where no request was done."""
    model = resolved.models[0]
    metrics = [run[model.shape.name] for run in runs]
    if not all(one.ttft.requests and one.tpot.requests for one in metrics):
        return {}
    return {
        "ttft_bound": model.demand.slo.ttft_s,
        "ttft_p99": fmean(one.ttft.percentile_s[99.0] for one in metrics),
        "tpot_bound": model.demand.slo.tpot_s,
        "tpot_p99": fmean(one.tpot.percentile_s[99.0] for one in metrics),
    }
