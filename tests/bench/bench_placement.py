"""Both placement methods on the same combinations: microseconds each, agreement, ratio. Prints JSON.

    python tests/bench/bench_placement.py --scenario paper-core --n-max 4 --sample 24 --time-limit-s 20

The lattice solves every combination; the ILP a sample stratified by the number of nodes. A program that runs into its
time limit leaves its combination unproven: it counts neither as agreement nor as disagreement, and its time, cut short
by the limit, makes the ratio a lower bound.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import numpy as np

from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacementStatus
from coral_core.perf import CapacityAssumptions, capacity_table
from coral_core.placement.combinations import enumerate_combinations
from coral_core.placement.ilp import IlpPlacement
from coral_core.placement.lattice import LatticePlacement
from coral_core.placement.problem import problem_at
from coral_core.placement.verify import verify_placed, verify_placement

SAME_FRAC = 1e-6


def tables(scenario_name: str, n_max: int, only_model: str | None) -> list[CapacityTable]:
    """The capacity tables of a scenario, one for each model and phase."""
    resolved = resolve_scenario(load_scenario(scenario_name))
    assumptions = CapacityAssumptions(allow_estimates=True)
    return [
        capacity_table(
            shape=model.shape,
            variant=model.variant,
            phase=phase,
            slo=model.demand.slo,
            lengths=model.demand.lengths,
            configs=resolved.configs,
            max_stages=n_max,
            assumptions=assumptions,
        )
        for model in resolved.models
        if only_model in (None, model.shape.name)
        for phase in model.phases
    ]


def stratified(counts: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """About `n` rows, the same number of each size where there are so many."""
    sizes = counts.sum(axis=1)
    strata = [rng.permutation(np.flatnonzero(sizes == size)) for size in np.unique(sizes)]
    return np.sort(np.concatenate([stratum[: -(-n // len(strata))] for stratum in strata]))


def compare(table: CapacityTable, counts: np.ndarray, rows: np.ndarray, ilp: IlpPlacement) -> dict[str, float]:
    """Solve `rows` of `counts` by the ILP and one by one by the lattice; every placement is verified."""
    tally = dict.fromkeys(("n", "same_optimum", "different", "unproven"), 0)
    seconds = {"ilp": 0.0, "lattice_alone": 0.0}
    by_size: dict[int, list[float]] = {}
    for row in rows:
        problem = problem_at(table, counts[row])
        started = time.perf_counter()
        expected = LatticePlacement().solve(problem)
        seconds["lattice_alone"] += time.perf_counter() - started
        started = time.perf_counter()
        found = ilp.solve(problem)
        took_s = time.perf_counter() - started
        seconds["ilp"] += took_s
        by_size.setdefault(len(problem.nodes), []).append(took_s)
        for result in (expected, found):
            if result.placement is not None:
                verify_placement(problem, result.placement, result.throughput_tokens_per_s)
        tally["n"] += 1
        if found.status is PlacementStatus.UNPROVEN:
            tally["unproven"] += 1
            better = found.throughput_tokens_per_s > expected.throughput_tokens_per_s * (1 + SAME_FRAC)
            tally["different"] += better  # an unproven placement that beats the optimum would disprove it
        elif np.isclose(found.throughput_tokens_per_s, expected.throughput_tokens_per_s, rtol=SAME_FRAC, atol=0):
            tally["same_optimum"] += 1
        else:
            tally["different"] += 1
    return {
        **tally,
        "ilp_s": seconds["ilp"],
        "lattice_alone_s": seconds["lattice_alone"],
        "ilp_s_per_combination_by_nodes": {size: float(np.mean(values)) for size, values in sorted(by_size.items())},
    }


def main(arguments: list[str]) -> int:
    """Run, print the JSON report; exit code 1 on any disagreement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="paper-core")
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--n-max", type=int, default=4)
    parser.add_argument("--rho", type=float, default=12.0)
    parser.add_argument("--sample", type=int, default=8, help="combinations for the ILP, of each model and phase")
    parser.add_argument("--time-limit-s", type=float, default=20.0, help="of each integer program")
    parser.add_argument("--solver", choices=("auto", "gurobi", "highs"), default="highs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(options.seed)
    ilp = IlpPlacement(preference=options.solver, time_limit_s=options.time_limit_s)
    warm_up = np.array([[1]], dtype=np.int16)
    parts = []
    for table in tables(options.scenario, options.n_max, options.model):
        counts = enumerate_combinations(
            memory_bytes=table.memory_bytes,
            usable_memory_bytes=table.usable_memory_bytes,
            model_bytes=table.model_bytes,
            n_max=options.n_max,
            rho=options.rho,
        )
        if not len(counts):
            continue
        LatticePlacement().place(table, np.pad(warm_up, ((0, 0), (0, len(table.configs) - 1))))  # loads the kernel
        started, started_cpu = time.perf_counter(), time.process_time()
        placed = LatticePlacement().place(table, counts)
        core_s, wall_s = time.process_time() - started_cpu, time.perf_counter() - started
        verify_placed(table, placed)
        sampled = compare(table, counts, stratified(counts, options.sample, rng), ilp) if options.sample else {"n": 0}
        ilp_each_s = sampled["ilp_s"] / sampled["n"] if sampled["n"] else None
        parts.append(
            {
                "model": table.model,
                "phase": table.phase.value,
                "combinations": len(counts),
                "feasible": len(placed),
                "lattice_core_us_per_combination": core_s / len(counts) * 1e6,
                "lattice_wall_s": wall_s,
                "table_bytes": placed.statistics["table_bytes"],
                "ilp_sample": {
                    **sampled,
                    "speedup_ratio_at_least": ilp_each_s / (core_s / len(counts)) if ilp_each_s else None,
                },
                "by_stages": np.bincount(placed.n_stages).tolist(),
            }
        )
        print(json.dumps(parts[-1]), file=sys.stderr)  # noqa: T201 - progress of a script
    total = sum(part["combinations"] for part in parts)
    core_s = sum(part["combinations"] * part["lattice_core_us_per_combination"] for part in parts) / 1e6
    samples = [part["ilp_sample"] for part in parts if part["ilp_sample"]["n"]]
    n = sum(sample["n"] for sample in samples)
    report = {
        "scenario": options.scenario,
        "n_max": options.n_max,
        "rho": options.rho,
        "solver": options.solver,
        "time_limit_s": options.time_limit_s,
        "combinations": total,
        "lattice_core_us_per_combination": core_s / total * 1e6 if total else None,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ilp_sample": {
            key: sum(sample[key] for sample in samples)
            for key in ("n", "same_optimum", "different", "unproven", "ilp_s")
        }
        | {"speedup_ratio_at_least": sum(s["ilp_s"] for s in samples) / n / (core_s / total) if n else None},
        "parts": parts,
    }
    print(json.dumps(report, indent=2))  # noqa: T201 - the script's answer
    return 1 if report["ilp_sample"]["different"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
