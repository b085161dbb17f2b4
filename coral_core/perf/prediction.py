"""A serving prediction with its error bars, and what it rests on beyond what was compared with measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coral_core.domain import model_math
from coral_core.perf.errors import ErrorBar, load_errors
from coral_core.perf.factors import expert_kind, load_factors
from coral_core.perf.serving import Latencies, ServingPoint, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What the comparisons on a GPU cover: TP sizes with several runs, and the ends of lengths and numbers of clients."""

    tps: tuple[int, ...] = (1, 2, 4, 8)
    input_tokens: tuple[int, int] = (1024, 8192)
    output_tokens: tuple[int, int] = (128, 8192)
    concurrency: tuple[int, int] = (4, 128)


FITTED: Final = Compared()
"""The runs that the engine's costs were fitted to: what there is for a GPU without runs of its own."""

COMPARED: Final = {
    "A10G": Compared(tps=(1, 4), input_tokens=(304, 3478), output_tokens=(6, 102), concurrency=(1, 8)),
    "B200": Compared(output_tokens=(1024, 8192)),
    "H100": Compared(tps=(2, 4, 8), concurrency=(4, 144)),
    "H200": Compared(input_tokens=(1000, 8192), output_tokens=(100, 8192)),
}

_AGGREGATED: Final = "aggregated"
_WHOLE: Final = "latency_s"
_MEASURED: Final = {"ttft_s": "first tokens", "tpot_s": "further tokens", _WHOLE: "whole latencies"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Error quantiles behind one figure, and whose they are."""

    error: ErrorBar
    basis: str

    def bounds(self, value: float) -> tuple[float, float | None]:
        """Between which a measurement lay in nine of ten comparisons; None where errors were too large for an upper one."""
        p90 = self.error.p90_frac
        return value / (1 + p90), value / (1 - p90) if p90 < 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Latencies with error bars; `extrapolated` says in what the point lies beyond the comparisons on its GPU.

    `tpot` is None where requests have one output token: there are no further ones that could take time.
    """

    point: ServingPoint
    latencies: Latencies
    ttft: Bar
    tpot: Bar | None
    extrapolated: tuple[str, ...]

    @property
    def queue_bound(self) -> bool:
        """Whether clients wait for others to leave: TTFT is then a queue's."""
        return self.latencies.running < self.point.concurrency


def prediction(point: ServingPoint) -> Prediction:
    """With the shipped factors. Raises what `serving.predict` raises."""
    return Prediction(
        point=point,
        latencies=predict(point),
        ttft=_bar(point.gpu.name, "ttft_s"),
        tpot=_bar(point.gpu.name, "tpot_s") if point.output_tokens > 1 else None,
        extrapolated=tuple(_beyond(point)),
    )


def _bar(gpu: str, metric: str) -> Bar:
    known = load_errors()
    for of in (metric, _WHOLE):
        if (gpu, _AGGREGATED, of) in known:
            found = known[gpu, _AGGREGATED, of]
            return Bar(error=found, basis=f"{found.n} runs on {gpu} ({_MEASURED[of]}), models left out of the fit")
    worst = max((bar for bar in known.values() if bar.metric == metric), key=lambda bar: bar.p90_frac)
    return Bar(error=worst, basis=f"no runs on {gpu}: the worst of other GPUs, {worst.n} runs on {worst.gpu}")


def _beyond(point: ServingPoint) -> list[str]:
    found: list[str] = []
    gpu, factors = point.gpu.name, load_factors()
    compared = [metric for metric in _MEASURED if (gpu, _AGGREGATED, metric) in load_errors()]
    if not compared:
        found.append(f"no serving runs on {gpu}")
    elif compared == [_WHOLE]:
        found.append(
            f"only whole latencies were compared on {gpu}: their errors stand for those of first and further tokens"
        )
    chosen = model_math.variant_of(point.shape, point.variant)
    if point.shape.moe is not None and (gpu, expert_kind(chosen)) not in factors.experts:
        found.append(f"no kernels of {expert_kind(chosen)} experts on {gpu}")
    known = COMPARED.get(gpu, FITTED)
    if gpu in COMPARED and point.tp not in known.tps:
        found.append(f"TP {point.tp}, compared on {gpu} at {', '.join(map(str, known.tps))}")
    for what, value, (least, most) in (
        ("input tokens", point.input_tokens, known.input_tokens),
        ("output tokens", point.output_tokens, known.output_tokens),
        ("concurrency", point.concurrency, known.concurrency),
    ):
        if not least <= value <= most:
            found.append(f"{value:g} {what}, compared at {least} to {most}")
    if point.input_tokens + point.output_tokens > point.shape.max_context_tokens:
        found.append(f"longer than the {point.shape.max_context_tokens} tokens that {point.shape.name} takes")
    return found
