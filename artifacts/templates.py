"""Serving templates as Arrow rows: from placements in bulk, to the objects of the domain, to the solver's arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from artifacts.schemas import TEMPLATE_SCHEMA
from coral_core.domain.allocation import TemplateColumns
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage, phase_bounds_s
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError, StoreError
from coral_core.placement.free_layouts import stage_layouts

Ints = NDArray[np.int64]


def template_table(table: CapacityTable, placed: PlacedCombinations, *, made_for: str = "") -> pa.Table:
    """The placements as template rows (`schemas.TEMPLATE_SCHEMA`), in their order.

    `made_for` names the runtime whose layouts `table` is limited to; it then stands as the rows' method.

    A row's source is the worst and its error the largest of the configurations it uses; an unknown error stays unknown.
    Raises ValueError where `placed` contradicts itself or `table`: that is a bug of the placement method.
    """
    _require_consistent(table, placed)
    n = len(placed)
    nodes = _NodeTexts(table, placed)
    used = placed.counts > 0
    rank = np.array([list(CapacitySource).index(source) for source in table.sources], dtype=np.int64)
    source = np.where(used, rank, -1).max(axis=1, initial=-1)
    error = np.array([np.nan if error is None else error for error in table.error_frac], dtype=np.float64)
    error = np.where(used, error, 0.0).max(axis=1, initial=0.0)  # NaN wins over every number
    throughput = pa.array(np.asarray(placed.throughput, dtype=np.float64))
    absent = pa.nulls(n, pa.float64())
    is_aggregated = table.phase is Phase.AGGREGATED
    columns: dict[str, Any] = {
        "template_id": _template_ids(table, placed, made_for),
        "model": _constant(table.model, n),
        "variant": _constant(table.variant, n),
        "phase": _constant(table.phase.value, n),
        "ttft_s": pa.array(np.full(n, table.slo.ttft_s, dtype=np.float64)),
        "tpot_s": pa.array(np.full(n, table.slo.tpot_s, dtype=np.float64)),
        "node_configs": nodes.configs,
        "node_counts": nodes.counts,
        "n_nodes": pa.array(placed.counts.sum(axis=1).astype(np.int16)),
        "stage_layers": nodes.stage_layers,
        "stage_nodes": nodes.stage_nodes,
        "stage_layouts": nodes.stage_layouts,
        "stage_budget_frac": nodes.stage_budget_frac,
        "throughput_tokens_per_s": absent if is_aggregated else throughput,
        "throughput_requests_per_s": throughput if is_aggregated else absent,
        "method": _constant(made_for or placed.method, n),
        "source": pa.array([s.value for s in CapacitySource]).take(pa.array(source)),
        "error_frac": pa.array(error, mask=np.isnan(error)),
        "proven": pa.array(np.asarray(placed.proven, dtype=np.bool_)),
    }
    return pa.table([columns[name] for name in TEMPLATE_SCHEMA.names], schema=TEMPLATE_SCHEMA)


def row_to_template(row: Mapping[str, Any]) -> ServingTemplate:
    """The template of one row (an element of `Table.to_pylist()` with all columns)."""
    budgets = row["stage_budget_frac"] or [None] * len(row["stage_layers"])
    return ServingTemplate(
        template_id=row["template_id"],
        model=row["model"],
        variant=row["variant"],
        phase=Phase(row["phase"]),
        slo=Slo(ttft_s=row["ttft_s"], tpot_s=row["tpot_s"]),
        placement=Placement(
            stages=tuple(
                Stage(layers=layers, nodes=tuple(nodes), budget_frac=budget_frac)
                for layers, nodes, budget_frac in zip(row["stage_layers"], row["stage_nodes"], budgets, strict=True)
            )
        ),
        throughput_tokens_per_s=row["throughput_tokens_per_s"],
        throughput_requests_per_s=row["throughput_requests_per_s"],
        method=row["method"],
        source=CapacitySource(row["source"]),
        error_frac=row["error_frac"],
    )


def template_rows(templates: Sequence[ServingTemplate], *, proven: bool = True) -> pa.Table:
    """The templates as rows; the inverse of `row_to_template`. Layouts inside the nodes are not known there: null."""
    rows = []
    for template in templates:
        combination = template.placement.combination
        budgets = [stage.budget_frac for stage in template.placement.stages]
        rows.append(
            {
                "template_id": template.template_id,
                "model": template.model,
                "variant": template.variant,
                "phase": template.phase.value,
                "ttft_s": template.slo.ttft_s,
                "tpot_s": template.slo.tpot_s,
                "node_configs": list(combination),
                "node_counts": list(combination.values()),
                "n_nodes": sum(combination.values()),
                "stage_layers": [stage.layers for stage in template.placement.stages],
                "stage_nodes": [list(stage.nodes) for stage in template.placement.stages],
                "stage_layouts": None,
                "stage_budget_frac": None if None in budgets else budgets,
                "throughput_tokens_per_s": template.throughput_tokens_per_s,
                "throughput_requests_per_s": template.throughput_requests_per_s,
                "method": template.method,
                "source": template.source.value,
                "error_frac": template.error_frac,
                "proven": proven,
            }
        )
    return pa.Table.from_pylist(rows, schema=TEMPLATE_SCHEMA)


def template_columns(templates: pa.Table, configs: Sequence[str]) -> TemplateColumns:
    """What allocation needs of the templates, node counts in the order of `configs`.

    Needs the columns template_id, model, variant, phase, node_configs, node_counts and both throughputs. Raises InputError for a
    template on a configuration that is not among `configs` and for a template that comes twice, StoreError for a
    template without throughput in the unit of its phase.
    """
    n = templates.num_rows
    ids = templates["template_id"].combine_chunks()
    if pc.count_distinct(ids).as_py() != n:
        counted = pc.value_counts(ids)
        twice = next(item["values"].as_py() for item in counted if item["counts"].as_py() > 1)
        raise InputError(f"template {twice} comes twice", where="library", fix="read the rows of one method only")
    lists = templates["node_configs"].combine_chunks()
    names, counts = pc.list_flatten(lists), pc.list_flatten(templates["node_counts"].combine_chunks())
    column = pc.index_in(names, value_set=pa.array(configs, pa.string()))
    if column.null_count:
        unknown = pc.unique(names.filter(pc.is_null(column))).to_pylist()
        raise InputError(
            f"templates use node configurations that the problem lacks: {', '.join(sorted(unknown))}",
            where="configs",
            fix="add them (0 available where they are not sold) or leave their templates out",
        )
    nodes = np.zeros((n, len(configs)), dtype=np.int64)
    np.add.at(nodes, (_numpy(pc.list_parent_indices(lists)), _numpy(column)), _numpy(counts))
    return TemplateColumns(
        ids=tuple(ids.to_pylist()),
        models=tuple(templates["model"].to_pylist()),
        phases=tuple(map({phase.value: phase for phase in Phase}.__getitem__, templates["phase"].to_pylist())),
        nodes=nodes,
        throughput=_throughput(templates),
        variants=tuple(templates["variant"].to_pylist()) if _some_model_varies(templates) else None,
    )


def _some_model_varies(templates: pa.Table) -> bool:
    kinds = templates.select(["model", "variant"]).group_by(["model", "variant"]).aggregate([])
    return bool(kinds.num_rows > pc.count_distinct(kinds["model"]).as_py())


def phase_throughput(templates: pa.Table) -> pa.Array:
    """Throughput in the unit of each row's phase, as an Arrow array; null where the row has none."""
    return pc.if_else(
        pc.equal(templates["phase"], Phase.AGGREGATED.value),
        templates["throughput_requests_per_s"],
        templates["throughput_tokens_per_s"],
    ).combine_chunks()


def _throughput(templates: pa.Table) -> NDArray[np.float64]:
    values = phase_throughput(templates)
    if values.null_count:
        lacking = templates["template_id"].filter(pc.is_null(values))[0].as_py()
        raise StoreError(
            "has no throughput in the unit of its phase", where=f"template {lacking}", fix="rebuild the library"
        )
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


class _NodeTexts:
    """The list columns of a table of placements, built from flat arrays and offsets without a loop over rows."""

    def __init__(self, table: CapacityTable, placed: PlacedCombinations) -> None:
        # Names sorted, so that each list is in the order that `Placement.combination` has.
        order = np.array(sorted(range(len(table.configs)), key=table.configs.__getitem__), dtype=np.int64)
        names = pa.array([table.configs[i] for i in order], pa.string())
        counts = placed.counts[:, order].astype(np.int64)
        row, config = np.nonzero(counts)
        offsets = _offsets(np.bincount(row, minlength=len(placed)))
        self.configs = pa.ListArray.from_arrays(offsets, names.take(pa.array(config)), type=_type("node_configs"))
        self.counts = pa.ListArray.from_arrays(
            offsets, pa.array(counts[row, config].astype(np.int16)), type=_type("node_counts")
        )

        stage_row, stage = np.nonzero(placed.stage_layers)
        layers = placed.stage_layers[stage_row, stage].astype(np.int64)
        row_offsets = _offsets(np.asarray(placed.n_stages, dtype=np.int64))
        self.stage_layers = pa.ListArray.from_arrays(
            row_offsets, pa.array(layers.astype(np.int16)), type=_type("stage_layers")
        )

        per_stage = placed.stage_counts[stage_row, stage][:, order].astype(np.int64)
        at, config = np.nonzero(per_stage)
        repeats = per_stage[at, config]
        stage_offsets = _offsets(per_stage.sum(axis=1))
        texts = names.take(pa.array(np.repeat(config, repeats)))
        self.stage_nodes = _nested(row_offsets, stage_offsets, texts, "stage_nodes")
        codes, layout_names = stage_layouts(table, placed)
        layout = codes[stage_row[at], stage[at], order[config]]
        if np.any(layout < 0):
            raise ValueError("a placement uses a node that has no layout for its layers")
        layouts = pa.array(layout_names, pa.string()).take(pa.array(np.repeat(layout.astype(np.int64), repeats)))
        self.stage_layouts = _nested(row_offsets, stage_offsets, layouts, "stage_layouts")

        # Null where every stage has the same share.
        self.stage_budget_frac = pa.nulls(len(placed), _type("stage_budget_frac"))
        if placed.stage_budget_frac is not None:
            share = pa.array(placed.stage_budget_frac[stage_row, stage].astype(np.float64))
            self.stage_budget_frac = pa.ListArray.from_arrays(row_offsets, share, type=_type("stage_budget_frac"))


def _template_ids(table: CapacityTable, placed: PlacedCombinations, made_for: str) -> pa.Array:
    """`domain.templates.template_id` of every row, the texts of equal stages made once.

    A stage is (layers, multiset of nodes); ranks of multisets follow the order of their sorted name lists, so that
    sorting layers * multisets + rank sorts the stages as the identity demands.
    """
    row, stage = np.nonzero(placed.stage_layers)
    of_stage = placed.stage_counts[row, stage]
    multisets, which = _distinct(_mixed_radix(of_stage))
    name_lists = [
        sorted(name for name, count in zip(table.configs, counts, strict=True) for _ in range(count))
        for counts in of_stage[multisets].tolist()
    ]
    by_name = sorted(range(len(name_lists)), key=name_lists.__getitem__)
    rank = np.empty(len(by_name), dtype=np.int64)
    rank[by_name] = np.arange(len(by_name))
    width = len(by_name)
    keys = np.full(placed.stage_layers.shape, -1, dtype=np.int64)
    keys[row, stage] = placed.stage_layers[row, stage].astype(np.int64) * width + rank[which]
    keys.sort(axis=1)
    first, texts_of = _distinct(keys.ravel())
    texts = [
        "" if key < 0 else json.dumps([key // width, name_lists[by_name[key % width]]], separators=(",", ":"))
        for key in keys.ravel()[first].tolist()
    ]
    head = [table.model, table.variant, table.phase.value, *phase_bounds_s(table.phase, table.slo)]
    opening, closing = (
        json.dumps(head, separators=(",", ":"))[:-1] + ",[",
        f"],{json.dumps(made_for)}]" if made_for else "]]",
    )
    sha256, letter = hashlib.sha256, table.phase.value[0]
    ids = []
    S = placed.stage_layers.shape[1]
    for chosen, n_stages in zip(texts_of.reshape(-1, S).tolist(), placed.n_stages.tolist(), strict=True):
        identity = opening + ",".join([texts[i] for i in chosen[S - n_stages :]]) + closing
        ids.append(f"{letter}-{sha256(identity.encode()).hexdigest()[:16]}")
    return pa.array(ids, pa.string())


def _mixed_radix(counts: NDArray[np.int16]) -> Ints:
    """One integer per row, equal exactly where the rows are (n, C); compressed wherever it would outgrow 64 bits."""
    keys, size = np.zeros(len(counts), dtype=np.int64), 1
    for column in counts.astype(np.int64).T:
        base = int(column.max(initial=0)) + 1
        if size * base >= 2**62:
            first, keys = _distinct(keys)
            size = len(first)
        keys, size = keys * base + column, size * base
    return keys


def _distinct(keys: Ints) -> tuple[Ints, Ints]:
    """Where each distinct value first occurs, and for every entry which of them it is. By hashing: no sort."""
    encoded = pa.array(keys).dictionary_encode()
    which = _numpy(encoded.indices)
    first = np.empty(len(encoded.dictionary), dtype=np.int64)
    first[which[::-1]] = np.arange(len(keys) - 1, -1, -1)
    return first, which


def _require_consistent(table: CapacityTable, placed: PlacedCombinations) -> None:
    """Raise ValueError unless every row is a whole placement of the table's layers over its nodes."""
    n, S, C = len(placed), placed.stage_layers.shape[1], len(table.configs)
    shapes = {
        "counts": (placed.counts, (n, C)),
        "n_stages": (placed.n_stages, (n,)),
        "stage_layers": (placed.stage_layers, (n, S)),
        "stage_counts": (placed.stage_counts, (n, S, C)),
        "proven": (placed.proven, (n,)),
    }
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
    has_stage = np.arange(S) < placed.n_stages[:, None]
    checks = {
        "layers of the stages add up to the model's": placed.stage_layers.sum(axis=1) == table.layers,
        "nodes of the stages add up to the combination": (placed.stage_counts.sum(axis=1) == placed.counts).all(axis=1),
        "exactly the first n_stages stages have layers": ((placed.stage_layers > 0) == has_stage).all(axis=1),
        "every stage has a node": ((placed.stage_counts.sum(axis=2) > 0) == has_stage).all(axis=1),
        "throughput is positive and finite": np.isfinite(placed.throughput) & (placed.throughput > 0),
    }
    for law, holds in checks.items():
        if not holds.all():
            raise ValueError(f"placement {int(np.argmin(holds))} of {table.model} breaks: {law}")


def _offsets(sizes: Ints) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(sizes))).astype(np.int32))


def _nested(row_offsets: pa.Array, stage_offsets: pa.Array, texts: pa.Array, column: str) -> pa.Array:
    kind = _type(column)
    inner = pa.ListArray.from_arrays(stage_offsets, texts, type=kind.value_type)
    return pa.ListArray.from_arrays(row_offsets, inner, type=kind)


def _type(column: str) -> pa.DataType:
    return TEMPLATE_SCHEMA.field(column).type


def _constant(text: str, n: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), n)


def _numpy(array: pa.Array) -> Ints:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)
