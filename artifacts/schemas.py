"""The Arrow schema of template rows, and its check.

One row is one serving template. `node_configs`/`node_counts` (parallel, sorted by name) are the combination;
`stage_layers`, `stage_nodes` and `stage_layouts` (parallel, in pipeline order) are the placement: layers, node names
and, node by node, the layout inside the node; `stage_budget_frac` is each stage's share of the latency SLO, null where all
have the same. Exactly one of the two throughputs is set: requests/s where the phase is `aggregated`, tokens/s otherwise. `error_frac` is null where it is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from coral_core.errors import InputError, StoreError

SCHEMA_VERSION: Final = 1
"""Goes up with every change that an older reader would misread."""

_NAMES: Final = pa.list_(pa.field("item", pa.string(), nullable=False))
_SMALL: Final = pa.list_(pa.field("item", pa.int16(), nullable=False))
_SHARES: Final = pa.list_(pa.field("item", pa.float64(), nullable=False))
_NAMES_BY_STAGE: Final = pa.list_(pa.field("item", _NAMES, nullable=False))


def _field(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


TEMPLATE_SCHEMA: Final = pa.schema(
    [
        _field("template_id", pa.string()),
        _field("model", pa.string()),
        _field("variant", pa.string()),
        _field("phase", pa.string()),
        _field("ttft_s", pa.float64()),
        _field("tpot_s", pa.float64()),
        _field("node_configs", _NAMES),
        _field("node_counts", _SMALL),
        _field("n_nodes", pa.int16()),
        _field("stage_layers", _SMALL),
        _field("stage_nodes", _NAMES_BY_STAGE),
        _field("stage_layouts", _NAMES_BY_STAGE, nullable=True),
        _field("stage_budget_frac", _SHARES, nullable=True),
        _field("throughput_tokens_per_s", pa.float64(), nullable=True),
        _field("throughput_requests_per_s", pa.float64(), nullable=True),
        _field("method", pa.string()),
        _field("source", pa.string()),
        _field("error_frac", pa.float64(), nullable=True),
        _field("proven", pa.bool_()),
    ]
)


def checked_columns(columns: Sequence[str] | None) -> list[str]:
    """The columns asked for, all where None. Raises InputError for one that does not exist."""
    if columns is None:
        return list(TEMPLATE_SCHEMA.names)
    unknown = [column for column in columns if column not in TEMPLATE_SCHEMA.names]
    if unknown:
        raise InputError(
            f"no column {unknown[0]!r} in the library",
            where="columns",
            fix=f"choose of {', '.join(TEMPLATE_SCHEMA.names)}",
        )
    return list(dict.fromkeys(columns))


def require_template_schema(schema: pa.Schema, *, where: str) -> None:
    """Raise StoreError unless `schema` is that of template rows, whatever its metadata."""
    if schema.equals(TEMPLATE_SCHEMA, check_metadata=False):
        return
    names = dict.fromkeys([*TEMPLATE_SCHEMA.names, *schema.names])
    odd = [name for name in names if not _has_same_field(schema, name)]
    raise StoreError(
        f"not a table of templates: differs in {', '.join(odd) or 'the order of columns'}",
        where=where,
        fix="the file is foreign or of another version of coral: rebuild the library",
    )


def _has_same_field(schema: pa.Schema, name: str) -> bool:
    theirs, ours = schema.get_all_field_indices(name), TEMPLATE_SCHEMA.get_all_field_indices(name)
    return len(theirs) == len(ours) == 1 and bool(schema.field(theirs[0]).equals(TEMPLATE_SCHEMA.field(ours[0])))
