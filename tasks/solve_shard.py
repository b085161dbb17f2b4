"""One shard of a template library: from a capacity table to stored templates, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from artifacts.canonical import canonical_json, sha256_hex
from artifacts.shards import ShardKey, ShardRecord, ShardWriter, find_shard
from artifacts.store import open_store
from artifacts.templates import template_table
from coral_core.config.scenario import LibraryMethod
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacedCombinations
from coral_core.placement import enumerate_combinations, placement_method, verify_placed
from coral_core.placement.chain import ChainPlacement
from coral_core.placement.combinations import split_rows
from coral_core.placement.dominance import DominancePass, rows_with_placement
from coral_core.placement.free_layouts import stage_layouts
from coral_core.placement.free_verify import verify_free_placed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SOLVE_VERSION: Final = 3
"""Goes up with every change of enumeration, placement or pruning that changes results; older shards are not reused."""

BLOCK_ROWS: Final = 2**20
"""Combinations placed at a time: all of up to 6 nodes of 20 configurations; what they contain is solved once per block."""

PIECE_ROWS: Final = 2**17
"""Placements looked at and made into rows of text at a time; bounds memory only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """All that one shard is made from: part `part` of `parts` of the combinations of one capacity table.

    The table carries the model, the latency bounds and the hardware as far as they matter; prices are not in it, so a
    price never makes a library stale. Picklable. `made_for` names the runtime whose layouts the table is limited to, and
    stands in the shard's name as its method; `chain`, if any, lays out one node per stage, each
    a pipeline of so many parts inside.
    """

    library: str
    table: CapacityTable
    n_max: int
    rho: float
    method: LibraryMethod
    ilp_time_limit_s: float
    part: int = 0
    parts: int = 1
    keep_all: bool = False
    made_for: str = ""
    chain: int = 0

    @property
    def prunes(self) -> bool:
        """Whether dominated templates are dropped.

        Not of integer programs: each part would have to solve the programs of all smaller combinations too, and what a
        time limit left unproven decides nothing.
        """
        return not self.keep_all and self.method != "ilp"

    @property
    def key(self) -> ShardKey:
        """The shard's name in the store, with the hash of everything its rows depend on."""
        return ShardKey(
            model=self.table.model,
            variant=self.table.variant,
            phase=self.table.phase,
            ttft_s=self.table.slo.ttft_s,
            tpot_s=self.table.slo.tpot_s,
            method=self.made_for or self.method,
            part=self.part,
            parts=self.parts,
            inputs_hash=self.inputs_hash,
        )

    @property
    def inputs_hash(self) -> str:
        """Hash of the table's content and of the settings that the method reads."""
        settings: dict[str, object] = {
            "solve_version": SOLVE_VERSION,
            "n_max": self.n_max,
            "rho": self.rho,
            "method": self.method,
            "prunes": self.prunes,
            "ilp_time_limit_s": self.ilp_time_limit_s if self.method == "ilp" else None,
        }
        if self.made_for:
            settings |= {"made_for": self.made_for, "chain": self.chain}
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


def combinations(table: CapacityTable, *, n_max: int, rho: float) -> NDArray[np.int16]:
    """All combinations of a table's configurations that may hold its model (DESIGN 3.5), (n, C)."""
    return enumerate_combinations(
        memory_bytes=table.memory_bytes,
        usable_memory_bytes=table.usable_memory_bytes,
        model_bytes=table.model_bytes,
        n_max=n_max,
        rho=rho,
    )


def shard_rows(spec: ShardSpec, counts: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Which of all combinations (n, C) are this part's, (n,): neighbours, because they share the work of placing them."""
    parts = split_rows(counts, spec.parts)
    mine = np.zeros(len(counts), dtype=np.bool_)
    if spec.part < len(parts):
        mine[parts[spec.part]] = True
    return mine


def solve_shard(spec: ShardSpec, store_url: str) -> ShardRecord:
    """Enumerate, place, verify, prune and store one shard; its record. Done already, by whomever, it is not solved again."""
    store = open_store(store_url)
    existing = find_shard(store, spec.library, spec.key)
    if existing is not None:
        return existing
    start_s, start_core_s = perf_counter(), process_time()
    statistics: dict[str, float] = {}
    writer = ShardWriter(spec.key)
    for placed in shard_templates(spec, statistics):
        for first in range(0, len(placed), PIECE_ROWS):
            writer.add(
                template_table(spec.table, _rows_of(placed, slice(first, first + PIECE_ROWS)), made_for=spec.made_for)
            )
    statistics |= {"shard_s": perf_counter() - start_s, "shard_core_s": process_time() - start_core_s}
    return writer.store(store, spec.library, statistics=statistics)


def shard_templates(spec: ShardSpec, statistics: dict[str, float]) -> Iterator[PlacedCombinations]:
    """The templates of a shard, verified, block by block so that memory stays bounded; `statistics` grows with each.

    Whether a template is dominated shows in the combinations that its own contains. A part of several places those too,
    so that all parts together keep exactly what one part of all would; they count as `placed_besides` (8 parts of 206,197
    combinations of 20 configurations place 1.7 times as many in all, 32 parts 2.4 times).
    Statistics: those of the placement method and its CPU time `solve_core_s`; `with_idle_nodes`, `dominated` (dropped).
    """
    counts = combinations(spec.table, n_max=spec.n_max, rho=spec.rho)
    mine = shard_rows(spec, counts)
    if not mine.all():
        chosen = DominancePass(counts).with_sub_multisets(mine) if spec.prunes else mine
        counts, mine = counts[chosen], mine[chosen]
    dominance = DominancePass(counts) if spec.prunes else None
    solver = placement_method(spec.method, time_limit_s=spec.ilp_time_limit_s)
    place = ChainPlacement(spec.chain).place if spec.chain else solver.place
    tally: dict[str, float] = dict.fromkeys(("with_idle_nodes", "dominated", "placed_besides", "solve_core_s"), 0)
    for first in range(0, max(len(counts), 1), BLOCK_ROWS):
        block, in_part = counts[first : first + BLOCK_ROWS], mine[first : first + BLOCK_ROWS]
        started_s = process_time()
        placed = place(spec.table, block)
        tally["solve_core_s"] += process_time() - started_s
        if placed.stage_budget_frac is None:
            verify_placed(spec.table, placed)
        else:
            verify_free_placed(spec.table, placed)
        rows = rows_with_placement(block, placed.counts)
        stays = all_nodes_used(spec.table, placed)
        tally["with_idle_nodes"] += int((~stays & in_part[rows]).sum())
        if dominance is not None:
            throughput = np.zeros(len(block))
            throughput[rows[stays]] = placed.throughput[stays]
            undominated = dominance.undominated(throughput)[rows]
            tally["dominated"] += int((stays & ~undominated & in_part[rows]).sum())
            stays &= undominated
        besides = int((~in_part).sum())
        tally["placed_besides"] += besides
        add_statistics(statistics, placed.statistics)
        statistics["combinations"] -= besides
        statistics["infeasible"] -= besides - int((~in_part[rows]).sum())
        statistics.update(tally)
        yield _rows_of(placed, stays & in_part[rows])


def add_statistics(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add each statistic up; of those in bytes, which are peaks, the largest counts."""
    for name, value in more.items():
        so_far = total.get(name, 0.0)
        total[name] = max(so_far, value) if name.endswith("_bytes") else so_far + value


def all_nodes_used(table: CapacityTable, placed: PlacedCombinations) -> NDArray[np.bool_]:
    """The placements in which every node contributes, (n,).

    A node whose capacity is 0 at its stage's layers cannot even load them, so such a placement could not be started.
    Nothing is lost: without that node the combination has the same throughput for less.
    """
    used = np.empty(len(placed), dtype=np.bool_)
    for first in range(0, len(placed), PIECE_ROWS):
        piece = slice(first, first + PIECE_ROWS)
        codes, _ = stage_layouts(table, _rows_of(placed, piece))
        used[piece] = ~((placed.stage_counts[piece] > 0) & (codes < 0)).any(axis=(1, 2))
    return used


def _rows_of(placed: PlacedCombinations, keep: NDArray[np.bool_] | slice) -> PlacedCombinations:
    values = ((field.name, getattr(placed, field.name)) for field in fields(placed))
    kept: dict[str, Any] = {name: value[keep] for name, value in values if isinstance(value, np.ndarray)}
    return replace(placed, **kept)
