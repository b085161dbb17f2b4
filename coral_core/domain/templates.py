"""Serving templates: a combination of nodes, how a model lies over it, and what that yields."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from coral_core.domain.workload import Phase, Slo


class CapacitySource(StrEnum):
    """Where a capacity figure comes from, best first; a mix carries the worst of its parts."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    ESTIMATED = "estimated"

    @classmethod
    def worst(cls, sources: Iterable[CapacitySource]) -> CapacitySource:
        """The least trustworthy of `sources` (at least one)."""
        order = list(cls)
        return max(sources, key=order.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: consecutive `layers` held by each of `nodes` (data parallel inside the stage).

    `budget_frac` is the stage's share of the SLO, where the method chose it; without, stages have equal shares.
    """

    layers: int
    nodes: tuple[str, ...]
    budget_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model laid over nodes: stages in pipeline order; every node is in exactly one stage."""

    stages: tuple[Stage, ...]

    @property
    def combination(self) -> dict[str, int]:
        """Nodes per configuration, keys sorted."""
        counts = Counter(node for stage in self.stages for node in stage.nodes)
        return dict(sorted(counts.items()))

    @property
    def layers(self) -> int:
        """Layers of all stages together."""
        return sum(stage.layers for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTemplate:
    """(model, variant, phase, SLO, combination, optimal placement) and its throughput.

    Exactly one of the two throughputs is set: requests/s for `aggregated`, tokens/s otherwise.
    `error_frac` is the 90th percentile of the relative error of its capacities, or None where it is not known.
    """

    template_id: str
    model: str
    variant: str
    phase: Phase
    slo: Slo
    placement: Placement
    throughput_tokens_per_s: float | None
    throughput_requests_per_s: float | None
    method: str
    source: CapacitySource
    error_frac: float | None = None

    @property
    def throughput(self) -> float:
        """Throughput in the phase's own unit."""
        value = self.throughput_requests_per_s if self.phase is Phase.AGGREGATED else self.throughput_tokens_per_s
        if value is None:
            raise ValueError(f"template {self.template_id} has no throughput in the unit of phase {self.phase}")
        return value


def template_id(*, model: str, variant: str, phase: Phase, slo: Slo, placement: Placement, made_for: str = "") -> str:
    """A stable id: hash of what the template *is*, not of its throughput.

    A new profile must not rename the running fleet (DESIGN 5), so no capacity figure enters. Stage order and the
    order of nodes inside a stage do not matter to what runs, hence both are sorted. Of the SLO only what binds the
    phase enters: another TPOT leaves prefill templates what they are. `made_for` names the runtime whose layouts inside the
    nodes it has, where it was made for one: the same stages may be laid out otherwise for another.
    """
    stages = sorted((stage.layers, sorted(stage.nodes)) for stage in placement.stages)
    identity = [model, variant, phase.value, *phase_bounds_s(phase, slo), stages, *([made_for] if made_for else [])]
    digest = hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()
    return f"{phase.value[0]}-{digest[:16]}"


def phase_bounds_s(phase: Phase, slo: Slo) -> tuple[float, ...]:
    """The latency bounds that a phase has to keep: TTFT for prefill, TPOT for decode, both for aggregated."""
    ttft_s, tpot_s = float(slo.ttft_s), float(slo.tpot_s)
    return {Phase.PREFILL: (ttft_s,), Phase.DECODE: (tpot_s,), Phase.AGGREGATED: (ttft_s, tpot_s)}[phase]


def combination_text(combination: Mapping[str, int]) -> str:
    """`2 x 4xL4 + 1xL40S` for people."""
    parts = [name if count == 1 else f"{count} x {name}" for name, count in sorted(combination.items())]
    return " + ".join(parts)
