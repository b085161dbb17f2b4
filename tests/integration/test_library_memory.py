"""A library far larger than the memory it may take, written and read a piece at a time, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHARDS, PIECES, PIECE_ROWS = 8, 8, 20_000
ROWS = SHARDS * PIECES * PIECE_ROWS
MIB = 2**20
BOUND_BYTES = 100 * MIB

SCRIPT = f"""
import json, os, sys
import numpy as np
import pyarrow as pa
from artifacts.library import commit, open_library
from artifacts.shards import ShardWriter
from artifacts.store import open_store
from tasks.peak_memory import PeakMemory, tree_bytes
from tests.fakes.artifact_cases import capacity_table, draft_of, rows_of, shard_key_of

pa.set_memory_pool(pa.system_memory_pool())
mode, url = sys.argv[1:]
store, capacity = open_store(url), capacity_table()
column = "throughput_tokens_per_s"
base = rows_of(capacity, 40)
at = base.schema.get_field_index(column)

def piece(seed):
    rows = pa.concat_tables([base] * ({PIECE_ROWS} // 40)).combine_chunks()
    values = np.random.default_rng(seed).uniform(1, 2, len(rows))
    return rows.set_column(at, rows.schema.field(column), pa.array(values))

def write():
    records = []
    for part in range({SHARDS}):
        writer = ShardWriter(shard_key_of(capacity, part=part, parts={SHARDS}))
        for number in range({PIECES}):
            writer.add(piece(part * {PIECES} + number))
        records.append(writer.store(store, "lib"))
    return commit(store, draft_of(records)).rows

def stream():
    seen = 0
    for record, table in open_library(store, "lib").tables():
        assert record.shard.model == "m"
        seen += table.num_rows
    return seen

def whole():
    return open_library(store, "lib").read().num_rows

piece_bytes = piece(0).nbytes
before = tree_bytes(os.getpid())
with PeakMemory() as memory:
    rows = globals()[mode]()
print(json.dumps({{"rows": rows, "taken": memory.peak_bytes - before, "size": piece_bytes * {SHARDS * PIECES}}}))
"""


@pytest.mark.servers
def test_memory_stays_bounded_however_large_the_library_is(tmp_path):
    def run(mode: str) -> dict[str, int]:
        command = [sys.executable, "-c", SCRIPT, mode, (tmp_path / "store").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        return json.loads(done.stdout)

    written, streamed, whole = run("write"), run("stream"), run("whole")
    assert written["rows"] == streamed["rows"] == whole["rows"] == ROWS
    assert written["size"] > 3 * BOUND_BYTES
    assert written["taken"] < BOUND_BYTES, written
    assert streamed["taken"] < BOUND_BYTES, streamed
    # What makes the bound one: all of it at once does not fit.
    assert whole["taken"] > 2 * BOUND_BYTES, whole
