"""A policy through a scenario's epochs: the fleet of its plans (`tasks.policy_plans`), and the scenario's requests on it.

The first epoch's fleet is ready when the first request arrives; later ones boot while what they replace still serves (`coral_core.sim.timeline`). The
gateway refuses a request that would get its first token too late for the wait before it, or that comes while decode is
behind (`coral_core.routing.admission`): where capacity is short, a queue of requests that are all late serves nobody. KV
is streamed to decode while prefill computes, as capacities assume. Plans and their costs are predicted, what becomes of
the requests is simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coral_core.config.requests import request_traces
from coral_core.config.resolve import ResolvedModel, ResolvedScenario
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import DataGapError, InputError, NoSolutionError
from coral_core.perf.factors import load_factors
from coral_core.routing import max_handover_s
from coral_core.sim import (
    ModelMetrics,
    Routing,
    Served,
    SimInput,
    SimInstance,
    SimModel,
    SimOptions,
    SimOutcome,
    SimRequests,
    measure,
    prompt_times_s,
    sim_instance,
    sim_model,
    simulate,
)
from coral_core.sim.profiled import ProfiledTiming, profiled_timings
from coral_core.sim.timeline import Key, Timeline, timeline
from tasks.interruptions import interruptions
from tasks.library import BuildSpec, build_spec_from_scenario, capacity_tables
from tasks.policy_plans import PolicyPlans, template_nodes, template_prices
from tasks.template_source import with_method

Timings = Mapping[tuple[Phase, str, int], ProfiledTiming]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated, but for the requests. `dropped` says which instances cannot serve, and why."""

    models: tuple[SimModel, ...]
    timeline: Timeline
    pd_same_region: bool
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One simulated run: metrics by model (and `*` for all) per epoch and of all epochs together.

    `without_handover` is `whole` with the time per output token counted from where the KV arrived (`measure`).
    `billed_usd_per_h` is per epoch what the instances that were up or booting cost. A request counts where it arrives,
    and the run goes on until every request had all the time its SLO gives.
    """

    policy: str
    seed: int
    epochs: tuple[Mapping[str, ModelMetrics], ...]
    whole: Mapping[str, ModelMetrics]
    without_handover: Mapping[str, ModelMetrics]
    billed_usd_per_h: tuple[float, ...]
    events: int
    digest: str
    wall_s: float
    notes: tuple[str, ...]


def why_not_simulated(resolved: ResolvedScenario) -> str:
    """The reason why a scenario's plans cannot be simulated; empty where they can."""
    if resolved.scenario.capacity.layer_times is not None:
        return "capacities are measured layer times by batch, which say nothing of the simulator's iterations"
    if resolved.scenario.capacity.profiles is None:
        return ""
    try:
        _measured(resolved, build_spec_from_scenario(resolved))
    except DataGapError as error:
        return f"of a profile that capacities come from, the simulator needs steps of both phases: {error}"
    return ""


def _measured(resolved: ResolvedScenario, spec: BuildSpec) -> dict[tuple[str, str], Timings]:
    """Timings from the profiles by (model, variant). Raises DataGapError for a profile that lacks one of both phases."""
    phases = {model.shape.name: model.phases for model in resolved.models}
    assumed_s = spec.assumptions.step_overhead_s
    return {key: profiled_timings(own, phases[key[0]], assumed_fixed_s=assumed_s) for key, own in spec.profiles.items()}


def fleet_of(resolved: ResolvedScenario, plans: PolicyPlans, *, tables: Sequence[CapacityTable] | None = None) -> Fleet:
    """The instances of all epochs and their lifecycle. Raises InputError for a scenario that cannot be simulated.

    `tables` are the capacities that the templates were made from, where they are at hand.
    """
    reason = why_not_simulated(resolved)
    if reason:
        raise InputError(f"plans of {plans.policy} are not simulated: {reason}", where=resolved.scenario.name)
    spec = build_spec_from_scenario(with_method(resolved, plans.method))
    assumptions = {build.shape.name: build.assumptions(spec.assumptions) for build in spec.models}
    made_from = {
        (table.model, table.variant, table.phase): table
        for table in (capacity_tables(spec) if tables is None else tables)
    }
    factors, measured = load_factors(), _measured(resolved, spec)
    served = {
        (model.shape.name, variant): Served(
            shape=model.shape,
            variant=variant,
            lengths=model.demand.lengths,
            assumptions=assumptions[model.shape.name],
            factors=factors,
            measured=measured.get((model.shape.name, variant), {}),
        )
        for model in resolved.models
        for variant in model.variants
    }
    configs = {config.name: config for config in resolved.configs}
    usable: dict[str, SimInstance] = {}
    dropped: list[str] = []
    for name, template in plans.templates.items():
        table = made_from[template.model, template.variant, template.phase]
        try:
            instance = sim_instance(name, template, table, served[template.model, template.variant], configs)
            if name in plans.vllm_chains:
                depth = sum(stage.nodes[0].timing.depth for stage in instance.stages)
                instance = replace(instance, micro_batches=depth, balanced_steps=False)
            usable[name] = replace(instance, template=name)  # the plan's name, which tells the markets apart
        except (NoSolutionError, DataGapError) as error:
            dropped.append(f"instances of {name} cannot serve: {error}")
    pd_same_region = plans.pd_same_region and resolved.scenario.allocation.pd_same_region
    counts = [{key: n for key, n in epoch.counts.items() if key[0] in usable} for epoch in plans.epochs]
    orphans = _without_decode(counts, usable, pd_same_region=pd_same_region)
    dropped += [f"prefill {template} in {region} has no decode to hand over to" for template, region in sorted(orphans)]
    regions, epochs = resolved.scenario.regions, resolved.scenario.epochs
    line = timeline(
        [{key: n for key, n in plan.items() if key not in orphans} for plan in counts],
        lambda template, region: replace(usable[template], region=region),
        supply=plans.supply,
        nodes=template_nodes(resolved, plans),
        regions=regions,
        epoch_s=epochs.duration_s,
        boot_s=resolved.scenario.allocation.startup_s,
    )
    return Fleet(
        models=tuple(
            _sim_model(model, served[model.shape.name, model.variant], line.instances) for model in resolved.models
        ),
        timeline=line,
        pd_same_region=pd_same_region,
        dropped=tuple(dropped),
    )


def _sim_model(model: ResolvedModel, served: Served, instances: Sequence[SimInstance]) -> SimModel:
    """The model with its bounds on waiting; those on decode hold where no aggregated instance gets by without it."""
    own = [one for one in instances if one.model == model.shape.name]
    prompt_s, prompt_token_s = prompt_times_s(served, [one for one in own if one.phase is not Phase.DECODE])
    bound_s = math.inf
    if all(one.phase is not Phase.AGGREGATED for one in own):
        planned_frac = served.assumptions.slo_frac[Phase.DECODE]
        bound_s = max_handover_s(model.demand.slo.tpot_s, planned_frac, served.lengths.mean_output_tokens)
    return sim_model(
        served,
        max_wait_s=model.demand.slo.ttft_s,
        prompt_s=prompt_s,
        prompt_token_s=prompt_token_s,
        max_handover_s=bound_s,
    )


def _without_decode(
    counts: Sequence[Mapping[Key, int]], usable: Mapping[str, SimInstance], *, pd_same_region: bool
) -> set[Key]:
    """Prefill (template, region) whose requests no decode instance of any epoch could take over."""

    def place(key: Key) -> tuple[str, str, str]:
        one = usable[key[0]]
        return one.model, *((one.variant, key[1]) if pd_same_region else ("", ""))

    keys = {key for plan in counts for key in plan}
    decodes = {place(key) for key in keys if usable[key[0]].phase is Phase.DECODE}
    return {key for key in keys if usable[key[0]].phase is Phase.PREFILL and place(key) not in decodes}


def scenario_requests(resolved: ResolvedScenario, *, seed: int) -> SimRequests:
    """All models' requests in one stream; those without output get one token, since a first token always comes."""
    traces = request_traces(resolved, seed=seed)
    return SimRequests.merged(
        (m, trace.arrival_s, np.maximum(trace.input_tokens, 1), np.maximum(trace.output_tokens, 1))
        for m, trace in enumerate(traces.values())
    )


def replay(
    resolved: ResolvedScenario,
    plans: PolicyPlans,
    *,
    seed: int,
    fleet: Fleet | None = None,
    routing: Routing = Routing.WEIGHTED_ROUND_ROBIN,
) -> Replay:
    """Simulate the scenario's requests on the fleet of the plans; the same seed gives the same requests to every policy.

    `fleet` saves making it anew for each seed. Raises InputError where there are no requests, or for a scenario that
    cannot be simulated.
    """
    fleet = fleet or fleet_of(resolved, plans)
    requests = scenario_requests(resolved, seed=seed)
    if not len(requests):
        raise InputError(
            "no request arrives in any epoch", where=f"scenario {resolved.scenario.name}", fix="set a rate"
        )
    slos = {model.shape.name: model.demand.slo for model in resolved.models}
    count, duration_s = resolved.scenario.epochs.count, resolved.scenario.epochs.duration_s
    bounds_s = [epoch * duration_s for epoch in range(count + 1)]
    end_s = latest_good_finish_s(requests, list(slos.values()), bounds_s[-1])
    lost = interruptions(resolved, fleet.timeline, plans.templates, end_s=end_s, seed=seed)
    lifecycle = sorted((*fleet.timeline.lifecycle, *lost.events), key=lambda event: event.at_s)
    started_s = time.perf_counter()
    outcome = simulate(
        SimInput(
            models=fleet.models,
            instances=fleet.timeline.instances,
            requests=requests,
            options=SimOptions(
                end_s=end_s,
                epoch_starts_s=tuple(bounds_s),
                pd_same_region=fleet.pd_same_region,
                stream_kv=True,
                routing=routing,
            ),
            lifecycle=tuple(lifecycle),
        )
    )
    wall_s = time.perf_counter() - started_s
    return Replay(
        policy=plans.policy,
        seed=seed,
        epochs=tuple(
            measure(requests, outcome, slos, from_s=bounds_s[epoch], to_s=bounds_s[epoch + 1]) for epoch in range(count)
        ),
        whole=measure(requests, outcome, slos, to_s=bounds_s[-1]),
        without_handover=measure(requests, outcome, slos, to_s=bounds_s[-1], handover=False),
        billed_usd_per_h=_billed_usd_per_h(outcome, fleet, template_prices(resolved, plans), count, duration_s),
        events=outcome.events,
        digest=outcome.digest,
        wall_s=wall_s,
        notes=(*fleet.dropped, *lost.notes),
    )


def latest_good_finish_s(requests: SimRequests, slos: Sequence[Slo], horizon_s: float) -> float:
    """When the last request that is within its SLO has finished at the latest: later events change no goodput."""
    ttft_s = np.array([slo.ttft_s for slo in slos])[requests.model]
    tpot_s = np.array([slo.tpot_s for slo in slos])[requests.model]
    latest_s = requests.arrival_s + ttft_s + tpot_s * requests.output_tokens
    return float(max(latest_s.max(), horizon_s) + 1.0)


def _billed_usd_per_h(
    outcome: SimOutcome, fleet: Fleet, prices: Mapping[Key, float], count: int, duration_s: float
) -> tuple[float, ...]:
    key_of = {one.name: (one.template, one.region) for one in fleet.timeline.instances}
    usd_per_h = np.array([prices[key_of[name]] for name in outcome.instances])
    billed = outcome.fleet.paid_s[:count] @ usd_per_h / duration_s
    return tuple(float(value) for value in billed)
