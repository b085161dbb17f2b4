"""Results as Markdown for a page of documentation: evaluations beside the published ratios, and changed assumptions.

Costs are predicted, goodput is simulated, as in the documents that these tables are made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coral_core.errors import InputError
from coral_core.report.evaluation_report import percent
from coral_core.report.figures import figure, usd
from coral_core.report.lever_report import lever_markdown

SUBJECT: Final = "coral"
Document = Mapping[str, Any]


def results_markdown(documents: Sequence[Document]) -> str:
    """Tables of what `coral evaluate`, `coral evaluate levers` and `coral evaluate assumptions` print with `--json`.

    All evaluations share one table, in the order given; the others have one each. Raises InputError for other documents.
    """
    evaluations = [one for one in documents if "policies" in one and "ratios" in one]
    parts = [published_markdown(evaluations)] if evaluations else []
    for one in documents:
        if one.get("kind") == "levers":
            parts.append(f"### {one['scenario']}\n\n{lever_markdown(one)}")
        elif one.get("kind") == "assumptions":
            parts.append(f"### {one['scenario']}\n\n{assumptions_markdown(one)}")
        elif one not in evaluations:
            raise InputError(
                "is no result that tables are made of", fix="give what `coral evaluate ... --json` printed"
            )
    return "\n".join(parts)


def published_markdown(documents: Sequence[Document]) -> str:
    """One row for each scenario and policy: cost, goodput, and both ratios beside the published ones."""
    columns = (
        *(
            "scenario",
            "policy",
            "USD/h",
            "not met",
            "goodput tokens/s",
            "attained",
            "cost / coral",
            "verdict",
            "published",
        ),
        *("coral's goodput / its", "published", "solve s"),
    )
    lines = [_line(columns), _line(["---", "---", *["---:"] * (len(columns) - 2)])]
    for document in documents:
        ratios = document["ratios"].get(SUBJECT, {})
        for name, one in document["policies"].items():
            ratio = ratios.get(name, {})
            published = ratio.get("published") or {}
            lines.append(
                _line(
                    (
                        document["scenario"],
                        name,
                        usd(one["cost_usd_per_h"]),
                        "none" if one["shortfall_frac"] == 0 else percent(one["shortfall_frac"]),
                        one["goodput_tokens_per_s"],
                        percent(one["attainment_frac"]),
                        _ratio(ratio.get("cost_ratio")),
                        ratio.get("cost_verdict"),
                        _ratio(published.get("cost_ratio")),
                        _ratio(ratio.get("goodput_ratio")),
                        _ratio(published.get("goodput_ratio")),
                        one["solve_s"]["mean"],
                    )
                )
            )
        lines += [
            _line((document["scenario"], name, "failed", *[None] * (len(columns) - 3))) for name in document["failed"]
        ]
    return "\n".join([*lines, ""])


def assumptions_table(document: Document) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Columns and rows: Coral's cost, and the others' over it."""
    rows = document["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("ratios", {}) if name != SUBJECT))
    cells: list[tuple[object, ...]] = []
    for row in rows:
        if "failed" in row:
            cells.append((row["assumption"], "failed", *[None] * len(names)))
            continue
        ours = row["cost_usd_per_h"][SUBJECT]
        ratios = [_ratio(row["ratios"].get(name)) for name in names]
        cells.append((row["assumption"], None if ours is None else usd(ours), *ratios))
    return ("changed", "coral USD/h", *(f"{name} / coral" for name in names)), cells


def assumptions_markdown(document: Document) -> str:
    """The same as Markdown, with the reasons of rows that failed."""
    columns, rows = assumptions_table(document)
    lines = [_line(columns), _line(["---", *["---:"] * (len(columns) - 1)]), *map(_line, rows), ""]
    lines += [f"- {row['assumption']}: {row['failed']}" for row in document["rows"] if "failed" in row]
    return "\n".join([*lines, ""])


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(figure(cell) for cell in cells)} |"
