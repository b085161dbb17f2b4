"""A library is built anew only where what it rests on has changed: prices never are, models, SLOs and profiles are."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import yaml

from artifacts.library import open_library
from artifacts.store import open_store
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.workload import Phase
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario, capacity_inputs
from tests.fakes.ray_build import CONFIGS, model, small_spec

NAMES = count()
SCENARIO = {
    "name": "mine",
    "catalog": "paper-core",
    "configs": ["1xL4", "1xL40S", "own"],
    "own_configs": {
        "own": {
            "gpu": "L40S",
            "gpu_count": 2,
            "nic_gbit_per_s": 25,
            "price_usd_per_h": {"us-east-2": 4.0},
            "source": "an offer",
            "as_of": "2026-11-01",
        }
    },
    "regions": ["us-east-2"],
    "models": [
        {
            "model": name,
            "requests_per_s": 10,
            "lengths": "azure-conv",
            "slo": {"ttft_s": 1.2, "tpot_s": 0.06},
        }
        for name in ("phi-4", "gpt-oss-20b")
    ],
    "library": {"n_max": 2, "rho": 12},
}


@pytest.fixture
def store():
    return open_store(f"memory://incremental-{next(NAMES)}")


def built(spec, store):
    """Build; (version, reused shards, shards, names of those solved)."""
    seen = []
    manifest = build_library(spec, store, InlineExecutor(), on_progress=seen.append)
    return manifest.version, seen[0].reused, seen[0].total, [progress.last for progress in seen[1:]]


def scenario_spec(tmp_path, **changes):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, **changes}), encoding="utf-8")
    return build_spec_from_scenario(resolve_scenario(load_scenario(str(file))))


def models_with(index, **changes):
    """The small library's models, one of them changed."""
    models = list(small_spec().models)
    models[index] = replace(models[index], **changes)
    return tuple(models)


def test_a_changed_price_changes_nothing(store, tmp_path):
    spec = scenario_spec(tmp_path)
    assert built(spec, store)[:3] == (1, 0, 4)
    own = {**SCENARIO["own_configs"]["own"], "price_usd_per_h": {"us-east-2": 0.01}, "source": "another offer"}
    dearer = scenario_spec(tmp_path, own_configs={"own": own})
    assert built(dearer, store) == (2, 4, 4, [])
    assert capacity_inputs(dearer) == capacity_inputs(spec)
    first, second = (open_library(store, "mine", version) for version in (1, 2))
    assert first.manifest.shards == second.manifest.shards
    assert first.read().equals(second.read())


def test_more_demand_or_another_region_changes_nothing(store, tmp_path):
    assert built(scenario_spec(tmp_path), store)[1:3] == (0, 4)
    models = [{**spec, "requests_per_s": 99} for spec in SCENARIO["models"]]
    assert built(scenario_spec(tmp_path, models=models, regions=["ap-northeast-2"]), store) == (2, 4, 4, [])


@pytest.mark.parametrize(
    ("change", "solved"),
    [
        ({"slo": {"ttft_s": 1.2, "tpot_s": 0.05}}, {"phi-4 bf16 prefill", "phi-4 bf16 decode"}),
        ({"lengths": "azure-code"}, {"phi-4 bf16 prefill", "phi-4 bf16 decode"}),
    ],
)
def test_a_changed_slo_or_length_builds_that_model_anew(store, tmp_path, change, solved):
    built(scenario_spec(tmp_path), store)
    models = [{**SCENARIO["models"][0], **change}, SCENARIO["models"][1]]
    version, reused, total, last = built(scenario_spec(tmp_path, models=models), store)
    assert (version, reused, total) == (2, 2, 4)
    assert {text.split(" lattice")[0] for text in last} == solved


@pytest.mark.parametrize(
    ("changes", "reused", "solved"),
    [
        ({}, 4, set()),
        ({"models": models_with(1, shape=model("large", 12))}, 2, {"large bf16 prefill", "large bf16 decode"}),
        ({"models": small_spec().models[::-1]}, 4, set()),
        ({"models": small_spec().models[:1]}, 2, set()),
        ({"n_max": 2}, 0, {f"{name} bf16 {phase}" for name in ("small", "large") for phase in ("prefill", "decode")}),
    ],
)
def test_a_changed_model_builds_that_model_anew(store, changes, reused, solved):
    built(small_spec(), store)
    _, found, total, last = built(small_spec(**changes), store)
    assert found == reused
    assert len(last) == total - reused
    assert {text.split(" lattice")[0] for text in last} == solved


def test_another_headroom_of_one_phase_builds_that_phase_anew(store):
    spec = small_spec()
    built(spec, store)
    factors = {**spec.assumptions.max_utilization_frac, Phase.DECODE: 0.8}
    changed = small_spec(assumptions=replace(spec.assumptions, max_utilization_frac=factors))
    _, reused, total, last = built(changed, store)
    assert (reused, total) == (2, 4)
    assert {text.split(" lattice")[0] for text in last} == {"small bf16 decode", "large bf16 decode"}


def test_a_faster_gpu_builds_what_it_speeds_up(store):
    """A capacity is rebuilt where its table changes: with more memory bandwidth that is decode for sure."""
    built(small_spec(), store)
    gpu = CONFIGS[0].gpu
    faster = replace(gpu, memory_bandwidth_bytes_per_s=2 * gpu.memory_bandwidth_bytes_per_s)
    changed = small_spec(configs=(replace(CONFIGS[0], gpu=faster), *CONFIGS[1:]))
    _, reused, total, last = built(changed, store)
    assert len(last) == total - reused
    assert {"small bf16 decode", "large bf16 decode"} <= {text.split(" lattice")[0] for text in last}


def test_what_was_changed_back_is_found_again(store):
    """Data files are kept under the hash of their inputs, so nothing is solved to return to an older state."""
    first = built(small_spec(), store)
    built(small_spec(n_max=2), store)
    again = built(small_spec(), store)
    assert first[0:3] == (1, 0, 4)
    assert again == (3, 4, 4, [])
    assert open_library(store, "lib", 3).manifest.shards == open_library(store, "lib", 1).manifest.shards
