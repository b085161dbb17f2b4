"""A node's timing from a profile: closed forms are found again, and the least squares are those of brute force."""

from __future__ import annotations

import itertools
from datetime import date

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError
from coral_core.perf.profile import Profile, ProfilePoint
from coral_core.sim.profiled import nonnegative_least_squares, profiled_timing
from tests.fakes.profile_cases import KEY


def profile(layer_s, *, phases=(Phase.PREFILL, Phase.DECODE), fixed_s=0.003) -> Profile:
    points = tuple(
        ProfilePoint(
            phase=phase, tp=1, requests=float(r), tokens=float(n), layer_s=layer_s(phase, r, n), fixed_s=fixed_s
        )
        for phase in phases
        for r in (1, 2, 4, 16)
        for n in (32, 128, 512)
        if phase is Phase.DECODE or r * n <= 2048
    )
    return Profile(key=KEY, points=points, source="a test", as_of=date(2026, 11, 29))


def straight(phase, r, n):
    """1 ms, 10 us per token, 20 us per row, 0.1 us per KV token read, 5 ns per pair."""
    if phase is Phase.PREFILL:
        return 1e-3 + 1e-5 * r * n + 2e-5 * r + 5e-9 * r * n * (n + 1) / 2
    return 1e-3 + 1e-5 * r + 2e-5 * r + 1e-7 * r * n


def test_a_straight_line_is_found_again():
    found = profiled_timing(profile(straight), 1)
    assert max(map(abs, found.error_frac)) < 1e-6
    node = found.node(8)
    assert node.kept_token_s == pytest.approx(8e-7, rel=1e-3)
    assert found.fixed.iteration_s(tokens=300) == pytest.approx(0.003)
    assert found.node(8, first=False).iteration_s(tokens=4) == pytest.approx(
        node.iteration_s(tokens=4) - 0.003, rel=1e-6
    )
    decode = node.iteration_s(tokens=4, rows=4, kept_tokens=4 * 300)
    assert decode == pytest.approx(0.003 + 8 * straight(Phase.DECODE, 4, 300), rel=1e-6)
    prompt = node.iteration_s(tokens=300, rows=1, pairs=300 * 301 / 2)
    assert prompt == pytest.approx(0.003 + 8 * straight(Phase.PREFILL, 1, 300), rel=0.02)


def test_no_part_of_a_timing_is_below_nothing_and_none_falls():
    random = np.random.default_rng(0)
    found = profiled_timing(profile(lambda phase, r, n: straight(phase, r, n) * random.uniform(0.7, 1.3)), 1)
    layer = found.layer
    assert min(layer.kept_token_s, layer.pair_s, *layer.token_s, *layer.row_s) >= 0
    assert all(after >= before for before, after in itertools.pairwise(layer.token_s))


def test_both_phases_are_needed():
    with pytest.raises(DataGapError, match="no decode times"):
        profiled_timing(profile(straight, phases=(Phase.PREFILL,)), 1)


def test_what_a_step_takes_besides_is_assumed_or_asked_for_where_the_profile_does_not_know_it():
    unknown = profile(straight, fixed_s=None)
    assert profiled_timing(unknown, 1, assumed_fixed_s=0.003) == profiled_timing(profile(straight), 1)
    with pytest.raises(DataGapError, match=r"besides its layers is not known.*fixed_ms"):
        profiled_timing(unknown, 1)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 5))
@example(seed=173, columns=5)  # a variable that was free becomes 0 again
@example(seed=411, columns=5)
def test_least_squares_are_the_best_of_all_sets_of_free_variables(seed, columns):
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(7, columns)), random.normal(size=7)
    best = np.linalg.norm(target)
    for size in range(1, columns + 1):
        for free in itertools.combinations(range(columns), size):
            x = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, np.linalg.norm(matrix[:, free] @ x - target))
    found = nonnegative_least_squares(matrix, target)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(best, rel=1e-9)
