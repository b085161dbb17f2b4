"""An engine's metrics, against figures read off a recording and the reference parser of the format."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coral_core.engine.scrape import EngineSample, Histogram, engine_sample

RECORDED = Path(__file__).resolve().parents[1] / "fakes" / "engine_logs" / "metrics.txt"


def test_a_recorded_page_gives_its_figures():
    sample = engine_sample(RECORDED.read_text(encoding="utf-8"))
    assert (sample.running_requests, sample.waiting_requests) == (1.0, 0.0)
    assert sample.kv_usage_frac == pytest.approx(0.0472440945)
    assert (sample.prompt_tokens_total, sample.generation_tokens_total, sample.steps_total) == (10.0, 687.0, 687.0)
    assert sample.preemptions_total == 0.0
    assert sample.ttft_s is not None
    assert sample.tpot_s is not None
    assert sample.queue_s is not None
    assert sample.ttft_s.count == 2.0
    assert sample.ttft_s.mean == pytest.approx(0.0262229443 / 2.0)
    assert sample.tpot_s.mean == pytest.approx(0.0038136137)
    assert sample.queue_s.count == 1.0


def test_histograms_are_those_of_the_reference_parser():
    text = RECORDED.read_text(encoding="utf-8")
    sample = engine_sample(text)
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", sample.ttft_s),
        ("vllm:request_time_per_output_token_seconds", sample.tpot_s),
        ("vllm:request_queue_time_seconds", sample.queue_s),
    ):
        # Without the comments each line is a family of its own.
        series = [one for family in text_string_to_metric_families(text) for one in family.samples]
        buckets = {float(s.labels["le"]): s.value for s in series if s.name == f"{name}_bucket"}
        assert histogram is not None
        assert dict(zip(histogram.bounds, histogram.up_to, strict=True)) == buckets
        assert histogram.bounds == tuple(sorted(buckets))
        assert histogram.bounds[-1] == math.inf
        assert histogram.up_to[-1] == histogram.count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>not found</html>",
        "\x00\xff",
        "vllm:num_requests_running",
        'vllm:num_requests_running{a="b"} much',
        "vllm:num_requests_running NaN",
        "vllm:num_requests_running -1",
        "vllm:num_requests_running +Inf",
        'vllm:num_requests_running{a="b 5',
        "vllm:time_to_first_token_seconds_count 3\nvllm:time_to_first_token_seconds_sum 1",
        'vllm:time_to_first_token_seconds_bucket{le="wide"} 3',
        'vllm:time_to_first_token_seconds_bucket{of="x"} 3',
    ],
)
def test_what_is_missing_or_broken_is_unknown_and_not_zero(text):
    assert engine_sample(text) == EngineSample()


def test_engines_of_one_server_are_added_up_and_the_fullest_cache_counts():
    sample = engine_sample(
        'vllm:num_requests_running{engine="0",model_name="a\\"} 9"} 2\n'
        'vllm:num_requests_running{engine="1",model_name="a\\"} 9"} 3 1700000000\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        'vllm:request_queue_time_seconds_bucket{engine="0",le="1.0"} 1\n'
        'vllm:request_queue_time_seconds_bucket{le="1.0",engine="1"} 2\n'
        'vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf"} 1\n'
        'vllm:request_queue_time_seconds_bucket{le="+Inf",engine="1"} 4\n'
        'vllm:request_queue_time_seconds_count{engine="0"} 1\nvllm:request_queue_time_seconds_count{engine="1"} 4\n'
        'vllm:request_queue_time_seconds_sum{engine="0"} 0.5\nvllm:request_queue_time_seconds_sum{engine="1"} 9.5\n'
    )
    assert sample.running_requests == 5.0
    assert sample.kv_usage_frac == 0.75
    assert sample.queue_s == Histogram(bounds=(1.0, math.inf), up_to=(3.0, 5.0), count=5.0, sum=10.0)
    assert sample.queue_s.mean == 2.0


def test_no_value_has_no_mean():
    assert Histogram(bounds=(math.inf,), up_to=(0.0,), count=0.0, sum=0.0).mean is None
