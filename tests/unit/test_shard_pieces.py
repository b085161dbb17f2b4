"""A shard's data file written piece by piece is the file of all its rows, and is checked piece by piece."""

from __future__ import annotations

import io
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.shards import ShardWriter, find_shard, read_shard
from artifacts.store import Store, open_store
from coral_core.errors import StoreError
from tests.fakes.artifact_cases import capacity_table, rows_of, shard_key_of


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def pieces():
    table = capacity_table()
    return shard_key_of(table), [rows_of(table, n, seed=n) for n in (5, 0, 7)]


def written(store, shard, tables):
    writer = ShardWriter(shard)
    for table in tables:
        writer.add(table)
    return writer.store(store, "lib", statistics={"solve_s": 1.0})


def test_pieces_are_read_as_one_and_lie_in_row_groups_of_their_own(store):
    shard, tables = pieces()
    record = written(store, shard, tables)
    assert record.rows == 12
    assert read_shard(store, record).equals(pa.concat_tables(tables))
    assert read_shard(store, record, columns=["n_nodes"]).num_rows == 12
    assert find_shard(store, "lib", shard) == record
    file = pq.ParquetFile(io.BytesIO(store.get(record.key)))
    assert {file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)} >= {5, 7}


def test_a_shard_of_no_piece_at_all_is_a_shard(store):
    shard, _ = pieces()
    record = written(store, shard, [])
    assert (record.rows, read_shard(store, record).num_rows) == (0, 0)
    assert find_shard(store, "lib", shard) == record


def test_a_stranger_in_a_later_piece_is_refused(store):
    shard, tables = pieces()
    with pytest.raises(ValueError, match="rows of model=other"):
        written(store, shard, [*tables, rows_of(capacity_table(model="other"), 2)])


def test_a_later_piece_that_was_overwritten_is_told(store):
    """The footer is whole and the first row group too: only the hash of all of it shows the damage."""
    shard, tables = pieces()
    record = written(store, shard, tables)
    data = bytearray(store.get(record.key))
    last = pq.ParquetFile(io.BytesIO(bytes(data))).metadata.row_group(2)
    start = last.column(0).dictionary_page_offset or last.column(0).data_page_offset
    data[start : start + 40] = bytes(40)
    store.put(record.key, bytes(data))
    assert find_shard(store, "lib", shard) is None
    with pytest.raises(StoreError, match="damaged"):
        read_shard(store, record)
