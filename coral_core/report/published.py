"""What the publication reports for its own setups: Coral against its baselines (arXiv 2605.04357, sections 6.3 to 6.6).

Ratios only; absolute USD/h and tokens/s are printed in figures alone. `times_dearer` is the baseline's cost over Coral's,
`times_goodput` Coral's goodput over the baseline's; None where no number is stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SOURCE: Final = "arXiv 2605.04357"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRatio:
    """One published comparison, and the section it stands in."""

    times_dearer: float | None
    times_goodput: float | None
    section: str


def _row(times_dearer: float | None, times_goodput: float | None, section: str) -> PublishedRatio:
    return PublishedRatio(times_dearer=times_dearer, times_goodput=times_goodput, section=section)


PUBLISHED: Final[Mapping[tuple[str, str], PublishedRatio]] = MappingProxyType(
    {
        ("paper-core", "homo"): _row(1.62, None, "6.3"),
        ("paper-core", "cauchy"): _row(1.60, None, "6.3"),
        ("paper-extended", "homo"): _row(3.14, None, "6.3"),
        ("paper-extended", "cauchy"): _row(2.66, None, "6.3"),
        ("paper-core-scarce", "homo"): _row(1.0, 1.24, "6.4"),
        ("paper-core-scarce", "cauchy"): _row(1.51, 1.0, "6.4"),
        # There Coral costs 1.52 times as much as homo, which serves little.
        ("paper-extended-scarce", "homo"): _row(1 / 1.52, 7.64, "6.4"),
        ("paper-extended-scarce", "cauchy"): _row(1.25, 2.39, "6.4"),
        ("large-heavy-core", "homo"): _row(1.82, None, "6.5"),
        ("large-heavy-core", "cauchy"): _row(1.78, None, "6.5"),
        ("large-heavy-extended", "homo"): _row(2.79, None, "6.5"),
        ("large-heavy-extended", "cauchy"): _row(3.47, None, "6.5"),
        ("small-heavy-core", "homo"): _row(1.1, None, "6.5"),
        ("small-heavy-core", "cauchy"): _row(1.1, None, "6.5"),
        ("small-heavy-extended", "homo"): _row(2.34, None, "6.5"),
        ("small-heavy-extended", "cauchy"): _row(1.64, None, "6.5"),
        # "21% cheaper, 26% more throughput" than Helix's own reported figures.
        ("helix-64", "helix"): _row(1 / (1 - 0.21), 1.26, "6.6"),
    }
)
