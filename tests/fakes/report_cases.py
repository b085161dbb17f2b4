"""Evaluations made up for the report: as many policies, models, epochs and seeds as a case wants, in their true shape."""

from __future__ import annotations

from typing import Any

from coral_core.sim.metrics import CURVE_FRACS

NODES = {
    "1xL4": {"gpu": "L4", "gpu_count": 1, "price_usd_per_h": {"us-east-2": 0.8, "mars-1": 1.0}},
    "2xL40S": {"gpu": "L40S", "gpu_count": 2, "price_usd_per_h": {"us-east-2": 3.5}},
}
STAGES = [{"layers": 26, "nodes": ["2xL40S"]}, {"layers": 14, "nodes": ["1xL4", "1xL4"]}]
STAGES_USD_PER_H = 3.5 + 2 * 0.8


def evaluation(
    *,
    policies: tuple[str, ...] = ("coral", "homo"),
    models: tuple[str, ...] = ("phi-4",),
    epochs: int = 2,
    seeds: tuple[int, ...] = (0, 1, 2),
    goodput: float = 900.0,
    scenario: str = "made-up",
    is_simulated: bool = True,
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """(document, tables); the later a policy, the dearer it is and the less it serves."""
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("epochs", "costs", "instances", "service", "latencies")
    }
    for rank, policy in enumerate(policies):
        for epoch in range(epochs):
            _add_plan(tables, policy, epoch, models, 1.0 + rank)
        if is_simulated:
            _add_service(tables, policy, epochs=epochs, seeds=seeds, models=models, goodput=goodput / (1 + rank))
    document = {
        "schema_version": 1,
        "code_version": "9.9.9",
        "scenario": scenario,
        "inputs": {
            "description": "Made up.",
            "regions": ["us-east-2", "mars-1"],
            "models": [
                {"model": model, "variant": None, "requests_per_s": 4.0, "lengths": "azure-conv"} for model in models
            ],
            "epochs": {"duration_s": 360.0},
            "allocation": {"startup_s": 300.0},
        },
        "headroom": [
            {"model": model, "phase": phase, "slo_frac": 0.9, "max_utilization_frac": share, "source": "a test"}
            for model in models
            for phase, share in (("prefill", 0.6), ("decode", 0.5))
        ],
        "headroom_note": "headroom: a test",
        "seeds": list(seeds),
        "epochs": epochs,
        "policies": {
            policy: _summary(tables, policy, models, seeds, goodput / (1 + rank) if is_simulated else None)
            for rank, policy in enumerate(policies)
        },
        "failed": {},
        "ratios": {
            policies[0]: {
                policy: {
                    "cost_ratio": 1.0 + rank,
                    "goodput_ratio": 1.0 + rank if is_simulated and goodput else None,
                    "goodput_per_usd_ratio": None,
                    "intervals": {"goodput_ratio": _interval(1.0 + rank, len(seeds))},
                    "published": {"cost_ratio": 1.62, "goodput_ratio": None, "section": "6.3"} if rank == 1 else None,
                }
                for rank, policy in enumerate(policies)
                if rank
            }
        },
        "published_source": "arXiv 0000.00000",
        "supply_nodes": [max(16 - epoch, 0) for epoch in range(epochs)],
        "nodes": NODES,
        "slos": {model: {"ttft_s": 1.2, "tpot_s": 0.06} for model in models},
        "libraries": {"lattice": {"name": "made-up", "version": 3, "sha256": "ab" * 32}},
        "price_sources": ["a list", "another list"],
        "price_as_of": "2026-01-01",
        "input_hashes": {"scenario": "cd" * 32, "catalogue": "ef" * 32},
    }
    return document, tables


def _add_plan(
    tables: dict[str, list[dict[str, Any]]], policy: str, epoch: int, models: tuple[str, ...], factor: float
) -> None:
    cost = factor * STAGES_USD_PER_H * len(models)
    tables["epochs"].append(
        {
            "policy": policy,
            "epoch": epoch,
            "provisioning_usd_per_h": cost,
            "startup_usd_per_h": 0.5,
            "cost_usd_per_h": cost + 0.5,
            "shortfall_frac": 0.0,
            "solve_s": 0.1 * factor,
            "instances": 2,
            "mixed_instances": 1,
            "nodes": 4,
        }
    )
    for model in models:
        tables["costs"].append(
            {
                "policy": policy,
                "epoch": epoch,
                "model": model,
                "phase": "decode",
                "provisioning_usd_per_h": cost / len(models),
                "instances": 1,
                "mixed_instances": 1,
            }
        )
        tables["instances"].append(
            {
                "policy": policy,
                "epoch": epoch,
                "template": f"d-{model}",
                "region": "us-east-2",
                "count": int(factor),
                "model": model,
                "phase": "decode",
                "stages": STAGES,
                "price_usd_per_h": STAGES_USD_PER_H,
            }
        )


def _add_service(
    tables: dict[str, list[dict[str, Any]]],
    policy: str,
    *,
    epochs: int,
    seeds: tuple[int, ...],
    models: tuple[str, ...],
    goodput: float,
) -> None:
    for seed in seeds:
        for epoch in (*range(epochs), None):
            tables["service"] += [
                {
                    "policy": policy,
                    "seed": seed,
                    "epoch": epoch,
                    "model": model,
                    "offered_tokens_per_s": 1000.0,
                    "goodput_tokens_per_s": goodput + seed,
                    "attainment_frac": goodput / 1000.0,
                }
                for model in (*models, "*")
            ]
    tables["latencies"] += [
        {
            "policy": policy,
            "seed": seeds[0],
            "model": model,
            "latency": latency,
            "frac": frac,
            "value_s": scale * frac,
            "measured_requests": 80,
            "offered_requests": 100,
        }
        for model in models
        for latency, scale in (("ttft", 2.0), ("tpot", 0.08))
        for frac in CURVE_FRACS
    ]


def _summary(
    tables: dict[str, list[dict[str, Any]]],
    policy: str,
    models: tuple[str, ...],
    seeds: tuple[int, ...],
    goodput: float | None,
) -> dict[str, Any]:
    first = next(row for row in tables["epochs"] if row["policy"] == policy)
    share = None if goodput is None else goodput / 1000.0
    return {
        **{name: first[name] for name in ("cost_usd_per_h", "provisioning_usd_per_h", "startup_usd_per_h")},
        **{name: float(first[name]) for name in ("instances", "mixed_instances", "nodes")},
        "goodput_tokens_per_s": goodput,
        "attainment_frac": share,
        "without_handover_attainment_frac": share,
        "offered_tokens_per_s": None if goodput is None else 1000.0,
        "billed_usd_per_h": None if goodput is None else 5.0,
        "shortfall_frac": first["shortfall_frac"],
        "solve_s": {"mean": first["solve_s"], "max": first["solve_s"]},
        "library_method": "lattice",
        "intervals": {"goodput_tokens_per_s": _interval(goodput, len(seeds))},
        "models": {}
        if goodput is None
        else {
            model: {
                "offered_tokens_per_s": 1000.0,
                "goodput_tokens_per_s": goodput,
                "attainment_frac": share,
                **dict.fromkeys(("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s"), 0.5),
            }
            for model in models
        },
        "digests": [] if goodput is None else [f"digest-{policy}-{seed}" for seed in seeds],
        "notes": [] if goodput is not None else ["not simulated: no timing"],
    }


def _interval(mean: float | None, n: int) -> dict[str, Any]:
    known = mean is not None and n > 1
    return {"mean": mean, "low": mean * 0.9 if known else None, "high": mean * 1.1 if known else None, "n": n}
