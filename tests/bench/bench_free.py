"""Time and gain of the free latency split beside the published one, on one core: JSON to standard output.

    python tests/bench/bench_free.py --scenario paper-core
    python tests/bench/bench_free.py --scenario paper-extended --sample 2000

Per model and phase: combinations in all and placed (a seeded sample of them where --sample is smaller), microseconds per
combination, throughput gained over the published split (median, 90th percentile, most, among combinations that both can
place), combinations that only the free split can place, and for each region by how much the best tokens/s per USD/h
grows (what ample supply makes of the gain: the cost of a large demand falls by that factor). Every answer is verified.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import replace

import numpy as np

from coral_core.config.resolve import ResolvedModel, ResolvedScenario, resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import Market
from coral_core.domain.placement import PlacedCombinations
from coral_core.domain.workload import Phase
from coral_core.perf import CapacityAssumptions, capacity_table
from coral_core.perf.budgets import budget_table
from coral_core.placement import enumerate_combinations, verify_placed
from coral_core.placement.free import FreePlacement
from coral_core.placement.free_verify import verify_free_placed
from coral_core.placement.lattice import LatticePlacement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="paper-core")
    parser.add_argument("--n-max", type=int, default=6)
    parser.add_argument("--rho", type=float, default=12.0)
    parser.add_argument("--sample", type=int, help="combinations per model and phase; default: all")
    parser.add_argument("--aggregated", action="store_true", help="also the phase `aggregated`")
    options = parser.parse_args()
    resolved = resolve_scenario(load_scenario(options.scenario))
    FreePlacement().place(*warm_up(resolved))
    rows = [
        bench(resolved, model, phase, n_max=options.n_max, rho=options.rho, sample=options.sample)
        for model in resolved.models
        for phase in (*model.phases, *([Phase.AGGREGATED] if options.aggregated else []))
    ]
    core_s = sum(row["us_per_combination"] * row["combinations"] for row in rows) / 1e6
    report = {
        "scenario": options.scenario,
        "n_max": options.n_max,
        "rho": options.rho,
        "combinations": sum(row["combinations"] for row in rows),
        "sampled": options.sample,
        "core_s_in_all": core_s,
        "us_per_combination": core_s * 1e6 / sum(row["combinations"] for row in rows),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tables": rows,
    }
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")


def warm_up(resolved: ResolvedScenario) -> tuple[CapacityTable, np.ndarray]:
    """A tiny problem, so that loading the compiled code is not part of what is measured."""
    table, _ = capacities(resolved, resolved.models[0], resolved.models[0].phases[0], 2)
    return table, np.eye(len(table.configs), dtype=np.int16)


def capacities(
    resolved: ResolvedScenario, model: ResolvedModel, phase: Phase, n_max: int
) -> tuple[CapacityTable, float]:
    """The table with budgets, and the processor seconds that the budgets took."""
    capacity = resolved.scenario.capacity
    given = {
        "shape": model.shape,
        "variant": model.variant,
        "phase": phase,
        "slo": model.demand.slo,
        "lengths": model.demand.lengths,
        "configs": resolved.configs,
        "assumptions": CapacityAssumptions(
            max_utilization_frac={**dict.fromkeys(Phase, 1.0), **capacity.max_utilization_frac},
            allow_estimates=capacity.allow_estimates,
        ),
    }
    published = capacity_table(max_stages=n_max, **given)
    started = time.process_time()
    budgets = budget_table(**given)
    return replace(published, budgets=budgets), time.process_time() - started


def bench(
    resolved: ResolvedScenario, model: ResolvedModel, phase: Phase, *, n_max: int, rho: float, sample: int | None
) -> dict[str, object]:
    table, budgets_s = capacities(resolved, model, phase, n_max)
    every = enumerate_combinations(
        memory_bytes=table.memory_bytes,
        usable_memory_bytes=table.usable_memory_bytes,
        model_bytes=table.model_bytes,
        n_max=n_max,
        rho=rho,
    )
    counts = every
    if sample is not None and sample < len(every):
        counts = every[np.sort(np.random.default_rng(0).choice(len(every), sample, replace=False))]
    started = time.process_time()
    published = LatticePlacement().place(table, counts)
    published_s = time.process_time() - started
    started = time.process_time()
    free = FreePlacement().place(table, counts)
    # The published split is the start, and part of the time; a sample shares its tables among few, so it counts apart.
    free_s = time.process_time() - started - published_s
    verify_placed(table, published)
    verify_free_placed(table, free)
    before = dict(zip(map(bytes, published.counts), published.throughput, strict=True))
    gains = np.array(
        [t / before[bytes(c)] - 1 for c, t in zip(free.counts, free.throughput, strict=True) if bytes(c) in before]
    )
    if (gains < 0).any() or len(gains) != len(published):
        raise AssertionError("the free split is below the published one")
    return {
        "model": table.model,
        "phase": table.phase.value,
        "layers": table.layers,
        "combinations": len(every),
        "placed": len(counts),
        "budget_table_s": budgets_s,
        "us_per_combination": free_s / len(counts) * 1e6,
        "published_us_per_combination": published_s / len(counts) * 1e6,
        "tests_per_combination": free.statistics["tests"] / len(counts),
        "gain_frac": {
            "median": float(np.median(gains)),
            "mean": float(gains.mean()),
            "p90": float(np.quantile(gains, 0.9)),
            "max": float(gains.max()),
            "none_share": float((gains == 0).mean()),
        },
        "only_free": len(free) - len(published),
        "best_per_usd_gain_frac": best_per_usd(resolved, table, published, free),
    }


def best_per_usd(
    resolved: ResolvedScenario, table: CapacityTable, published: PlacedCombinations, free: PlacedCombinations
) -> dict[str, float]:
    """By region, how much the best throughput per USD/h grows."""
    gains = {}
    for region in resolved.scenario.regions:
        offers = [resolved.catalog.prices.get((region, name, Market.ON_DEMAND)) for name in table.configs]
        price = np.array([np.nan if offer is None else offer.price_usd_per_h for offer in offers])
        sold = ~np.isnan(price)
        best = [
            np.where(
                placed.counts[:, ~sold].any(axis=1),
                0,
                placed.throughput / (placed.counts[:, sold] @ price[sold] + 1e-300),
            ).max(initial=0)
            for placed in (published, free)
        ]
        if best[0] > 0:
            gains[region] = float(best[1] / best[0] - 1)
    return gains


if __name__ == "__main__":
    main()
