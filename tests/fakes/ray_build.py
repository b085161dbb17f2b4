"""A template library small enough to build in a second: two models of few layers over three node configurations."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import UTC, date, datetime
from functools import partial

from artifacts.store import open_store
from coral_core.clock import ManualClock
from coral_core.domain.hardware import Gpu, LinkKind, NodeConfig
from coral_core.domain.models import ModelShape, Variant
from coral_core.domain.workload import Lengths, Phase, Slo
from tasks import library, solve_shard
from tasks.fanout import RayExecutor
from tasks.library import BuildSpec, ModelBuild, build_library

DAY = date(2026, 1, 1)
CLOCK = ManualClock(start=datetime(2026, 1, 1, tzinfo=UTC))


def gpu(name: str, memory_gb: float, bandwidth_gb_per_s: float, tera_flops: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        memory_bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        compute_flops_per_s={"bf16": tera_flops * 1e12, "fp16": tera_flops * 1e12},
        link_kind=LinkKind.PCIE,
        link_bytes_per_s=16e9,
        source="test",
        as_of=DAY,
    )


GPUS = (gpu("L4", 24, 300, 121), gpu("L40S", 48, 864, 362), gpu("A10G", 24, 600, 70))
CONFIGS = tuple(
    NodeConfig(
        name=f"1x{item.name}", gpu=item, gpu_count=1, nic_bytes_per_s=2.5e9, cloud="test", source="test", as_of=DAY
    )
    for item in GPUS
)
BF16 = Variant(
    name="bf16",
    weight_bits=16,
    expert_bits=16,
    embedding_bits=16,
    kv_bits=16,
    compute_dtype="bf16",
    expert_compute_dtype="bf16",
)


def model(name: str, layers: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=28672,
        vocab=32000,
        tied_embeddings=False,
        max_context_tokens=32768,
        source="test",
        as_of=DAY,
        variants={"bf16": BF16},
    )


def small_spec(**changes) -> BuildSpec:
    builds = tuple(
        ModelBuild(
            shape=model(name, layers),
            variant="bf16",
            phases=(Phase.PREFILL, Phase.DECODE),
            slo=Slo(ttft_s=4.0, tpot_s=0.2),
            lengths=Lengths(mean_input_tokens=900, mean_output_tokens=300, source="test"),
        )
        for name, layers in (("small", 8), ("large", 11))
    )
    return BuildSpec(**{"library": "lib", "configs": CONFIGS, "models": builds, "n_max": 3, "rho": 40.0} | changes)


def slow_down(pause_s: float) -> None:
    """From now on each shard takes `pause_s` longer, for tests that interrupt a build."""
    solve = solve_shard.solve_shard

    def slow(spec, store_url):
        record = solve(spec, store_url)
        time.sleep(pause_s)
        return record

    library.solve_shard = slow


def slow_build(store_url: str, pause_s: float) -> None:
    """Build the small library on Ray, slowly; says how many shards are done and reused."""
    slow_down(pause_s)
    spec = small_spec(method="ilp", combinations_per_ilp_shard=4)
    say = partial(print, flush=True)
    manifest = build_library(
        spec, open_store(store_url), RayExecutor(workers=2), on_progress=lambda p: say(p.done, p.reused)
    )
    say("committed", manifest.version)


def slow_flow(store_url: str, pause_s: float) -> None:
    """Run the flow `build-library` on Ray, slowly."""
    from flows.build_library import build_library
    from flows.parameters import BuildLibraryParameters

    slow_down(pause_s)
    build_library(BuildLibraryParameters(store=store_url, executor="ray", workers=1))


def solve_or_die(spec, store_url):
    """`solve_shard`, but the second part of the large model's decode templates takes its worker with it."""
    if (spec.table.model, spec.table.phase, spec.part) == ("large", Phase.DECODE, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return solve_shard.solve_shard(spec, store_url)


if __name__ == "__main__":
    slow_build(sys.argv[1], float(sys.argv[2]))
