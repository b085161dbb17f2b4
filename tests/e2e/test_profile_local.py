"""Real vLLM on this machine: profiled by the flow on nodes of the provider `local`, then served behind the gateway and simulated.

The engines sleep 20 ms per layer and step, so that what else the machine does is a small part of every time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from artifacts.profiles import read_profile
from artifacts.store import open_store
from coral_core.cloud.local_processes import members
from coral_core.domain.workload import Phase
from coral_core.perf.profile import Profile
from coral_core.sim.profiled import profiled_timing
from tasks.fidelity import Bench, FidelitySpec, bench_fidelity
from tasks.fidelity_compare import Fidelity, Serving

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LAYER_S = 0.02
SPEC = FidelitySpec(
    servings=(Serving.AGGREGATED,),
    layer_delay_ms="20,0.1",
    requests=16,
    requests_per_s=0.8,
    input_tokens=(32, 128),
    output_tokens=(4, 16),
    lone_requests=3,
)
SWEEP = {
    "batches": [1, 4],
    "prompts": [32, 128],
    "contexts": [64],
    "max_batched_tokens": 2048,
    "max_requests": 16,
    "samples": 7,
    "max_cv_frac": 0.5,
    "attempts": 4,
}
CI_FRAC = 0.25
"""On a machine that does other things too; docs/accuracy.md has the figures of a quiet one."""


@dataclass
class Profiled:
    profile: Profile
    messages: dict[str, str]
    processes: list[int]
    folder: Path


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, engine_python):
    """The flow has run once, with the terms that the model is served with afterwards."""
    from prefect.testing.utilities import prefect_test_harness

    folder = tmp_path_factory.mktemp("profile")
    bench = Bench(spec=SPEC, folder=folder, interpreter=engine_python, on_step=print, first_port=0)
    (terms,) = bench.terms().models.values()
    engine = {
        "path": terms.path,
        "dtype": terms.dtype,
        "max_model_len_tokens": terms.max_model_len_tokens,
        "max_num_seqs": terms.max_num_seqs,
        "max_num_batched_tokens": terms.max_num_batched_tokens,
        "block_size_tokens": terms.block_size_tokens,
        "kv_cache_memory_bytes": terms.kv_cache_memory_bytes,
        "extra_args": list(terms.extra_args),
        "env": dict(terms.env),
    }
    document = {"device": "cpu", "step_timeout_s": 120, "models": {"tiny-chat": {"fp32": engine}}}
    (folder / "engine.yaml").write_text(yaml.safe_dump(document))
    with pytest.MonkeyPatch.context() as patch, prefect_test_harness(server_startup_timeout=300):
        patch.setenv("CORAL_ENGINE_PYTHON", str(engine_python))
        patch.setenv("CORAL_LOCAL", str(folder / "local"))
        patch.setenv("CORAL_LOCAL_FIRST_PORT", "26000")
        from flows.parameters import ProfileParameters
        from flows.profile_gpus import profile_gpus

        end = profile_gpus(
            ProfileParameters.model_validate(
                {
                    "engine_file": str(folder / "engine.yaml"),
                    "depths": [2, 6],
                    "sweep": SWEEP,
                    "max_minutes": 20,
                    "store": (folder / "store").as_uri(),
                }
            )
        )
        assert end.unfinished == {}, json.dumps(end.unfinished)
        left = [one.pid for path in (folder / "local" / "nodes").iterdir() for one in members(path)]
        profile = read_profile(open_store((folder / "store").as_uri()), end.keys["local-large"])
    return Profiled(profile=profile, messages=end.unfinished, processes=left, folder=folder)


def test_a_profile_of_this_machine_says_what_its_engines_take(profiled, engine_python):
    profile = profiled.profile
    assert {(point.phase, point.requests, point.tokens) for point in profile.points} >= {(Phase.DECODE, 1.0, 64.0)}
    for point in profile.points:
        slept_s = LAYER_S + 1e-4 * point.requests * (point.tokens if point.phase is Phase.PREFILL else 1.0)
        assert 0.5 * slept_s < point.layer_s < 4 * slept_s, point
    assert profile.kv_tokens[1] == pytest.approx(64 * 2**20 / (8 * 2 * 2 * 32 * 4), rel=0.02)
    assert profile.start_s[1] > 3
    assert "CORAL_LAYER_DELAY_MS=20,0.1" in profile.key.flags


def test_no_process_is_left_of_a_node(profiled):
    assert profiled.processes == []


def test_the_simulator_is_near_real_serving(profiled, engine_python, record_property):
    assert max(map(abs, profiled_timing(profiled.profile, 1).error_frac)) < 0.5
    _, (found,) = bench_fidelity(
        SPEC, folder=profiled.folder, interpreter=engine_python, profile=profiled.profile, on_step=print
    )
    assert isinstance(found, Fidelity), found
    record_property("fidelity", json.dumps(found.to_json()))
    assert {row["label"] for row in found.rows()} == {"measured", "simulated"}
    for one in found.compared:
        assert one.deviation_frac <= max(CI_FRAC, 1.5 * one.noise_floor_frac), found.to_json()
