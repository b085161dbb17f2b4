"""Chosen templates as pipelines of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coral_core.report.figures import usd
from coral_core.report.page import Pipeline, Pipelines


def pipelines_of(rows: Sequence[Mapping[str, Any]], *, title: str, most: int, is_open: bool = True) -> Pipelines:
    """The templates of some instances, dearest first, at most `most` of them; what is left out is said.

    A row is one template in one region: template, model, phase, region, count, stages (layers, nodes) and
    price_usd_per_h.
    """
    by_template: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_template.setdefault(row["template"], []).append(row)
    ordered = sorted(by_template.items(), key=lambda item: (-_cost(item[1]), item[0]))
    left = ordered[most:]
    rest = sum(_cost(group) for _, group in left)
    return Pipelines(
        title=title,
        kind="predicted",
        pipelines=tuple(_pipeline(name, group) for name, group in ordered[:most]),
        is_open=is_open,
        caption=f"{len(left)} more templates of {usd(rest)} USD/h in all are not drawn." if left else "",
    )


def _cost(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(row["count"] * (row["price_usd_per_h"] or 0.0) for row in rows))


def _pipeline(template: str, rows: Sequence[Mapping[str, Any]]) -> Pipeline:
    first = rows[0]
    prices = sorted({row["price_usd_per_h"] for row in rows if row["price_usd_per_h"] is not None})
    price = " to ".join(usd(value) for value in dict.fromkeys((prices[0], prices[-1]))) if prices else None
    return Pipeline(
        name=f"{first['model']} {first['phase']}",
        facts=(
            ", ".join(f"{row['count']} in {row['region']}" for row in rows),
            *((f"{price} USD/h each",) if price else ()),
            template,
        ),
        stages=tuple(
            (stage["layers"], {name: list(stage["nodes"]).count(name) for name in dict.fromkeys(stage["nodes"])})
            for stage in first["stages"]
        ),
    )
