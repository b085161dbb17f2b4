"""Small capacity tables, placements and shards to store, drawn from a seed."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from artifacts.canonical import sha256_hex
from artifacts.library import Manifest, draft_manifest
from artifacts.shards import ShardKey, ShardRecord, write_shard
from artifacts.store import Store
from artifacts.templates import template_table
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Phase, Slo

CONFIGS = ("g6.xlarge", "4xL4", "a-b", "Z", "2xA100")


def capacity_table(
    *,
    model: str = "m",
    variant: str = "bf16",
    phase: Phase = Phase.DECODE,
    slo: Slo | None = None,
    configs: tuple[str, ...] = CONFIGS,
    layers: int = 9,
    max_stages: int = 3,
    error_frac: tuple[float | None, ...] | None = None,
) -> CapacityTable:
    shape = (max_stages, len(configs), layers)
    sources = tuple(list(CapacitySource)[i % len(CapacitySource)] for i in range(len(configs)))
    return CapacityTable(
        model=model,
        variant=variant,
        phase=phase,
        slo=slo or Slo(ttft_s=1.5, tpot_s=0.05),
        configs=configs,
        layers=layers,
        throughput=np.broadcast_to(np.linspace(100.0, 10.0, layers), shape).copy(),
        layout=np.arange(np.prod(shape), dtype=np.int16).reshape(shape) % 3,
        layouts=("tp1 pp1 dp1", "tp2 pp1 dp1", "tp1 pp2 dp2"),
        sources=sources,
        error_frac=error_frac or tuple(0.1 * (i + 1) for i in range(len(configs))),
        memory_bytes=np.ones(len(configs)),
        usable_memory_bytes=np.ones(len(configs)),
        model_bytes=1.0,
        inputs_hash="0" * 64,
    )


def placements(table: CapacityTable, n: int, *, seed: int = 0, method: str = "lattice") -> PlacedCombinations:
    """`n` random whole placements (not optimal ones: that is not the store's business)."""
    rng = np.random.default_rng(seed)
    S, C = min(table.max_stages, table.layers), len(table.configs)
    n_stages = rng.integers(1, S + 1, n).astype(np.int16)
    stage_layers = np.zeros((n, S), np.int16)
    stage_counts = np.zeros((n, S, C), np.int16)
    for row, stages in enumerate(n_stages):
        cuts = np.sort(rng.choice(np.arange(1, table.layers), stages - 1, replace=False))
        stage_layers[row, :stages] = np.diff([0, *cuts, table.layers])
        for stage in range(stages):
            nodes = rng.integers(0, C, rng.integers(1, 4))
            np.add.at(stage_counts[row, stage], nodes, 1)
    return PlacedCombinations(
        counts=stage_counts.sum(axis=1).astype(np.int16),
        throughput=rng.uniform(1.0, 1e4, n),
        n_stages=n_stages,
        stage_layers=stage_layers,
        stage_counts=stage_counts,
        proven=rng.random(n) < 0.9,
        method=method,
        statistics={},
    )


def shard_key_of(
    table: CapacityTable, *, part: int = 0, parts: int = 1, seed: int = 0, method: str = "lattice"
) -> ShardKey:
    return ShardKey(
        model=table.model,
        variant=table.variant,
        phase=table.phase,
        ttft_s=table.slo.ttft_s,
        tpot_s=table.slo.tpot_s,
        method=method,
        part=part,
        parts=parts,
        inputs_hash=sha256_hex(f"{table.model} {part} {seed}".encode()),
    )


def rows_of(table: CapacityTable, n: int, *, seed: int = 0) -> pa.Table:
    """`n` template rows whose ids differ."""
    made = template_table(table, placements(table, 2 * n + 20, seed=seed))
    first = {id_: i for i, id_ in reversed(list(enumerate(made["template_id"].to_pylist())))}
    return made.take(pa.array(sorted(first.values())[:n], pa.int64()))


def shards_of(store: Store, *, models=("m1", "m2"), phases=(Phase.PREFILL, Phase.DECODE), parts=2) -> list[ShardRecord]:
    """Ten rows in every shard, stored in the library `lib`; those that are there already are reused."""
    return [
        write_shard(
            store,
            "lib",
            shard_key_of(table, part=part, parts=parts),
            rows_of(table, 10, seed=part),
            statistics={"solve_s": 0.5},
        )
        for model in models
        for phase in phases
        for table in [capacity_table(model=model, phase=phase)]
        for part in range(parts)
    ]


def draft_of(shards: list[ShardRecord], **changes) -> Manifest:
    """A draft of all these shards in the library `lib`, unless changed."""
    given = {
        "library": "lib",
        "shards": shards,
        "shards_expected": len(shards),
        "created_at": datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        "code_version": "1.2.3",
        "inputs": {"catalog": "abc"},
        "parameters": {"n_max": np.int64(4), "phases": [Phase.DECODE]},
        "statistics": {"solve_s": 1.5},
    }
    return draft_manifest(**{**given, **changes})
