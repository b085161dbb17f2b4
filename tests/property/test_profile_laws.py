"""Laws of interpolated times: exact at measured points, never falling, said to be what they are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Phase
from coral_core.perf.profile import ProfileCurves, ProfilePoint

EXAMPLES = settings(max_examples=150, deadline=None)


@st.composite
def measured(draw: st.DrawFn) -> list[ProfilePoint]:
    """Times that rise with requests and length, on grids that need not be whole."""
    lengths = sorted(draw(st.sets(st.integers(1, 5000), min_size=1, max_size=4)))
    counts = sorted(draw(st.sets(st.integers(1, 500), min_size=1, max_size=6)))
    base, by_request, by_token = (draw(st.floats(1e-5, 1e-2)) for _ in range(3))
    points = []
    for length in lengths:
        kept = draw(st.integers(1, len(counts)))  # longer ones may lack the largest steps, for want of memory
        points += [
            ProfilePoint(
                phase=Phase.DECODE,
                tp=1,
                requests=float(count),
                tokens=float(length),
                layer_s=base + by_request * count**0.7 + by_token * count * length * 1e-3,
            )
            for count in counts[:kept]
        ]
    return points


@EXAMPLES
@given(measured())
def test_measured_points_are_given_back(points: list[ProfilePoint]) -> None:
    curves = ProfileCurves.of(points)
    for point in points:
        found = curves.layer_times(np.array([point.requests]), point.tokens)
        assert found.sources == (CapacitySource.MEASURED,)
        np.testing.assert_allclose(found.seconds[0], point.layer_s, rtol=1e-9)


@EXAMPLES
@given(measured(), st.floats(1, 8000), st.lists(st.floats(1, 800), min_size=2, max_size=12))
def test_more_requests_never_take_less(points: list[ProfilePoint], tokens: float, counts: list[float]) -> None:
    times = ProfileCurves.of(points).layer_times(np.array(sorted(counts)), tokens).seconds
    assert np.all(np.diff(times) >= -1e-12 * times[:-1])
    assert np.all(times > 0)


@EXAMPLES
@given(measured(), st.floats(1, 800), st.lists(st.floats(1, 8000), min_size=2, max_size=12))
def test_more_tokens_never_take_less(points: list[ProfilePoint], count: float, lengths: list[float]) -> None:
    curves = ProfileCurves.of(points)
    times = np.array([curves.layer_times(np.array([count]), tokens).seconds[0] for tokens in sorted(lengths)])
    assert np.all(np.diff(times) >= -1e-9 * times[:-1])


@EXAMPLES
@given(measured(), st.floats(1, 800), st.floats(1, 8000))
def test_what_lies_beyond_is_said_to(points: list[ProfilePoint], count: float, tokens: float) -> None:
    [source] = ProfileCurves.of(points).layer_times(np.array([count]), tokens).sources
    lengths = {point.tokens for point in points}
    if not min(lengths) <= tokens <= max(lengths) or count > max(point.requests for point in points):
        assert source is CapacitySource.EXTRAPOLATED
    if source is CapacitySource.MEASURED:
        assert (count, tokens) in {(point.requests, point.tokens) for point in points}
