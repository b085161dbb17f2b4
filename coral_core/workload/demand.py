"""From lengths and rates to what is asked of a model, in requests/s and in tokens/s by phase."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files

from coral_core.domain.workload import Demand, Lengths, Phase, Slo, Trace
from coral_core.errors import InputError, unknown_name
from coral_core.workload.summary import length_statistics
from coral_core.workload.synthesis import TokenMoments, TokenQuantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWorkload:
    """Statistics of a published trace, or a stated assumption (then `source` says so).

    `requests_per_s` and `burstiness` are None where they are not known. `drawn_input_tokens` and `drawn_output_tokens`
    are what requests are drawn from: the trace's quantiles where they are at hand, since a log-normal of the same moments
    has far longer prompts than any in it; else the moments.
    """

    name: str
    input_tokens: TokenMoments
    output_tokens: TokenMoments
    drawn_input_tokens: TokenMoments | TokenQuantiles
    drawn_output_tokens: TokenMoments | TokenQuantiles
    requests_per_s: float | None
    burstiness: float | None
    source: str
    as_of: date


def workload_names() -> tuple[str, ...]:
    """The names that `named_workload` and `named_lengths` know."""
    return tuple(_workloads())


def named_workload(name: str) -> NamedWorkload:
    """The statistics called `name`, as `synthesize` takes them; InputError with near misses for an unknown name."""
    if name not in _workloads():
        raise unknown_name("workload", name, _workloads())
    return _workloads()[name]


def named_lengths(name: str) -> Lengths:
    """The mean lengths called `name`; InputError with near misses for an unknown name."""
    workload = named_workload(name)
    return Lengths(
        mean_input_tokens=workload.input_tokens.mean_tokens,
        mean_output_tokens=workload.output_tokens.mean_tokens,
        source=workload.source,
    )


def trace_lengths(trace: Trace) -> Lengths:
    """Mean lengths of a trace's requests."""
    return Lengths(
        mean_input_tokens=float(trace.input_tokens.mean()),
        mean_output_tokens=float(trace.output_tokens.mean()),
        source=trace.source,
    )


def demand_from_trace(
    trace: Trace, *, model: str, slo: Slo, requests_per_s: float | None = None, weight: float = 1.0
) -> Demand:
    """What `trace` asks of `model`: at its own mean rate, or at `requests_per_s` with its lengths.

    InputError for a rate or weight that is not finite and at least 0, and for a trace without a rate of its own
    where none is given.
    """
    rate = length_statistics(trace).requests_per_s if requests_per_s is None else requests_per_s
    for key, value in {"requests_per_s": rate, "weight": weight}.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{key} is {value}, must be a number of at least 0", where=f"{model}: {trace.name}")
    return Demand(model=model, requests_per_s=rate, lengths=trace_lengths(trace), slo=slo, weight=weight)


def tokens_per_s_by_phase(demand: Demand) -> dict[Phase, float]:
    """Tokens/s of the phases that are measured in tokens/s: prefill and decode."""
    return {phase: demand.tokens_per_s(phase) for phase in (Phase.PREFILL, Phase.DECODE)}


@cache
def _workloads() -> dict[str, NamedWorkload]:
    quantiles = _quantiles()
    found = {}
    for row in _rows("lengths.csv"):
        name = row["name"]
        prompts, answers = (
            TokenMoments(mean_tokens=float(row[f"mean_{what}_tokens"]), cv=float(row[f"cv_{what}"]))
            for what in ("input", "output")
        )
        found[name] = NamedWorkload(
            name=name,
            input_tokens=prompts,
            output_tokens=answers,
            drawn_input_tokens=quantiles.get((name, "input"), prompts),
            drawn_output_tokens=quantiles.get((name, "output"), answers),
            requests_per_s=float(row["requests_per_s"]) if row["requests_per_s"] else None,
            burstiness=float(row["burstiness"]) if row["burstiness"] else None,
            source=row["source"],
            as_of=date.fromisoformat(row["as_of"]),
        )
    return found


def _quantiles() -> dict[tuple[str, str], TokenQuantiles]:
    """By name and `input` or `output`."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in _rows("length_quantiles.csv"):
        points.setdefault((row["name"], row["what"]), []).append((float(row["frac"]), float(row["tokens"])))
    return {key: TokenQuantiles(points=tuple(found)) for key, found in points.items()}


def _rows(file: str) -> csv.DictReader[str]:
    return csv.DictReader((files("coral_core.workload") / "data" / file).read_text(encoding="utf-8").splitlines())
