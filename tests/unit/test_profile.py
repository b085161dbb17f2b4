"""Profiles: what is refused, what they do to capacities, the store, and the commands."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from artifacts.profiles import list_profiles, newest_profile, profiles_of, read_profile, write_profile
from artifacts.store import open_store
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import DataGapError, InputError, StoreError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.budgets import budget_table
from coral_core.perf.capacity import capacity_table
from coral_core.perf.explain import explain_capacity
from coral_core.perf.measured import UNKNOWN_S, measured_fixed_s, measured_layer_s, profiled_tps
from coral_core.perf.profile import Profile, ProfilePoint
from coral_core.perf.profile_check import checked_points, least_layer_s
from coral_core.perf.roofline import step_of
from tests.fakes.perf_cases import FREE, factors, gpu, lengths, model, node
from tests.fakes.profile_grids import grid, profile

SLO = Slo(ttft_s=4.0, tpot_s=0.2)
ROOMY = node(count=2, nic=1e15, of=gpu(memory_bytes=10**12))
TIME = datetime(2026, 11, 29, 12, tzinfo=UTC)


def decode_s(requests: float, tokens: float) -> float:
    return 1e-3 + 1e-5 * requests + 1e-8 * requests * tokens


def prefill_s(requests: float, tokens: float) -> float:
    return 1e-3 + 4e-6 * requests * tokens


def both(config: str = "node", **changes: object) -> Profile:
    points = grid(Phase.DECODE, (1, 8, 64), (100, 1000), decode_s, cv_frac=0.02)
    points += grid(Phase.PREFILL, (1,), (100, 1000, 8000), prefill_s, fixed_s=0.002, cv_frac=0.04)
    return replace(profile(points, config=config), **changes)  # type: ignore[arg-type]  # names are checked at run time


def table(phase: Phase, given: CapacityAssumptions = FREE, profiles: dict[str, Profile] | None = None) -> CapacityTable:
    return capacity_table(
        shape=model(),
        variant="bf16",
        phase=phase,
        slo=SLO,
        lengths=lengths(500, 100),
        configs=[ROOMY, node("other", count=2, nic=1e15, of=gpu(memory_bytes=10**12))],
        max_stages=2,
        assumptions=given,
        factors=factors(),
        profiles={"node": both()} if profiles is None else profiles,
    )


def test_measured_times_come_before_estimates() -> None:
    found = table(Phase.DECODE)
    assert found.sources == (CapacitySource.INTERPOLATED, CapacitySource.ESTIMATED)
    assert found.error_frac[0] == pytest.approx(0.04)
    assert found.error_frac[1] is None
    # 64 requests a step, the largest measured, on each of two replicas; contexts of 550 lie between 100 and 1000.
    expected = 2 * 64 / (6 * decode_s(64, 550))
    assert found.throughput[0, 0, -1] == pytest.approx(expected)
    assert (
        found.layouts[found.layout[0, 0, -1]] == "tp1 pp1 dp2" or found.layouts[found.layout[0, 0, -1]] == "tp1 pp2 dp1"
    )


def test_prefill_takes_the_fixed_part_of_its_steps() -> None:
    # One prompt alone was measured; sixteen together count as one of 8000 tokens: the best of all steps.
    found = table(Phase.PREFILL).throughput[0, 0, -1]
    best = max(2 * n * 500 / (6 * prefill_s(1, 500 * n) + 0.002) for n in range(1, 17))
    assert found == pytest.approx(best)


def test_aggregated_service_adds_both_phases() -> None:
    found = table(Phase.AGGREGATED)
    assert found.sources[0] is CapacitySource.INTERPOLATED
    assert found.throughput[0, 0, -1] > 0
    only_decode = profile(grid(Phase.DECODE, (1, 64), (100, 1000), decode_s))
    assert table(Phase.AGGREGATED, profiles={"node": only_decode}).sources[0] is CapacitySource.ESTIMATED
    step = step_of(Phase.AGGREGATED, np.array([1.0, 40.0, 65.0]), lengths(500, 100))
    seconds = measured_layer_s(both(), Phase.AGGREGATED, 1, step, lengths(500, 100))
    assert seconds[0] == pytest.approx(decode_s(1, 550) + 0.01 * prefill_s(1, 500))
    assert seconds[1] == pytest.approx(decode_s(40, 550) + 0.4 * prefill_s(1, 500))
    assert seconds[2] == UNKNOWN_S


def test_steps_that_one_point_says_nothing_of_are_not_taken_for_as_fast() -> None:
    """Five prompts of 1500 beside sixteen of 128 and a single one of 2048; and a prompt longer than the only length."""

    def linear_s(requests: float, tokens: float) -> float:
        return 4e-6 * requests * tokens

    def seconds(points: list[ProfilePoint], prompt: float, count: float) -> float:
        asked = lengths(prompt, 100)
        step = step_of(Phase.PREFILL, np.array([count]), asked)
        return float(measured_layer_s(profile(points), Phase.PREFILL, 1, step, asked)[0])

    patchy = grid(Phase.PREFILL, (1, 64), (128,), linear_s) + grid(Phase.PREFILL, (1,), (2048,), linear_s)
    assert seconds(patchy, 1500, 5.0) == pytest.approx(linear_s(5, 1500))
    assert seconds(grid(Phase.PREFILL, (1, 4), (512,), linear_s), 1500, 1.0) == pytest.approx(linear_s(1, 1500))


def test_without_estimates_every_configuration_needs_a_profile() -> None:
    strict = replace(FREE, allow_estimates=False)
    with pytest.raises(DataGapError, match="no measured profile of model toy on other"):
        table(Phase.DECODE, strict)
    found = table(Phase.DECODE, strict, {"node": both(), "other": both("other")})
    assert found.sources == (CapacitySource.INTERPOLATED,) * 2


def test_lengths_beyond_the_measured_are_extrapolated() -> None:
    short = profile(grid(Phase.DECODE, (1, 64), (10, 20), decode_s))
    assert table(Phase.DECODE, profiles={"node": short}).sources[0] is CapacitySource.EXTRAPOLATED


def test_only_measured_sizes_of_tensor_parallelism_count() -> None:
    wide = profile(grid(Phase.DECODE, (1, 64), (100, 1000), decode_s, tp=2))
    assert profiled_tps(wide, Phase.DECODE) == (2,)
    assert profiled_tps(wide, Phase.PREFILL) == ()
    found = table(Phase.DECODE, profiles={"node": wide})
    assert {found.layouts[code] for code in found.layout[:, 0].ravel() if code >= 0} == {"tp2 pp1 dp1"}
    with pytest.raises(DataGapError, match=r"no decode times of toy on node at TP 1.*measured: decode at TP 2"):
        wide.require(Phase.DECODE, 1)


def test_another_profile_is_another_input() -> None:
    hashes = {table(Phase.DECODE, profiles=profiles).inputs_hash for profiles in ({}, {"node": both()})}
    slower = grid(Phase.DECODE, (1, 64), (100, 1000), lambda n, t: 2 * decode_s(n, t))
    hashes.add(table(Phase.DECODE, profiles={"node": profile(slower)}).inputs_hash)
    assert len(hashes) == 3


def test_free_budgets_and_explanations_use_the_profile_too() -> None:
    question = {
        "shape": model(),
        "variant": "bf16",
        "phase": Phase.DECODE,
        "slo": SLO,
        "lengths": lengths(500, 100),
        "assumptions": FREE,
        "factors": factors(),
        "profiles": {"node": both()},
    }
    free = budget_table(configs=[ROOMY], grid=2, **question)  # type: ignore[arg-type]  # the same keywords for both
    assert free.throughput[0, 0] == pytest.approx(table(Phase.DECODE).throughput[1, 0])
    told = explain_capacity(config=ROOMY, stages=1, layers=6, **question)  # type: ignore[arg-type]  # as above
    assert told is not None
    assert told.throughput == pytest.approx(table(Phase.DECODE).throughput[0, 0, -1])
    assert sum(told.layer_parts_s.values()) == pytest.approx(decode_s(64, 550))


def test_pessimistic_estimates_are_slower_and_profiles_as_they_are() -> None:
    careful = replace(FREE, pessimistic=True)
    middle, slow = table(Phase.DECODE), table(Phase.DECODE, careful)
    assert slow.throughput[0, 0, -1] == middle.throughput[0, 0, -1]
    assert 0 < slow.throughput[0, 1, -1] < middle.throughput[0, 1, -1]
    assert slow.inputs_hash != middle.inputs_hash


POINT = ProfilePoint(phase=Phase.DECODE, tp=1, requests=4.0, tokens=100.0, layer_s=1e-3)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"layer_s": math.nan}, "table: row 2: layer_s is nan, must be a number above 0"),
        ({"layer_s": 0.0}, "table: row 2: layer_s is 0.0"),
        ({"requests": -1.0}, "table: row 2: requests is -1.0"),
        ({"tokens": math.inf}, "table: row 2: tokens is inf"),
        ({"fixed_s": -1.0}, "table: row 2: fixed_s is -1.0"),
        ({"cv_frac": math.nan}, "table: row 2: cv_frac is nan"),
        ({"samples": 0}, "table: row 2: samples is 0, must be at least 1"),
        ({"tp": 0}, "table: row 2: tp is 0"),
        ({"tokens": 1e12, "layer_s": 1e3}, "table: row 2: tokens is 1e\\+12, but toy takes no more than"),
        ({"requests": 5.0, "layer_s": 1e3}, "table: row 2: a layer takes 1e\\+06 ms, over 1000 times the"),
        ({"tp": 3}, "table: row 2: toy cannot run at TP 3 on 4 GPUs"),
        ({"phase": Phase.AGGREGATED}, "table: row 2: phase aggregated has no times of its own"),
        ({}, "table: rows 1 and 2: decode at TP 1, 4 requests of 100 tokens is there twice"),
        (
            {"requests": 5.0, "layer_s": 1e-9},
            "table: row 2: a layer takes 1e-06 ms, but toy's peaks allow no less than",
        ),
        ({"requests": 5.0, "layer_s": 8e-4}, "table: rows 1 and 2: decode at TP 1 falls from 0.001 to 0.0008 s"),
        ({"tokens": 500.0, "layer_s": 8e-4}, "table: rows 1 and 2: decode at TP 1 falls"),
    ],
)
def test_times_that_cannot_be_true_are_refused(second: dict[str, object], text: str) -> None:
    points = [POINT, replace(POINT, **second)]  # type: ignore[arg-type]  # names are checked at run time
    with pytest.raises(InputError, match=text):
        checked_points(points, model(), "bf16", gpu(bandwidth=1e12), 4, where="table")


def test_a_small_drop_is_levelled_and_no_times_are_none() -> None:
    points = [POINT, replace(POINT, requests=8.0, layer_s=0.97e-3)]
    checked_points(points, model(), "bf16", gpu(bandwidth=1e12), 4, where="table")
    curves = profile(points).require(Phase.DECODE, 1)
    assert curves.layer_times(np.array([8.0]), 100).seconds.tolist() == [1e-3]
    with pytest.raises(InputError, match="table: there are no times"):
        checked_points([], model(), "bf16", gpu(), 4, where="table")


def test_no_time_is_below_what_memory_and_compute_allow() -> None:
    body = 2 * 1024 * 8 * 128 + 2 * 1024 * 4 * 128 + 3 * 1024 * 4096 + 2 * 1024 + 1024 / 6
    slow_memory = gpu(bandwidth=1e11, flops=1e15)
    assert least_layer_s(POINT, model(), "bf16", slow_memory) == pytest.approx(2 * body / 1e11)
    prompt = replace(POINT, phase=Phase.PREFILL, requests=2.0, tokens=1e6)
    assert least_layer_s(prompt, model(), "bf16", gpu(flops=1e13)) == pytest.approx(2 * body * 2e6 / 1e13)


def test_the_store_keeps_what_was_measured(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    kept = both(flags_of := "node")
    flagged = replace(kept, key=replace(kept.key, flags=("--enforce-eager",)))
    first = write_profile(store, kept, time=TIME)
    later = write_profile(store, replace(kept, source="again"), time=TIME.replace(hour=13))
    other = write_profile(store, flagged, time=TIME)
    assert first.startswith("profiles/toy/node/vllm-0.32.0-bf16/")
    assert other.split("/")[3].startswith("vllm-0.32.0-bf16-")
    assert read_profile(store, first) == kept
    assert list_profiles(store) == sorted([later, other])
    newest = newest_profile(store, "toy", flags_of, "vllm-0.32.0-bf16")
    assert newest is not None
    assert newest.source == "again"
    assert newest_profile(store, "toy", "elsewhere", "vllm-0.32.0-bf16") is None
    assert [key for key, _ in profiles_of(store, "toy", "bf16")] == list_profiles(store)
    assert list(profiles_of(store, "toy", "fp8")) == []
    assert read_profile(store, other).content_hash != kept.content_hash


def test_damaged_profiles_are_told_from_whole_ones(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    key = write_profile(store, both(), time=TIME)
    broken = key.replace("T12", "T13")
    store.put(broken, store.get(key)[:-10])
    with pytest.raises(StoreError, match="is no profile"):
        read_profile(store, broken)
    import pyarrow as pa
    import pyarrow.parquet as pq

    foreign = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1]}), foreign)
    store.put(broken, foreign.getvalue().to_pybytes())
    with pytest.raises(StoreError, match="is no profile"):
        read_profile(store, broken)


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ([replace(POINT, layer_s=math.nan)], "row 1: layer_s is nan"),
        ([POINT, POINT], "rows 1 and 2: decode at TP 1, 4 requests of 100 tokens is there twice"),
        ([], "there are no times"),
    ],
)
def test_stored_times_that_nobody_checked_are_refused(tmp_path: Path, points: list[ProfilePoint], text: str) -> None:
    store = open_store(f"file://{tmp_path}")
    key = write_profile(store, profile(points), time=TIME)
    with pytest.raises(StoreError, match=text):
        read_profile(store, key)


def test_a_profile_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    key = write_profile(store, both(), time=TIME)
    for there in (key.replace("/toy/", "/other/"), key.replace("0.32.0", "0.31.0")):
        store.put(there, store.get(key))
        with pytest.raises(StoreError, match="is the profile of profiles/toy/"):
            read_profile(store, there)


def test_a_scenario_plans_with_the_profiles_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coral_core.catalog import load_catalog, load_models
    from coral_core.config.resolve import resolve_scenario
    from coral_core.config.scenario import load_scenario
    from tasks.library import build_spec_from_scenario, capacity_tables

    store = open_store(f"file://{tmp_path}")
    monkeypatch.setenv("CORAL_STORE", store.url)
    base = load_scenario("tiny")

    def tables(**capacity: object) -> list[CapacityTable]:
        given = base.capacity.model_validate({**base.capacity.model_dump(), **capacity})
        resolved = resolve_scenario(base.model_copy(update={"capacity": given}))
        return capacity_tables(replace(build_spec_from_scenario(resolved, method="lattice"), n_max=1))

    engine = {"engine": "vllm-0.32.0-bf16"}
    with pytest.raises(
        DataGapError, match=r"no profile by vllm-0\.32\.0-bf16 of any model and configuration of scenario tiny"
    ):
        tables(profiles=engine)
    first = tables()[0]
    config = first.configs[0]
    shape = load_models()[first.model]
    gpu_of = load_catalog("paper-core").configs[config].gpu
    points = grid(Phase.PREFILL, (1,), (10, 20_000), lambda n, t: 0.01 + 1e-4 * n * t)
    points = list(checked_points(points, shape, "bf16", gpu_of, 1, where="made up"))
    made = profile(points, config=config)
    write_profile(store, replace(made, key=replace(made.key, model=first.model)), time=TIME)
    found = tables(profiles=engine)[0]
    assert found.sources == (CapacitySource.INTERPOLATED, *[CapacitySource.ESTIMATED] * (len(found.configs) - 1))
    assert found.inputs_hash != first.inputs_hash
    careful = tables(pessimistic=True)[0]
    assert np.all(careful.throughput <= first.throughput)
    assert careful.throughput.sum() < first.throughput.sum()


def test_what_a_step_takes_besides_is_assumed_where_a_profile_does_not_know_it() -> None:
    known, unknown = both(), replace(both(), points=tuple(replace(point, fixed_s=None) for point in both().points))
    assert measured_fixed_s(known, Phase.PREFILL, 1, assumed_s=0.005) == 0.002
    assert measured_fixed_s(unknown, Phase.PREFILL, 1, assumed_s=0.005) == 0.005
    assumed = replace(FREE, step_overhead_s=0.05)
    free, slowed = (
        table(Phase.DECODE, assumed, profiles={"node": one}).throughput[0, 0, -1] for one in (known, unknown)
    )
    assert 0 < slowed < free
    store = open_store("memory://profiles-unknown")
    assert read_profile(store, write_profile(store, unknown, time=TIME)) == unknown
