"""Named lengths, demand by phase, and the refusals of scaling and synthesis."""

from __future__ import annotations

import numpy as np
import pytest

from coral_core.domain.workload import Phase, Slo, Trace
from coral_core.errors import InputError
from coral_core.workload import (
    TokenMoments,
    TokenQuantiles,
    demand_from_trace,
    length_statistics,
    named_lengths,
    named_workload,
    read_trace,
    scale_rate,
    synthesize,
    tokens_per_s_by_phase,
    workload_names,
)

SLO = Slo(ttft_s=1.2, tpot_s=0.06)


def trace(arrival_s=(0.0, 1.0, 2.0, 4.0)) -> Trace:
    n = len(arrival_s)
    return Trace(
        name="t",
        arrival_s=np.array(arrival_s, dtype=np.float64),
        input_tokens=np.arange(1, n + 1) * 100,
        output_tokens=np.arange(1, n + 1) * 10,
        source="made",
    )


def test_statistics_of_a_trace_counted_by_hand():
    found = length_statistics(trace())
    assert (found.n, found.duration_s, found.requests_per_s) == (4, 4.0, 0.75)
    # Gaps 1, 1, 2: mean 4/3, variance 2/9.
    assert found.burstiness == pytest.approx((2 / 9) ** 0.5 / (4 / 3))
    assert (found.mean_input_tokens, found.p50_input_tokens, found.p90_output_tokens) == (250, 250, pytest.approx(37))


def test_demand_at_the_traces_own_rate_and_at_a_stated_one():
    own = demand_from_trace(trace(), model="phi-4", slo=SLO)
    assert (own.requests_per_s, own.lengths.mean_input_tokens, own.lengths.source) == (0.75, 250, "made")
    scaled = demand_from_trace(trace(), model="phi-4", slo=SLO, requests_per_s=10, weight=2)
    assert tokens_per_s_by_phase(scaled) == {Phase.PREFILL: 2500, Phase.DECODE: 250}
    assert scaled.weight == 2
    assert tokens_per_s_by_phase(demand_from_trace(trace(), model="m", slo=SLO, requests_per_s=0))[Phase.DECODE] == 0


def test_one_request_has_lengths_but_no_rate():
    alone = trace((0.0,))
    assert demand_from_trace(alone, model="m", slo=SLO, requests_per_s=3).requests_per_s == 3
    for make in (length_statistics, lambda one: demand_from_trace(one, model="m", slo=SLO)):
        with pytest.raises(InputError, match="t: 1 requests without time between them have no rate"):
            make(alone)
    with pytest.raises(InputError, match="3 requests without time"):
        scale_rate(trace((5.0, 5.0, 5.0)), 1)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(InputError, match="requests_per_s is"):
        demand_from_trace(trace(), model="m", slo=SLO, requests_per_s=rate)
    with pytest.raises(InputError, match="requests_per_s is"):
        scale_rate(trace(), rate)
    with pytest.raises(InputError, match="m: t: weight is"):
        demand_from_trace(trace(), model="m", slo=SLO, weight=rate)


def test_scaling_to_nothing_is_refused():
    with pytest.raises(InputError, match="t: requests_per_s is 0, must be from 1e-09 to 1e\\+09 requests/s"):
        scale_rate(trace(), 0)


@pytest.mark.parametrize("rate", [1e308, 1e-308, 1.1e9, 0.9e-9, 5e-324])
def test_rates_beyond_any_service_are_refused_and_their_limits_are_not(rate):
    with pytest.raises(InputError, match="t: requests_per_s is"):
        scale_rate(trace(), rate)
    # A trace whose own rate is no rate: times within nothing, or over ages.
    with pytest.raises(InputError, match="t: requests_per_s is"):
        length_statistics(trace((0.0, 1 / rate, 2 / rate) if rate > 5e-324 else (0.0, 5e-324)))


@pytest.mark.parametrize("rate", [1e-9, 1e9])
def test_the_limits_of_rates_can_be_reached(rate):
    found = length_statistics(scale_rate(trace(), rate))
    assert found.requests_per_s == pytest.approx(rate)
    assert found.burstiness == pytest.approx(length_statistics(trace()).burstiness)


def test_named_lengths_are_the_published_ones_and_assumptions_say_so():
    conversation, code = named_lengths("azure-conv"), named_lengths("azure-code")
    assert conversation.mean_input_tokens == pytest.approx(1155, rel=1e-3)
    assert conversation.mean_output_tokens == pytest.approx(211, rel=1e-2)
    assert (code.mean_input_tokens, code.mean_output_tokens) == (
        pytest.approx(2048, rel=1e-3),
        pytest.approx(28, rel=1e-2),
    )
    assert named_lengths("burstgpt").source.startswith("assumption")
    assert named_workload("burstgpt").requests_per_s is None
    assert set(workload_names()) >= {"azure-conv", "azure-code", "burstgpt"}


def test_an_unknown_name_gets_near_misses():
    with pytest.raises(InputError, match=r"unknown workload 'azure_conv' \(did you mean azure-conv"):
        named_lengths("azure_conv")


@pytest.mark.parametrize(
    ("name", "file"),
    [("azure-conv", "azure2023_conv"), ("azure-code", "azure2023_code"), ("mooncake-synthetic", "mooncake_synthetic")],
)
def test_named_statistics_are_those_of_the_trace(reference_data, name, file):
    read, stated = read_trace(reference_data / "traces" / f"{file}.csv"), named_workload(name)
    found = length_statistics(read)
    assert stated.requests_per_s == pytest.approx(found.requests_per_s, rel=5e-3)
    assert stated.burstiness == pytest.approx(found.burstiness, rel=1e-2)
    for moments, tokens in ((stated.input_tokens, read.input_tokens), (stated.output_tokens, read.output_tokens)):
        assert moments.mean_tokens == pytest.approx(tokens.mean(), rel=1e-3)
        assert moments.cv == pytest.approx(tokens.std() / tokens.mean(), rel=1e-2)
    for drawn, tokens in (
        (stated.drawn_input_tokens, read.input_tokens),
        (stated.drawn_output_tokens, read.output_tokens),
    ):
        if isinstance(drawn, TokenQuantiles):
            fracs, points = zip(*drawn.points, strict=True)
            assert points == pytest.approx(np.quantile(tokens, fracs), abs=0.5)


def test_requests_are_drawn_from_quantiles_whose_mean_is_the_stated_one():
    """The log-normal of the same moments has prompts several times as long as any in the trace."""
    for name, longest in (("azure-conv", 14_050), ("azure-code", 7_437)):
        stated = named_workload(name)
        drawn = stated.drawn_input_tokens.draw(200_000, np.random.default_rng(0))
        assert drawn.max() <= longest
        assert drawn.mean() == pytest.approx(stated.input_tokens.mean_tokens, rel=0.01)
        answers = stated.drawn_output_tokens.draw(200_000, np.random.default_rng(0))
        assert answers.mean() == pytest.approx(stated.output_tokens.mean_tokens, rel=0.02)
    assert isinstance(named_workload("burstgpt").drawn_input_tokens, TokenMoments)


NAN = float("nan")
MOMENTS = TokenMoments(mean_tokens=10, cv=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "s: requests is 0"),
        ({"requests_per_s": NAN}, "s: requests_per_s is nan"),
        ({"requests_per_s": 0.0}, "s: requests_per_s is 0"),
        ({"burstiness": -1.0}, "s: burstiness is -1"),
        ({"burstiness": 1e9}, "s: burstiness is 1000000000.0, must be from 0 to 1000"),
        ({"burstiness": NAN}, "s: burstiness is nan"),
        ({"input_tokens": TokenMoments(mean_tokens=0.5, cv=1)}, "s.input_tokens: mean_tokens is 0.5"),
        ({"input_tokens": TokenMoments(mean_tokens=NAN, cv=1)}, "s.input_tokens: mean_tokens is nan"),
        ({"output_tokens": TokenMoments(mean_tokens=5, cv=NAN)}, "s.output_tokens: cv is nan"),
        ({"output_tokens": TokenMoments(mean_tokens=1, cv=1)}, "a mean of 1 token allows no cv"),
        ({"input_tokens": TokenQuantiles(points=((0, 1),))}, "must run from fraction 0 to fraction 1"),
        ({"input_tokens": TokenQuantiles(points=((0, 1), (0.9, 5)))}, "must run from fraction 0 to fraction 1"),
        ({"input_tokens": TokenQuantiles(points=((0, 0), (1, 5)))}, r"quantile 0 is \(0, 0\)"),
        ({"input_tokens": TokenQuantiles(points=((0, 1), (0.5, NAN), (1, 5)))}, "quantile 1 is"),
        ({"input_tokens": TokenQuantiles(points=((0, 4), (0.5, 3), (1, 5)))}, r"quantile 1 \(0.5, 3\) does not rise"),
    ],
)
def test_synthesis_names_the_statistic_that_is_impossible(changes, message):
    good = {"requests": 5, "requests_per_s": 1.0, "input_tokens": MOMENTS, "output_tokens": MOMENTS}
    with pytest.raises(InputError, match=message):
        synthesize(name="s", rng=np.random.default_rng(0), **(good | changes))
