"""One shard of a template library: from a capacity table to stored templates, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from artifacts.canonical import canonical_json, sha256_hex
from artifacts.shards import ShardKey, ShardRecord, find_shard, write_shard
from artifacts.store import open_store
from artifacts.templates import template_table
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations
from coral_core.placement import enumerate_combinations, placement_method, verify_placed
from coral_core.placement.ilp import IlpPlacement

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Method = Literal["lattice", "ilp"]

SOLVE_VERSION: Final = 1
"""Goes up with every change of enumeration or placement that changes results; shards of older versions are not reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """All that one shard is made from: part `part` of `parts` of the combinations of one capacity table.

    The table carries the model, the latency bounds and the hardware as far as they matter; prices are not in it, so a
    price never makes a library stale. Picklable.
    """

    library: str
    table: CapacityTable
    n_max: int
    rho: float
    method: Method
    ilp_time_limit_s: float
    part: int = 0
    parts: int = 1

    @property
    def key(self) -> ShardKey:
        """The shard's name in the store, with the hash of everything its rows depend on."""
        return ShardKey(
            model=self.table.model,
            variant=self.table.variant,
            phase=self.table.phase,
            ttft_s=self.table.slo.ttft_s,
            tpot_s=self.table.slo.tpot_s,
            method=self.method,
            part=self.part,
            parts=self.parts,
            inputs_hash=self.inputs_hash,
        )

    @property
    def inputs_hash(self) -> str:
        """Hash of the table's content and of the settings that the method reads."""
        settings = {
            "solve_version": SOLVE_VERSION,
            "n_max": self.n_max,
            "rho": self.rho,
            "method": self.method,
            "ilp_time_limit_s": self.ilp_time_limit_s if self.method == "ilp" else None,
        }
        return sha256_hex(canonical_json([table_hash(self.table), settings]))


def table_hash(table: CapacityTable) -> str:
    """Hash of a capacity table's content, so that any change of facts or formulas that matters shows in it."""
    content = _digested(table)
    del content["inputs_hash"]
    return sha256_hex(canonical_json(content))


def _digested(value: DataclassInstance) -> dict[str, object]:
    """The fields of a dataclass, arrays as their type, shape and hash."""
    content: dict[str, object] = {}
    for name in (field.name for field in fields(value)):
        item = getattr(value, name)
        if isinstance(item, np.ndarray):
            content[name] = [str(item.dtype), item.shape, sha256_hex(np.ascontiguousarray(item).tobytes())]
        else:
            content[name] = _digested(item) if is_dataclass(item) and not isinstance(item, type) else item
    return content


def shard_combinations(spec: ShardSpec) -> NDArray[np.int16]:
    """The combinations of this part, (n, C): every `parts`-th, so that parts weigh about the same."""
    return combinations(spec.table, n_max=spec.n_max, rho=spec.rho)[spec.part :: spec.parts]


def combinations(table: CapacityTable, *, n_max: int, rho: float) -> NDArray[np.int16]:
    """All combinations of a table's configurations that may hold its model (DESIGN 3.5), (n, C)."""
    return enumerate_combinations(
        memory_bytes=table.memory_bytes,
        usable_memory_bytes=table.usable_memory_bytes,
        model_bytes=table.model_bytes,
        n_max=n_max,
        rho=rho,
    )


def solve_shard(spec: ShardSpec, store_url: str) -> ShardRecord:
    """Enumerate, place, verify and store one shard; its record. Done already, by whomever, it is not solved again."""
    store = open_store(store_url)
    existing = find_shard(store, spec.library, spec.key)
    if existing is not None:
        return existing
    start_s = perf_counter()
    counts = shard_combinations(spec)
    ilp = spec.method == "ilp"
    method = IlpPlacement(time_limit_s=spec.ilp_time_limit_s) if ilp else placement_method(spec.method)
    placed = method.place(spec.table, counts)
    verify_placed(spec.table, placed)
    runnable = without_idle_nodes(spec.table, placed)
    # All of these are kept; dropping dominated templates (DESIGN 3.5) would be a further step here.
    templates = template_table(spec.table, runnable)
    idle = len(placed) - len(runnable)
    statistics = {**placed.statistics, "with_idle_nodes": idle, "shard_s": perf_counter() - start_s}
    return write_shard(store, spec.library, spec.key, templates, statistics=statistics)


def without_idle_nodes(table: CapacityTable, placed: PlacedCombinations) -> PlacedCombinations:
    """The placements in which every node contributes.

    A node whose capacity is 0 at its stage's layers cannot even load them, so such a placement could not be started.
    Nothing is lost: without that node the combination has the same throughput for less.
    """
    row, stage, config = np.nonzero(placed.stage_counts)
    layers = placed.stage_layers[row, stage]
    idle = table.throughput[placed.n_stages[row] - 1, config, layers - 1] <= 0
    keep = np.ones(len(placed), dtype=np.bool_)
    keep[row[idle]] = False
    values = ((field.name, getattr(placed, field.name)) for field in fields(placed))
    kept: dict[str, Any] = {name: value[keep] for name, value in values if isinstance(value, np.ndarray)}
    return replace(placed, **kept)
