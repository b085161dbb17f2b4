"""What changed between two snapshots of a library, template by template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from artifacts.library import LibrarySnapshot
from artifacts.templates import phase_throughput

_COLUMNS: Final = ["template_id", "model", "phase", "throughput_tokens_per_s", "throughput_requests_per_s"]
_IDENTITY: Final = ["template_id", "model", "phase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """How the templates of one model and phase changed; ratios are after / before of those that did, None if none."""

    model: str
    phase: str
    added: int
    removed: int
    changed: int
    unchanged: int
    ratio_min: float | None
    ratio_median: float | None
    ratio_max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryDiff:
    """Templates by id: only in the second snapshot, only in the first, in both with another throughput, in both alike.

    Columns: template_id, model, phase, throughput_before, throughput_after (null where absent), in the unit of the
    phase: requests/s for `aggregated`, tokens/s otherwise. Sorted by model, phase, id.
    """

    added: pa.Table
    removed: pa.Table
    changed: pa.Table
    unchanged: pa.Table

    @property
    def is_empty(self) -> bool:
        """Whether the snapshots hold the same templates with the same throughputs."""
        return not (len(self.added) or len(self.removed) or len(self.changed))

    def to_arrow(self) -> pa.Table:
        """All that differs as one table, with a column `change` (added, removed, changed)."""
        parts = {"added": self.added, "removed": self.removed, "changed": self.changed}
        return pa.concat_tables(
            [
                table.append_column("change", pa.repeat(pa.scalar(change), table.num_rows))
                for change, table in parts.items()
            ]
        )

    def summary(self) -> tuple[DiffRow, ...]:
        """One row per model and phase that either snapshot has, sorted."""
        parts = {
            name: _by_group(table)
            for name, table in (
                ("added", self.added),
                ("removed", self.removed),
                ("changed", self.changed),
                ("unchanged", self.unchanged),
            )
        }
        rows = []
        for model, phase in sorted({group for part in parts.values() for group in part}):
            ratios = parts["changed"].get((model, phase), np.empty(0))
            some = len(ratios) > 0
            rows.append(
                DiffRow(
                    model=model,
                    phase=phase,
                    added=len(parts["added"].get((model, phase), ())),
                    removed=len(parts["removed"].get((model, phase), ())),
                    changed=len(ratios),
                    unchanged=len(parts["unchanged"].get((model, phase), ())),
                    ratio_min=float(ratios.min()) if some else None,
                    ratio_median=float(np.median(ratios)) if some else None,
                    ratio_max=float(ratios.max()) if some else None,
                )
            )
        return tuple(rows)


def diff_libraries(before: LibrarySnapshot, after: LibrarySnapshot, *, tolerance_frac: float = 0.0) -> LibraryDiff:
    """What changed from one snapshot to another; see `diff_templates`. Raises StoreError where one is damaged."""
    return diff_templates(before.read(columns=_COLUMNS), after.read(columns=_COLUMNS), tolerance_frac=tolerance_frac)


def diff_templates(before: pa.Table, after: pa.Table, *, tolerance_frac: float = 0.0) -> LibraryDiff:
    """What changed from one table of templates to another.

    A throughput counts as changed where it moved by more than `tolerance_frac` of the larger one. Where a table has a
    template several times (made by several methods) its best throughput counts.
    """
    old, new = _best(before), _best(after)
    joined = old.rename_columns([*_IDENTITY, "throughput_before"]).join(
        new.rename_columns([*_IDENTITY, "throughput_after"]), keys=_IDENTITY, join_type="full outer"
    )
    joined = joined.sort_by([("model", "ascending"), ("phase", "ascending"), ("template_id", "ascending")])
    was, is_ = joined["throughput_before"], joined["throughput_after"]
    limit = pc.multiply(pc.max_element_wise(was, is_), tolerance_frac)
    moved = pc.greater(pc.abs(pc.subtract(was, is_)), limit)  # null where one is absent: filter drops those
    return LibraryDiff(
        added=joined.filter(pc.is_null(was)),
        removed=joined.filter(pc.is_null(is_)),
        changed=joined.filter(moved),
        unchanged=joined.filter(pc.invert(moved)),
    )


def _best(templates: pa.Table) -> pa.Table:
    """Identity and best throughput of each template."""
    table = templates.select(_IDENTITY).append_column("throughput", phase_throughput(templates))
    return table.group_by(_IDENTITY).aggregate([("throughput", "max")]).select([*_IDENTITY, "throughput_max"])


def _by_group(table: pa.Table) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Ratios after / before (NaN where one is absent) of each model and phase."""
    ratio = pc.divide(table["throughput_after"], table["throughput_before"])
    groups = table.select(["model", "phase"]).append_column("ratio", ratio)
    gathered = groups.group_by(["model", "phase"]).aggregate([("ratio", "list")])
    return {(row["model"], row["phase"]): np.array(row["ratio_list"], dtype=np.float64) for row in gathered.to_pylist()}
