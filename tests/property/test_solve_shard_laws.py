"""Laws of pruned shards: parts and blocks change nothing, and what is dropped is dominated by something that stays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coral_core.placement.verify import verify_placed
from tasks import solve_shard
from tasks.solve_shard import ShardSpec, combinations, shard_templates
from tests.property.test_placement_laws import random_table

COUNTED = ("combinations", "infeasible", "unproven", "with_idle_nodes", "dominated")


def whole_table(rng, **size):
    """Small whole capacities; a node without capacity has no layout."""
    table = random_table(rng, whole=True, **size)
    return replace(table, layout=np.where(table.throughput > 0, 0, -1).astype(np.int16))


@st.composite
def shards(draw):
    """A shard of whole numbers, so that many combinations give the same and nodes stay idle."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_configs, n_max = draw(st.sampled_from([(2, 4), (3, 3), (4, 3)]))
    table = whole_table(rng, n_configs=n_configs, layers=draw(st.integers(1, 7)), s_max=n_max)
    return ShardSpec(library="lib", table=table, n_max=n_max, rho=1e6, method="lattice", ilp_time_limit_s=1.0)


def rows_of(spec, **changes):
    """Everything about each template by its combination, and the statistics."""
    statistics: dict[str, float] = {}
    rows = {}
    for placed in shard_templates(replace(spec, **changes), statistics):
        verify_placed(spec.table, placed)
        for row in range(len(placed)):
            key = tuple(placed.counts[row].tolist())
            assert key not in rows
            rows[key] = (placed.throughput[row], placed.stage_layers[row].tolist(), placed.stage_counts[row].tolist())
    return rows, {name: statistics[name] for name in COUNTED}


def trimmed(rows):
    """Without the padding of stages that only larger combinations of the same block have."""
    return {
        key: (throughput, [n for n in layers if n], [nodes for nodes in stages if any(nodes)])
        for key, (throughput, layers, stages) in rows.items()
    }


@given(shards(), st.integers(2, 60), st.booleans())
@settings(max_examples=60)
def test_parts_keep_together_exactly_what_one_part_keeps(spec, parts, keep_all):
    whole, statistics = rows_of(spec, keep_all=keep_all)
    together, counted = {}, dict.fromkeys(COUNTED, 0.0)
    for part in range(parts):
        rows, of_part = rows_of(spec, part=part, parts=parts, keep_all=keep_all)
        assert not together.keys() & rows.keys()
        together |= rows
        counted = {name: counted[name] + of_part[name] for name in COUNTED}
    assert trimmed(together) == trimmed(whole)
    assert counted == statistics


@given(shards(), st.integers(1, 30), st.integers(1, 3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_keep_what_one_block_keeps(monkeypatch, spec, block_rows, parts):
    whole, statistics = rows_of(spec, parts=parts)
    with monkeypatch.context() as patch:
        patch.setattr(solve_shard, "BLOCK_ROWS", block_rows)
        blocks, of_blocks = rows_of(spec, parts=parts)
    assert trimmed(blocks) == trimmed(whole)
    assert of_blocks == statistics


@given(shards())
@settings(max_examples=60)
def test_what_is_dropped_is_dominated_by_something_that_stays(spec):
    everything, all_counted = rows_of(spec, keep_all=True)
    kept, counted = rows_of(spec)
    assert kept.items() <= everything.items()
    lost = everything.keys() - kept.keys()
    assert (all_counted["dominated"], counted["dominated"]) == (0, len(lost))
    for nodes in lost:
        assert any(
            throughput >= everything[nodes][0] and all(np.less_equal(fewer, nodes))
            for fewer, (throughput, *_) in kept.items()
        )
    for nodes in kept:
        others = (k for k in everything if k != nodes and all(np.less_equal(k, nodes)))
        assert all(everything[k][0] < kept[nodes][0] for k in others)
    tried = len(combinations(spec.table, n_max=spec.n_max, rho=spec.rho))
    assert tried == counted["combinations"] == len(kept) + sum(counted[n] for n in COUNTED[1:])


def test_random_tables_do_have_dominated_templates_and_idle_nodes():
    """The laws above would hold of nothing, too."""
    found = dict.fromkeys(COUNTED, 0.0)
    for seed in range(20):
        table = whole_table(np.random.default_rng(seed), n_configs=4, layers=5, s_max=3)
        spec = ShardSpec(library="lib", table=table, n_max=3, rho=1e6, method="lattice", ilp_time_limit_s=1.0)
        _, counted = rows_of(spec)
        found = {name: found[name] + counted[name] for name in COUNTED}
    assert found["dominated"] > 10
    assert found["with_idle_nodes"] > 0


def test_a_method_that_answers_for_something_else_is_caught(monkeypatch):
    table = random_table(np.random.default_rng(0), n_configs=2, layers=2, s_max=2)
    spec = ShardSpec(library="lib", table=table, n_max=2, rho=1e6, method="lattice", ilp_time_limit_s=1.0)

    class Reversed(solve_shard.placement_method("lattice").__class__):
        def place(self, table, counts):
            return super().place(table, np.ascontiguousarray(counts[::-1]))

    monkeypatch.setattr(solve_shard, "placement_method", lambda *_, **__: Reversed())
    with pytest.raises(ValueError, match="out of order"):
        list(shard_templates(spec, {}))
