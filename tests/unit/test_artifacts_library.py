from __future__ import annotations

import io
import json
import uuid
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from artifacts.canonical import sha256_hex
from artifacts.index import index_libraries
from artifacts.keys import manifest_key
from artifacts.library import (
    Manifest,
    commit,
    commit_as,
    draft_manifest,
    list_libraries,
    list_versions,
    newest_version,
    open_library,
    read_manifest,
)
from artifacts.shards import (
    ShardKey,
    ShardRecord,
    ShardStatus,
    ShardWriter,
    _sealed,
    failed_shard,
    find_shard,
    read_shard,
    write_shard,
)
from artifacts.store import Store, open_store
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, NoSolutionError, StoreConflictError, StoreError
from tests.fakes.artifact_cases import capacity_table, rows_of, shard_key_of

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def shards_of(store: Store, *, models=("m1", "m2"), phases=(Phase.PREFILL, Phase.DECODE), parts=2) -> list[ShardRecord]:
    return [
        write_shard(
            store,
            "lib",
            shard_key_of(table, part=part, parts=parts),
            rows_of(table, 10, seed=part),
            statistics={"solve_s": 0.5},
        )
        for model in models
        for phase in phases
        for table in [capacity_table(model=model, phase=phase)]
        for part in range(parts)
    ]


def draft_of(shards, **changes) -> Manifest:
    given = {
        "library": "lib",
        "shards": shards,
        "shards_expected": len(shards),
        "created_at": NOW,
        "code_version": "1.2.3",
        "inputs": {"catalog": "abc"},
        "parameters": {"n_max": np.int64(4), "phases": [Phase.DECODE]},
        "statistics": {"solve_s": 1.5},
    }
    return draft_manifest(**{**given, **changes})


def test_a_committed_snapshot_is_read_back(store):
    shards = shards_of(store)
    committed = commit(store, draft_of(shards[::-1]))
    snapshot = open_library(store, "lib")
    assert committed.version == 1
    assert snapshot.manifest == committed == read_manifest(store, "lib", 1)
    assert committed.parameters == {"n_max": 4, "phases": ["decode"]}
    assert (committed.rows, committed.shards_present, committed.shards_failed) == (80, 8, 0)
    assert not committed.partial
    assert committed.failed == ()
    assert snapshot.models == ("m1", "m2")
    # Shards are in the order of their keys, however the build finished them.
    assert commit(store, draft_of(shards)).shards == committed.shards
    table = snapshot.read()
    expected = [
        rows_of(capacity_table(model=model, phase=phase), 10, seed=part)
        for model in ("m1", "m2")
        for phase in (Phase.DECODE, Phase.PREFILL)
        for part in range(2)
    ]
    assert table.equals(pa.concat_tables(expected))


def test_reading_chooses_models_phases_variants_methods_and_columns(store):
    commit(store, draft_of(shards_of(store)))
    snapshot = open_library(store, "lib")
    table = snapshot.read(models=["m1"], phases=[Phase.DECODE], columns=["phase", "model"])
    assert table.column_names == ["phase", "model"]
    assert table.to_pylist() == [{"phase": "decode", "model": "m1"}] * 20
    assert snapshot.read(variants=["fp8"]).num_rows == snapshot.read(methods=["ilp"]).num_rows == 0
    assert snapshot.read(variants=["bf16"], methods=["lattice"]).num_rows == 80
    assert snapshot.read(phases=[Phase.AGGREGATED]).schema == snapshot.read().schema
    with pytest.raises(InputError, match=r"no model 'm3' \(it has m1, m2"):
        snapshot.read(models=["m1", "m3"])
    with pytest.raises(InputError, match="no column 'speed'"):
        snapshot.read(columns=["speed"])


def test_versions_count_up_and_stay(store):
    assert list_libraries(store) == list_versions(store, "lib") == []
    assert newest_version(store, "lib") == 0
    first, second = shards_of(store, models=["m1"]), shards_of(store, models=["m1", "m2"])
    commit(store, draft_of(first))
    commit(store, draft_of(second))
    store.put("libraries/lib/manifests/notes.txt", b"foreign objects are no versions")
    store.put("libraries/unfinished/data/x", b"a build without a commit is no library")
    assert list_libraries(store) == ["lib"]
    assert list_versions(store, "lib") == [1, 2]
    assert open_library(store, "lib").models == ("m1", "m2")
    assert open_library(store, "lib", 1).models == ("m1",)


def test_what_people_leave_beside_the_libraries_is_no_library(store):
    commit(store, draft_of(shards_of(store)))
    for name in ("My Lib", ".Trash-0", "lib~", "ä"):
        store._objects.put(f"libraries/{name}/manifests/00000000000000000001.json", b"{}")
    assert list_libraries(store) == ["lib"]
    assert index_libraries(store, "lib")
    with pytest.raises(InputError, match=r"\(it has lib; build"):
        open_library(store, "other")


@pytest.mark.parametrize("stray", ["99999999999999999999", "99999999999999999998", "00000999999999999999"])
def test_an_absurd_version_stops_nobody(store, stray):
    commit(store, draft_of(shards_of(store)))
    store.put(f"libraries/lib/manifests/{stray}.json", b"{}")
    committed = [commit(store, draft_of(shards_of(store))) for _ in range(3)]
    assert len({manifest.version for manifest in committed}) == 3
    assert open_library(store, "lib").manifest == committed[-1]


def test_a_version_that_the_listing_lacks_is_found(store, monkeypatch):
    for _ in range(3):
        commit(store, draft_of(shards_of(store)))
    whole = Store.list_keys
    monkeypatch.setattr(Store, "list_keys", lambda self, prefix: whole(self, prefix)[:1])
    assert newest_version(store, "lib") == 3


def test_absent_libraries_and_versions_are_named(store):
    commit(store, draft_of(shards_of(store)))
    with pytest.raises(InputError, match=r"libraries/other/manifests: no such library .*it has lib"):
        open_library(store, "other")
    with pytest.raises(InputError, match=r"no version 7 \(it has 1\)"):
        open_library(store, "lib", 7)
    with pytest.raises(InputError, match="is not a version"):
        open_library(store, "lib", 0)
    with pytest.raises(InputError, match="cannot be a name"):
        open_library(store, "../lib")


def test_the_loser_of_a_race_takes_the_next_number(store, monkeypatch):
    draft = draft_of(shards_of(store))
    others = iter(range(2))

    def put_if_absent(self, key, data, whole=Store.put_if_absent):
        # Another writer is quicker, twice.
        if "/manifests/" in key and next(others, None) is not None:
            whole(self, key, b"{}")
        whole(self, key, data)

    monkeypatch.setattr(Store, "put_if_absent", put_if_absent)
    assert commit(store, draft).version == 3
    assert list_versions(store, "lib") == [1, 2, 3]


def test_a_number_that_is_taken_is_a_conflict(store):
    draft = draft_of(shards_of(store))
    assert commit_as(store, draft, 5).version == 5
    assert commit_as(store, draft, 5).version == 5  # the very same manifest: our own write, its answer lost
    with pytest.raises(StoreConflictError):
        commit_as(store, draft_of(shards_of(store)), 5)


def test_endless_conflicts_end(store, monkeypatch):
    draft = draft_of(shards_of(store))

    def refuse(self, key, data):
        raise StoreConflictError("taken", where=key)

    monkeypatch.setattr(Store, "put_once", refuse)
    with pytest.raises(StoreConflictError, match="50 versions in a row"):
        commit(store, draft)


def test_an_unsure_answer_is_no_loss(store, monkeypatch):
    draft = draft_of(shards_of(store))

    def lossy(self, key, data, whole=Store.put_if_absent):
        whole(self, key, data)
        whole(self, key, data)  # what the client does when the first answer got lost

    monkeypatch.setattr(Store, "put_if_absent", lossy)
    assert commit(store, draft).version == 1
    assert list_versions(store, "lib") == [1]


def test_failed_shards_need_consent_and_are_told(store):
    shards = shards_of(store, models=["m1"])
    lost = failed_shard(shard_key_of(capacity_table(model="m9")), error="worker died", attempts=3)
    with pytest.raises(NoSolutionError, match=r"1 of 5 shards failed, first m9 .*: worker died .*allow a partial"):
        draft_of([*shards, lost])
    manifest = commit(store, draft_of([*shards, lost], allow_partial=True))
    snapshot = open_library(store, "lib")
    assert snapshot.manifest == manifest
    assert manifest.partial
    assert manifest.failed == (lost,)
    assert (manifest.shards_expected, manifest.shards_present) == (5, 4)
    assert snapshot.models == ("m1", "m9")
    assert snapshot.read(models=["m9"]).num_rows == 0
    assert failed_shard(lost.shard, error="", attempts=1).error


def test_a_shard_that_is_not_recorded_is_a_bug(store):
    with pytest.raises(ValueError, match="8 are recorded"):
        draft_of(shards_of(store), shards_expected=9)


def test_a_snapshot_without_its_data_is_not_committed(store):
    shards = shards_of(store)
    store.delete(shards[3].key)
    with pytest.raises(StoreError, match="has no bytes"):
        commit(store, draft_of(shards))
    assert list_versions(store, "lib") == []


def test_resume_finds_and_reuses_shards(store):
    table = capacity_table()
    shard, rows = shard_key_of(table), rows_of(table, 30)
    assert find_shard(store, "lib", shard) is None
    record = write_shard(store, "lib", shard, rows, statistics={"solve_s": 2.0}, attempts=2)
    assert find_shard(store, "lib", shard) == record
    # A second build would measure other times; what was stored first stays.
    assert write_shard(store, "lib", shard, rows, statistics={"solve_s": 9.0}) == record
    assert read_shard(store, record).equals(rows)
    assert store.list_keys("libraries/lib/data") == [record.key]
    other = shard.model_copy(update={"inputs_hash": "f" * 64})
    assert find_shard(store, "lib", other) is None


def test_a_shard_deleted_under_the_writer_is_a_conflict(store, monkeypatch):
    table = capacity_table()

    def refuse(self, key, data):
        raise StoreConflictError("an object exists", where=key)

    monkeypatch.setattr(Store, "put_if_absent", refuse)
    with pytest.raises(StoreConflictError):
        write_shard(store, "lib", shard_key_of(table), rows_of(table, 3))


def test_an_empty_shard_is_a_shard(store):
    table = capacity_table()
    record = write_shard(store, "lib", shard_key_of(table), rows_of(table, 0))
    assert record.rows == 0
    commit(store, draft_of([record]))
    assert open_library(store, "lib").read().num_rows == 0


def test_rows_of_another_shard_are_refused(store):
    table = capacity_table()
    for change in ({"model": "other"}, {"phase": Phase.PREFILL}, {"ttft_s": 9.0}, {"method": "ilp"}):
        shard = shard_key_of(table).model_copy(update=change)
        with pytest.raises(ValueError, match="rows of"):
            write_shard(store, "lib", shard, rows_of(table, 3))
    with pytest.raises(StoreError, match="not a table of templates"):
        write_shard(store, "lib", shard_key_of(table), rows_of(table, 3).select(["model"]))


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
    with pytest.raises(StoreError, match=r"damaged or replaced: .*\(build the library again"):
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


def test_shard_keys_and_records_refuse_nonsense():
    table = capacity_table()
    good = shard_key_of(table)
    for change in (
        {"ttft_s": 0.0},
        {"tpot_s": float("nan")},
        {"part": -1},
        {"parts": 0},
        {"phase": "both"},
        {"odd": 1},
    ):
        with pytest.raises(ValidationError):
            ShardKey(**{**good.model_dump(), **change})
    with pytest.raises(InputError, match="part 1 of 1"):
        good.model_copy(update={"part": 1}).key("lib")
    with pytest.raises(InputError, match="cannot be a name"):
        good.model_copy(update={"model": "meta/llama"}).key("lib")
    with pytest.raises(InputError, match="not a hash"):
        good.model_copy(update={"inputs_hash": "nope"}).key("lib")
    with pytest.raises(ValidationError, match="a present shard"):
        ShardRecord(shard=good, status=ShardStatus.PRESENT, attempts=1)
