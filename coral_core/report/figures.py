"""How figures are written for people, the same on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def figure(value: object) -> str:
    """Numbers with four significant digits or in whole thousands, never with an exponent; None as `-`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return _float_text(value) if isinstance(value, float) else str(value)


def _float_text(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-4:
        return f"{value:.12f}".rstrip("0").rstrip(".")
    return f"{value:.4g}"


def usd(value: float) -> str:
    """Money to the cent; less than half a cent is none, owed or due."""
    return f"{round(value, 2) + 0.0:,.2f}"


def nodes_text(nodes: Mapping[str, int]) -> str:
    """`2 x 1xL4 + 4xL40S`."""
    return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in sorted(nodes.items()))


def stages_text(stages: Sequence[Mapping[str, Any]], separator: str = " | ") -> str:
    """`26 on 1xL40S | 14 on 2 x 1xL4`: layers of each stage and the nodes that hold them."""
    return separator.join(
        f"{stage['layers']} on {nodes_text({name: list(stage['nodes']).count(name) for name in stage['nodes']})}"
        for stage in stages
    )


def throughput_text(tokens_per_s: float | None, requests_per_s: float | None) -> str:
    """A throughput in the unit of its phase: requests/s where there is one, else tokens/s."""
    if requests_per_s is not None:
        return f"{figure(requests_per_s)} requests/s"
    return f"{figure(tokens_per_s)} tokens/s"
