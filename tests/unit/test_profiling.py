"""What to measure, what two depths say, what is refused, and what a run may take."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coral_core.catalog import find_config, load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.perf.profile import ProfileKey
from coral_core.perf.profiling import (
    EngineStart,
    ProfileBudget,
    Shot,
    ShotTimes,
    Sweep,
    checked_depths,
    default_depths,
    fitted_points,
    noise,
    tp_sizes,
    whole_kv_tokens,
    whole_start_s,
)


def shot(layers=2, phase=Phase.DECODE, requests=4, tokens=64, tp=1) -> Shot:
    return Shot(tp=tp, layers=layers, phase=phase, requests=requests, tokens=tokens)


def times(of: Shot, *samples_s: float) -> ShotTimes:
    return ShotTimes(shot=of, samples_s=samples_s)


def measured(*pairs: tuple[Shot, float]) -> dict[Shot, ShotTimes]:
    return {of: times(of, seconds, seconds, seconds) for of, seconds in pairs}


def test_slope_and_intercept_in_closed_form():
    """t(l) = 0.003 + 0.0005 l at l = 2 and 6."""
    points, refused = fitted_points(measured((shot(2), 0.004), (shot(6), 0.006)), (2, 6), max_cv_frac=0.1)
    (point,) = points
    assert (point.layer_s, point.fixed_s) == (pytest.approx(0.0005), pytest.approx(0.003))
    assert (point.samples, point.cv_frac, refused) == (3, pytest.approx(0.0, abs=1e-12), {})


def test_a_fixed_part_is_never_below_nothing():
    (point,), _ = fitted_points(measured((shot(2), 0.001), (shot(4), 0.004)), (2, 4), max_cv_frac=0.1)
    assert (point.layer_s, point.fixed_s) == (pytest.approx(0.0015), 0.0)


@pytest.mark.parametrize("deep_s", [0.004, 0.0039])
def test_a_layer_that_takes_no_time_is_refused(deep_s):
    points, refused = fitted_points(measured((shot(2), 0.004), (shot(4), deep_s)), (2, 4), max_cv_frac=0.1)
    assert not points
    assert "a layer would take" in refused[shot(4)]


def test_a_slope_that_drowns_in_the_noise_of_two_clean_shots_is_refused():
    """5% each, but the difference is 4% of the whole."""
    low, high = times(shot(2), 0.95, 1.0, 1.05), times(shot(4), 0.99, 1.04, 1.09)
    assert noise(low, 0.1) == noise(high, 0.1) == ""
    points, refused = fitted_points({low.shot: low, high.shot: high}, (2, 4), max_cv_frac=0.1)
    assert not points
    error_s = math.sqrt(math.pi / 2) * 0.05 / math.sqrt(3) * math.sqrt(2) / 2
    assert f"standard error of {error_s:.3g}" in refused[shot(4)]


def test_a_shot_of_one_depth_alone_makes_no_point():
    points, refused = fitted_points(measured((shot(4), 0.1), (shot(2, requests=8), 0.1)), (2, 4), max_cv_frac=0.1)
    assert (points, refused) == ((), {shot(4): "not measured at 2 layers"})


def test_noise_is_told_by_the_coefficient_of_variation():
    samples = (1.0, 1.1, 0.9)
    assert times(shot(), *samples).cv_frac == pytest.approx(np.std(samples, ddof=1) / np.mean(samples))
    assert noise(times(shot(), *samples), 0.11) == ""
    assert noise(times(shot(), *samples), 0.09) == "coefficient of variation 0.100, allowed 0.09"
    for broken in ((1.0,), (1.0, math.nan), (1.0, 0.0), ()):
        assert "no times" in noise(times(shot(), *broken), 0.1)


def test_the_key_changes_with_engine_version_and_every_flag():
    facts = {"model": "m", "variant": "bf16", "config": "c", "engine": "vllm", "version": "0.32.0"}
    names = {
        ProfileKey(**facts).engine_name,
        ProfileKey(**{**facts, "version": "0.33.0"}).engine_name,
        ProfileKey(**facts, flags=("--enforce-eager",)).engine_name,
        ProfileKey(**facts, flags=("--block-size", "16")).engine_name,
        ProfileKey(**facts, flags=("--block-size", "32")).engine_name,
    }
    assert len(names) == 5


def test_the_sweep_leaves_out_what_no_step_can_hold():
    sweep = Sweep(batches=(1, 8, 64), prompts=(128, 1024), contexts=(256,), max_batched_tokens=1024, max_requests=8)
    found = [(s.phase.value, s.requests, s.tokens) for s in sweep.shots(2, 4)]
    assert sorted(found) == [
        ("decode", 1, 256), ("decode", 8, 256), ("prefill", 1, 128), ("prefill", 1, 1024), ("prefill", 8, 128),
    ]  # fmt: skip
    assert found[0] == ("prefill", 1, 128)  # the smallest first


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": ()}, {"prompts": (0,)}, {"contexts": (64, 64)}, {"samples": 2}, {"attempts": 0},
        {"max_cv_frac": 0.0}, {"max_cv_frac": math.nan}, {"max_requests": 0},
    ],
)  # fmt: skip
def test_a_sweep_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError, match="sweep"):
        Sweep(**wrong)


def test_every_tp_that_divides_gpus_and_heads():
    models, catalog = package_models(), load_catalog("aws-real")
    assert tp_sizes(models["qwen3-32b"], find_config(catalog, "g6.12xlarge")) == (1, 2, 4)
    assert tp_sizes(models["tiny-split"], find_config(catalog, "g6.12xlarge")) == (1, 2)  # six heads
    assert tp_sizes(models["qwen3-32b"], find_config(catalog, "g6.xlarge")) == (1,)


def test_depths():
    models = package_models()
    assert default_depths(models["qwen3-32b"]) == (2, 4)
    for shape in models.values():
        dense = 0 if shape.moe is None else shape.moe.dense_layers
        period = {"gemma-3-27b": 6}.get(shape.name, 2)  # five layers of a window, then one of the whole context
        assert default_depths(shape) == (dense + period, dense + 2 * period)
    for wrong in ((4, 2), (2, 2), (0, 2), (2,), (2, 9)):
        with pytest.raises(InputError, match="two rising numbers of layers up to 8"):
            checked_depths(wrong, models["tiny-chat"])


def test_kv_room_and_start_of_the_whole_model():
    """Room 1,000 token-layers less 50 per layer of weights; 8 layers: 600 / 8 tokens."""
    starts = [
        EngineStart(tp=1, layers=2, kv_tokens=450, start_s=12.0),
        EngineStart(tp=1, layers=4, kv_tokens=200, start_s=14.0),
        EngineStart(tp=2, layers=2, kv_tokens=450, start_s=9.0),
    ]
    assert whole_kv_tokens(starts, 8) == {1: 75.0}
    assert whole_start_s(starts, 8) == {1: 18.0}
    assert whole_kv_tokens(starts, 20) == {}  # no room left: unknown, not 0
    faster = [EngineStart(tp=1, layers=4, kv_tokens=1, start_s=10.0), starts[0]]
    assert whole_start_s(faster, 8) == {1: 12.0}


def test_a_node_may_be_held_as_long_as_time_and_money_last():
    budget = ProfileBudget(max_s=3600.0, max_usd=2.0, release_s=60.0)
    assert budget.allowed_s(1.0, 0.0) == 3540.0  # two hours' money, one hour's time
    assert budget.allowed_s(4.0, 0.0) == 1740.0  # half an hour's money
    assert budget.allowed_s(0.0, 100.0) == 3440.0  # free: time alone
    budget.pay(4.0, 900.0)
    assert budget.spent_usd == 1.0
    assert budget.allowed_s(4.0, 900.0) == 840.0
    assert budget.allowed_s(4.0, 3590.0) < 0
    budget.pay(4.0, 900.0)
    assert budget.allowed_s(4.0, 1800.0) == -60.0


def test_a_budget_that_is_never_enough_is_told_from_one_that_is_used_up():
    budget = ProfileBudget(max_s=3600.0, max_usd=2.0, release_s=60.0, spent_usd=2.0)
    budget.require(4.0)
    for max_s, max_usd in ((60.0, 2.0), (3600.0, 0.05)):
        with pytest.raises(InputError, match=r"do not last for a node of 4 USD/h and the 60 s .*give more"):
            ProfileBudget(max_s=max_s, max_usd=max_usd, release_s=60.0).require(4.0)
    ProfileBudget(max_s=3600.0, max_usd=0.05, release_s=60.0).require(0.0)


def test_no_run_costs_more_than_its_bound():
    budget = ProfileBudget(max_s=1800.0, max_usd=2.0)
    assert budget.bound_usd([1.0, 3.0]) == 1.5  # one node at a time
    assert budget.bound_usd([98.0]) == 2.0
    assert budget.bound_usd([]) == 0.0
    for wrong in ({"max_s": 0.0}, {"max_usd": math.inf}, {"max_usd": math.nan}):
        with pytest.raises(InputError, match="must be a number above 0"):
            ProfileBudget(**{"max_s": 1.0, "max_usd": 1.0, **wrong})
