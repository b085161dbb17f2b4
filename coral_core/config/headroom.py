"""What a scenario keeps in reserve of its capacities, for those who read plans and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.workload import Phase

NOT_CALIBRATED = "not calibrated"


def headroom_rows(resolved: ResolvedScenario, utilization: Mapping[Phase, float] | None = None) -> list[dict[str, Any]]:
    """By model and phase: `slo_frac`, `max_utilization_frac` and the `source` of both.

    `utilization` replaces the scenario's `max_utilization_frac` of the phases it names.
    """
    capacity, given = resolved.scenario.capacity, utilization or {}
    return [
        {
            "model": model.shape.name,
            "phase": phase.value,
            "slo_frac": capacity.slo_frac_of(model.shape.name, phase),
            "max_utilization_frac": given.get(phase, capacity.max_utilization_frac_of(model.shape.name, phase)),
            "source": "given for this run" if phase in given else capacity.headroom_source or NOT_CALIBRATED,
        }
        for model in resolved.models
        for phase in model.phases
    ]


def headroom_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in one sentence."""
    if all(row["slo_frac"] == row["max_utilization_frac"] == 1 for row in rows):
        return (
            "capacities are planned without headroom for queues and long requests, so part of them will miss the latency "
            "bounds; `coral calibrate` finds what it takes"
        )
    shares = ", ".join(
        f"{row['model']} {row['phase']} {row['max_utilization_frac']:g} of what {row['slo_frac']:g} of the bound allows"
        for row in rows
    )
    return f"headroom: {shares} ({'; '.join(dict.fromkeys(row['source'] for row in rows))})"
