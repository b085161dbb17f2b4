"""Damaged, foreign and missing objects: never read as what they are not, and built anew."""

from __future__ import annotations

import io
import json
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.browse import describe
from artifacts.canonical import sha256_hex
from artifacts.index import index_libraries
from artifacts.keys import manifest_key
from artifacts.library import commit, open_library
from artifacts.shards import ShardRecord, ShardWriter, _sealed, find_shard, read_shard, write_shard
from artifacts.store import Store, open_store
from coral_core.cli.library import list_all
from coral_core.domain.workload import Phase
from coral_core.errors import StoreError
from tests.fakes.artifact_cases import capacity_table, draft_of, rows_of, shard_key_of, shards_of


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def damage(data: bytes, how: str) -> bytes:
    match how:
        case "truncated":
            return data[: len(data) // 2]
        case "empty":
            return b""
        case "flipped":
            middle = len(data) // 3
            return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        case "foreign Parquet":
            sink = io.BytesIO()
            pq.write_table(pa.table({"a": [1]}), sink)
            return sink.getvalue()
    raise AssertionError(how)


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "foreign Parquet"])
def test_damaged_data_is_never_read(store, how):
    shards = shards_of(store)
    commit(store, draft_of(shards))
    key = shards[2].key
    store.put(key, damage(store.get(key), how))
    snapshot = open_library(store, "lib")
    with pytest.raises(StoreError, match=f"{key}: "):
        snapshot.read()
    with pytest.raises(StoreError, match=f"{key}: "):
        snapshot.read(columns=["model"])
    assert find_shard(store, "lib", shards[2].shard) is None


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "foreign Parquet"])
def test_a_damaged_shard_is_written_anew_beside_what_older_manifests_name(store, how, caplog):
    shards = shards_of(store, models=["m1"])
    commit(store, draft_of(shards))
    key = shards[2].key
    damaged = damage(store.get(key), how)
    store.put(key, damaged)
    again = shards_of(store, models=["m1"])
    healed = again[2]
    assert again[:2] + again[3:] == shards[:2] + shards[3:]
    assert healed.key == key.replace(".parquet", "-repair1.parquet")
    assert (healed.rows, healed.statistics) == (shards[2].rows, {"solve_s": 0.5, "damaged_files": 1})
    assert store.get(key) == damaged
    (line,) = caplog.messages
    assert key in line
    assert healed.key in line
    # It stays healed, and is what resume finds.
    assert find_shard(store, "lib", healed.shard) == healed == shards_of(store, models=["m1"])[2]
    commit(store, draft_of(again))
    assert open_library(store, "lib").read().num_rows == 40
    with pytest.raises(StoreError, match=r"damaged: .*\(build the library again"):
        open_library(store, "lib", 1).read()


def test_two_writers_that_repair_at_once_end_with_one_file(store, monkeypatch):
    table = capacity_table()
    shard, rows = shard_key_of(table), rows_of(table, 3)
    store.put(write_shard(store, "lib", shard, rows).key, b"")
    records = []

    def overtaken(self, key, data, whole=Store.put_if_absent):
        monkeypatch.setattr(Store, "put_if_absent", whole)
        records.append(write_shard(store, "lib", shard, rows, statistics={"solve_s": 7.0}))
        whole(self, key, data)

    monkeypatch.setattr(Store, "put_if_absent", overtaken)
    records.append(write_shard(store, "lib", shard, rows, statistics={"solve_s": 8.0}))
    assert records[0] == records[1]
    assert read_shard(store, records[0]).equals(rows)
    assert len(store.list_keys("libraries/lib/data")) == 2


def test_a_store_that_damages_whatever_it_gets_is_told(store, monkeypatch):
    table = capacity_table()
    shard, rows = shard_key_of(table), rows_of(table, 3)
    for _ in range(10):
        store.put(write_shard(store, "lib", shard, rows).key, b"zeros")
    for call in (lambda: find_shard(store, "lib", shard), lambda: write_shard(store, "lib", shard, rows)):
        with pytest.raises(StoreError, match=r"all 10 data files of m bf16 .* are damaged.*\(check the storage"):
            call()


def test_no_flipped_bit_is_ever_accepted(store):
    """Not one of the bits that only the file's readers mind, either: headers, statistics, what it says of its making."""
    table = capacity_table()
    shard, pieces = shard_key_of(table), [rows_of(table, n, seed=n) for n in (5, 9)]
    writer = ShardWriter(shard)
    for piece in pieces:
        writer.add(piece)
    record = writer.store(store, "lib", statistics={"solve_s": 1.0})
    whole = store.get(record.key)
    assert pq.ParquetFile(io.BytesIO(whole), page_checksum_verification=True).read().num_rows == 14
    rng = np.random.default_rng(2)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    pages, end = rng.integers(0, footer * 8, 200), rng.integers(footer * 8, len(whole) * 8, 200)
    for bit in [*pages.tolist(), *end.tolist(), *range(len(whole) * 8 - 64, len(whole) * 8)]:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        store.put(record.key, bytes(changed))
        assert find_shard(store, "lib", shard) is None
        with pytest.raises(StoreError, match="damaged"):
            read_shard(store, record)
    for size in rng.integers(0, len(whole), 50).tolist():
        store.put(record.key, whole[:size])
        assert find_shard(store, "lib", shard) is None
    store.put(record.key, whole)
    assert find_shard(store, "lib", shard) == record


def test_missing_data_is_told(store):
    shards = shards_of(store)
    commit(store, draft_of(shards))
    store.delete(shards[0].key)
    with pytest.raises(StoreError, match="a data file of the library is missing"):
        open_library(store, "lib").read()


def test_a_shard_under_a_foreign_name_is_told(store):
    shards = shards_of(store)
    store.put(shards[0].key, store.get(shards[1].key))
    assert find_shard(store, "lib", shards[0].shard) is None
    swapped = shards[1].model_copy(update={"shard": shards[0].shard})
    with pytest.raises(StoreError, match=r"holds 10 rows of .*, not 10 of"):
        read_shard(store, swapped)


def rewritten(store: Store, record: ShardRecord, *, rows: pa.Table | None = None, **changes) -> ShardRecord:
    """Replace a shard's file by one, sealed, that says other things of itself or holds other rows; its own record."""
    file = pq.ParquetFile(io.BytesIO(store.get(record.key)))
    table = file.read()
    metadata = {**json.loads(file.metadata.metadata[b"coral.shard"]), **changes}
    sink = io.BytesIO()
    new = table if rows is None else rows
    seal = {b"coral.seal": file.metadata.metadata[b"coral.seal"]}
    pq.write_table(new.replace_schema_metadata({b"coral.shard": json.dumps(metadata), **seal}), sink)
    data = _sealed(sink.getvalue())
    store.put(record.key, data)
    return record.model_copy(update={"bytes": len(data), "sha256": sha256_hex(data)})


def test_files_that_are_of_another_version_or_lie_about_themselves_are_not_used(store):
    (record, *_) = shards_of(store)
    table = capacity_table(model="m1", phase=Phase.PREFILL)
    assert read_shard(store, rewritten(store, record)).num_rows == 10
    assert find_shard(store, "lib", record.shard) is not None
    for changes, message in (
        ({"schema_version": 99}, "schema version 99"),
        ({"schema_version": 1, "rows": rows_of(table, 4)}, "4 of 10 rows"),
        ({"rows": rows_of(table, 10).drop_columns(["proven"])}, "differs in proven"),
        ({"extra": "field"}, "not a shard of a library"),
    ):
        changed = rewritten(store, record, **changes)
        assert find_shard(store, "lib", record.shard) is None
        with pytest.raises(StoreError, match=message):
            read_shard(store, changed)
        store.delete(record.key)
        assert shards_of(store)[0].key == record.key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {**m, "schema_version": 2}, "newer coral"),
        (lambda m: {**m, "schema_version": "1"}, "schema_version"),
        (lambda m: {**m, "surprise": 1}, "surprise: Extra inputs"),
        (lambda m: {k: v for k, v in m.items() if k != "rows"}, "rows: Field required"),
        (lambda m: {**m, "rows": 81}, "but states"),
        (lambda m: {**m, "rows": "80"}, "rows: "),
        (lambda m: {**m, "created_at": "2030-01-02T03:04:05"}, "created_at: "),
        (lambda m: {**m, "version": 4}, "is of library lib version 4"),
        (lambda m: {**m, "library": "other"}, "is of library other"),
        (lambda m: {**m, "shards": m["shards"][:-1] + m["shards"][:1]}, "names a data file twice"),
        (lambda m: {**m, "shards": [{**m["shards"][0], "status": "failed"}, *m["shards"][1:]]}, "a failed shard has"),
        (lambda m: {**m, "shards": [{**m["shards"][0], "sha256": ""}, *m["shards"][1:]]}, "a present shard has"),
        (lambda m: [m], "not a JSON object"),
    ],
)
def test_manifests_are_read_strictly(store, change, message):
    commit(store, draft_of(shards_of(store)))
    key = manifest_key("lib", 1)
    store.put(key, json.dumps(change(json.loads(store.get(key)))).encode())
    with pytest.raises(StoreError, match=message) as told:
        open_library(store, "lib")
    assert key in str(told.value)


def test_a_truncated_manifest_is_told(store):
    commit(store, draft_of(shards_of(store)))
    key = manifest_key("lib", 1)
    store.put(key, store.get(key)[:-5])
    with pytest.raises(StoreError, match="not valid JSON"):
        open_library(store, "lib")


@pytest.mark.parametrize("data", [b'{"a":' * 100_000, b"[" * 100_000])
def test_nesting_without_end_is_damage_and_no_crash(store, data):
    store.put("plans/blue/deep.json", data)
    with pytest.raises(StoreError, match="not valid JSON"):
        describe(store, "plans/blue/deep.json")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff"])
def test_a_damaged_newest_manifest_leaves_the_others_and_says_what_to_do(store, data):
    commit(store, draft_of(shards_of(store)))
    commit(store, draft_of(shards_of(store)))
    store.put(manifest_key("lib", 2), data)
    with pytest.raises(StoreError, match=r"remove this object, .*or name an older version \(--library-version"):
        open_library(store, "lib")
    assert open_library(store, "lib", 1).read().num_rows == 80
    assert index_libraries(store, "lib")
    page = store.get("libraries/lib/index.md").decode()
    assert "| [2](manifests/00000000000000000002.json) |  |  |  | damaged |" in page
    assert "| 80 | 8 | whole |" in page
    # What it says helps; and so does a new build, which does not need it.
    assert commit(store, draft_of(shards_of(store))).version == 3
    assert open_library(store, "lib").manifest.version == 3
    store.delete(manifest_key("lib", 2))
    store.delete(manifest_key("lib", 3))
    assert open_library(store, "lib").manifest.version == 1


def test_the_list_shows_the_others_beside_a_damaged_library(store, capsys):
    commit(store, draft_of(shards_of(store)))
    commit(store, draft_of(shards_of(store), library="other"))
    store.put(manifest_key("other", 1), b"{")
    assert list_all(store=store.url, as_json=True) == StoreError.exit_code
    told = capsys.readouterr()
    assert [row["library"] for row in json.loads(told.out)] == ["lib"]
    assert f"library other: {store.url}/libraries/other/manifests/" in told.err
    assert list_all(store=store.url) == StoreError.exit_code
    assert "lib" in capsys.readouterr().out
    store.delete(manifest_key("other", 1))
    assert list_all(store=store.url, as_json=True) == 0
