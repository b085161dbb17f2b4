"""Error bars of what a plan counts on: between which its capacities lie in nine of ten comparisons, and what that would mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_UNKNOWN_SHOWN: Final = 0.005
"""A smaller share of unknown error is not worth a reader's time."""


def with_error_bars(parts: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """Bounds of a capacity made of (throughput, 90th percentile of its relative error, None where not known).

    All parts are taken to be off by their own bar at once, in the same direction: no capacity is further off in nine of
    ten comparisons of each. Parts of unknown error stand as they are; `error_unknown_frac` is their share.
    `capacity_high` is None where an error is a whole or more.
    """
    capacity = sum(throughput for throughput, _ in parts)
    known = [(throughput, 0.0 if error is None else error) for throughput, error in parts]
    unknown = sum(throughput for throughput, error in parts if error is None)
    return {
        "capacity_low": sum(throughput / (1 + error) for throughput, error in known),
        "capacity_high": sum(throughput / (1 - error) for throughput, error in known)
        if all(error < 1 for _, error in known)
        else None,
        "error_unknown_frac": unknown / capacity if capacity else 0.0,
    }


def error_bar_notes(coverage: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of the error bars: demand that their slow end would not meet, and errors not known."""
    notes = []
    short = [
        f"{row['model']} {row['phase']} {1 - row['capacity_low'] / row['demand']:.0%}"
        for row in coverage
        if 0 < row["capacity_low"] < row["demand"] <= row["capacity"]
    ]
    if short:
        notes.append(
            "at the slow end of their error bars (nine of ten comparisons) the capacities would not meet "
            f"{', '.join(short)} of the demand; `capacity.pessimistic: true` plans with that end"
        )
    unknown = [
        f"{row['model']} {row['phase']} {row['error_unknown_frac']:.0%}"
        for row in coverage
        if row["error_unknown_frac"] > _UNKNOWN_SHOWN
    ]
    if unknown:
        notes.append(f"capacity whose error is not known, since nothing was measured on its GPUs: {', '.join(unknown)}")
    return notes
