"""Reads an engine's `/metrics` into one typed sample. A series that is not there is unknown, never zero.

Names as vLLM 0.32 writes them. Where a server has several engines (data parallel), counts are summed and the fullest KV cache counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_LINE = re.compile(r'^([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$')
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of values up to each bound (rising, the last infinite), their number and their sum; since the engine's start."""

    bounds: tuple[float, ...]
    up_to: tuple[float, ...]
    count: float
    sum: float

    @property
    def mean(self) -> float | None:
        """The mean; None where there was no value yet."""
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """What an engine said of itself, measured; None is unknown. Totals count from the engine's start."""

    running_requests: float | None = None
    waiting_requests: float | None = None
    kv_usage_frac: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    steps_total: float | None = None
    preemptions_total: float | None = None
    ttft_s: Histogram | None = None
    tpot_s: Histogram | None = None
    queue_s: Histogram | None = None


def engine_sample(text: str) -> EngineSample:
    """The sample in the text of `/metrics`; what cannot be read is left out."""
    series: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in _series(text):
        series.setdefault(name, []).append((labels, value))

    def one(name: str, over: Callable[[Iterable[float]], float] = sum) -> float | None:
        values = series.get(f"vllm:{name}")
        return over(value for _, value in values) if values else None

    return EngineSample(
        running_requests=one("num_requests_running"),
        waiting_requests=one("num_requests_waiting"),
        kv_usage_frac=one("kv_cache_usage_perc", max),
        prompt_tokens_total=one("prompt_tokens_total"),
        generation_tokens_total=one("generation_tokens_total"),
        steps_total=one("iteration_tokens_total_count"),
        preemptions_total=one("num_preemptions_total"),
        ttft_s=_histogram(series, "vllm:time_to_first_token_seconds"),
        tpot_s=_histogram(series, "vllm:request_time_per_output_token_seconds"),
        queue_s=_histogram(series, "vllm:request_queue_time_seconds"),
    )


def _series(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0.0:
            yield match[1], match[2] or "", value


def _histogram(series: dict[str, list[tuple[str, float]]], name: str) -> Histogram | None:
    counts, sums = series.get(f"{name}_count"), series.get(f"{name}_sum")
    up_to: dict[float, float] = {}
    for labels, value in series.get(f"{name}_bucket", []):
        bound = _BOUND.search(labels)
        if bound is None:
            return None
        try:
            edge = float(bound[1])
        except ValueError:
            return None
        up_to[edge] = up_to.get(edge, 0.0) + value
    if not counts or not sums or math.inf not in up_to:
        return None
    bounds = tuple(sorted(up_to))
    return Histogram(
        bounds=bounds,
        up_to=tuple(up_to[bound] for bound in bounds),
        count=sum(value for _, value in counts),
        sum=sum(value for _, value in sums),
    )
