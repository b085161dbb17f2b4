"""Speed of the simulator: requests/s and events/s on a fleet of the size of `paper-extended`, and growth with both.

Six models at 25 requests/s each, prefill and decode apart; each (model, phase) runs as many whole instances
of the template with the cheapest fleet as its demand takes at 70% utilisation (combinations of up to 3 nodes of the 20
configurations). Arrivals are Poisson; lengths lognormal around means that stand for the traces named beside them (an
assumption; what is measured here is time). The kernel's first call, which compiles it or loads it from numba's cache, is
stated apart.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from coral_core.catalog.hardware import load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.hardware import Market
from coral_core.domain.templates import CapacitySource, ServingTemplate, template_id
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import InputError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import capacity_table
from coral_core.perf.factors import load_factors
from coral_core.placement.combinations import enumerate_combinations
from coral_core.placement.methods import placement_method
from coral_core.placement.problem import placement_at
from coral_core.sim.compiled import compiled_run
from coral_core.sim.fleet import sim_instance
from coral_core.sim.inputs import SimInput, SimInstance, SimOptions, SimRequests
from coral_core.sim.metrics import measure
from coral_core.sim.run import simulate
from coral_core.sim.timing import Served, sim_model

LOADED_FRAC: Final = 0.7
DRAIN_S: Final = 120.0
REQUESTS_PER_S: Final = 25.0


@dataclass(frozen=True)
class Asked:
    """A model of the `paper-extended` scenario: SLO as published, mean lengths of the kind of trace."""

    model: str
    slo: Slo
    lengths: Lengths


def asked(model: str, ttft_s: float, tpot_s: float, tokens_in: float, tokens_out: float, like: str) -> Asked:  # noqa: PLR0917 - a row of a table
    """A row of `MODELS`."""
    return Asked(
        model,
        Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        Lengths(mean_input_tokens=tokens_in, mean_output_tokens=tokens_out, source=like),
    )


MODELS = (
    asked("phi-4", 1.2, 0.060, 1155, 211, "Azure conversation"),
    asked("gpt-oss-20b", 0.9, 0.030, 2048, 28, "Azure code"),
    asked("qwen3-32b", 1.6, 0.100, 700, 260, "assumed"),
    asked("llama-3-70b", 1.5, 0.080, 700, 260, "assumed"),
    asked("gpt-oss-120b", 1.0, 0.040, 1155, 211, "Azure conversation"),
    asked("qwen3-235b", 1.8, 0.120, 2048, 28, "Azure code"),
)


def fleet_for(one: Asked, requests_per_s: float, *, scale: float = 1.0) -> tuple[SimInstance, ...]:
    """Instances of both phases of a model; `scale` times as many as the demand takes."""
    catalog, shape = load_catalog("paper-extended"), package_models()[one.model]
    served = Served(
        shape=shape,
        variant=shape.default_variant,
        lengths=one.lengths,
        assumptions=CapacityAssumptions(),
        factors=load_factors(),
    )
    price = np.array([catalog.prices["us-east-2", name, Market.ON_DEMAND].price_usd_per_h for name in catalog.configs])
    instances: list[SimInstance] = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        table = capacity_table(
            shape=shape,
            variant=served.variant,
            phase=phase,
            slo=one.slo,
            lengths=one.lengths,
            configs=list(catalog.configs.values()),
            max_stages=3,
        )
        counts = enumerate_combinations(
            memory_bytes=table.memory_bytes,
            usable_memory_bytes=table.usable_memory_bytes,
            model_bytes=table.model_bytes,
            n_max=3,
            rho=12,
        )
        placed = placement_method("lattice").place(table, counts)
        mean_tokens = one.lengths.mean_input_tokens if phase is Phase.PREFILL else one.lengths.mean_output_tokens
        copies = np.ceil(requests_per_s * mean_tokens / LOADED_FRAC / placed.throughput)
        for row in np.argsort(copies * (placed.counts @ price), kind="stable"):
            placement = placement_at(placed, table.configs, int(row))
            template = ServingTemplate(
                template_id=template_id(
                    model=one.model, variant=served.variant, phase=phase, slo=one.slo, placement=placement
                ),
                model=one.model,
                variant=served.variant,
                phase=phase,
                slo=one.slo,
                placement=placement,
                throughput_tokens_per_s=float(placed.throughput[row]),
                throughput_requests_per_s=None,
                method="lattice",
                source=CapacitySource.ESTIMATED,
            )
            first = sim_instance(f"{one.model}/{phase}/0", template, table, served, catalog.configs)
            if _holds_its_micro_batches(first):
                break
        names = (f"{one.model}/{phase}/{k}" for k in range(max(round(scale * copies[row]), 1)))
        instances += [replace(first, name=name) for name in names]
    return tuple(instances)


def _holds_its_micro_batches(instance: SimInstance) -> bool:
    """Whether KV of the prompts in all its stages at once fits; the planner's memory model asks for less."""
    room_tokens = 16 * min(node.kv_blocks for stage in instance.stages for node in stage.nodes)
    return room_tokens >= (instance.micro_batches + 1) * instance.max_batched_tokens


def requests_for(minutes: float, requests_per_s: float, *, seed: int) -> SimRequests:
    """All models' requests of so many minutes, Poisson and lognormal, in one stream."""
    random = np.random.default_rng(seed)
    duration_s = 60 * minutes
    streams = []
    for m, one in enumerate(MODELS):
        count = random.poisson(requests_per_s * duration_s)
        means = (one.lengths.mean_input_tokens, one.lengths.mean_output_tokens)
        sizes = [
            np.maximum(np.rint(random.lognormal(np.log(mean) - 0.245, 0.7, count)), 1).astype(np.int64)
            for mean in means
        ]
        streams.append((m, np.sort(random.uniform(0, duration_s, count)), sizes[0], sizes[1]))
    return SimRequests.merged(streams)


def simulation(minutes: float, requests_per_s: float, *, scale: float = 1.0, seed: int = 0) -> SimInput:
    """The whole input of one run; `scale` times the fleet that the demand takes."""
    shapes = package_models()
    served = [
        Served(
            shape=shapes[one.model],
            variant=shapes[one.model].default_variant,
            lengths=one.lengths,
            assumptions=CapacityAssumptions(),
            factors=load_factors(),
        )
        for one in MODELS
    ]
    return SimInput(
        models=tuple(map(sim_model, served)),
        instances=tuple(part for one in MODELS for part in fleet_for(one, requests_per_s, scale=scale)),
        requests=requests_for(minutes, requests_per_s, seed=seed),
        options=SimOptions(end_s=60 * minutes + DRAIN_S, compiled=True),
    )


def measured(given: SimInput, minutes: float) -> dict[str, Any]:
    """One run: what it took and what came of it."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    outcome = simulate(given)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    slos = {one.model: one.slo for one in MODELS}
    metrics, decode = (
        measure(given.requests, outcome, slos, to_s=60 * minutes, handover=handover) for handover in (True, False)
    )
    return {
        "requests": len(given.requests),
        "engines": len(outcome.nodes),
        "instances": len(outcome.instances),
        "events": outcome.events,
        "batched_tokens": int(outcome.fleet.batched_tokens.sum()),
        "generated_tokens": int(outcome.requests.generated_tokens.sum()),
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "requests_per_cpu_s": round(len(given.requests) / cpu_s),
        "events_per_cpu_s": round(outcome.events / cpu_s),
        "simulated_attainment_frac": {name: round(one.attainment_frac, 4) for name, one in metrics.items()},
        "simulated_attainment_without_handover_frac": round(decode["*"].attainment_frac, 4),
        "unfinished_requests": metrics["*"].unfinished_requests,
        "digest": outcome.digest,
    }


def first_call() -> dict[str, Any]:
    """Time of the kernel's first call, and whether numba had it on disk."""
    given = simulation(0.01, 5.0)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    simulate(given)
    hits = sum(compiled_run().stats.cache_hits.values())  # type: ignore[attr-defined] # numba's dispatcher
    return {
        "wall_s": round(time.perf_counter() - started_s, 3),
        "cpu_s": round(time.process_time() - started_cpu_s, 3),
        "from_cache": hits > 0,
    }


def bench_simulate(minutes: float, *, growth: bool) -> dict[str, Any]:
    """Time of a run of so many simulated minutes on one core, beside the kernel's first call; `growth` over load and fleet.

    Raises InputError for a time that is not positive.
    """
    if not 0 < minutes < math.inf:
        raise InputError(f"{minutes!r} is not a positive number of minutes", where="minutes")
    found = {
        "first_call": first_call(),
        "minutes": minutes,
        "paper_extended": measured(simulation(minutes, REQUESTS_PER_S), minutes),
    }
    if growth:
        short = minutes / 5
        found["growth_with_load"] = {
            str(rate): measured(simulation(short, rate), short) for rate in (6.25, 12.5, 25.0, 50.0, 100.0)
        }
        found["growth_with_fleet"] = {
            str(scale): measured(simulation(short, REQUESTS_PER_S, scale=scale), short) for scale in (1.0, 2.0, 4.0)
        }
    return found
