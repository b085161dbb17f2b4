from __future__ import annotations

import uuid

import pyarrow as pa
import pytest
from pydantic import ValidationError

from artifacts.index import index_libraries
from artifacts.library import (
    commit,
    commit_as,
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
    failed_shard,
    find_shard,
    read_shard,
    write_shard,
)
from artifacts.store import Store, open_store
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, NoSolutionError, StoreConflictError, StoreError
from tests.fakes.artifact_cases import capacity_table, draft_of, rows_of, shard_key_of, shards_of


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


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


def test_a_library_is_read_a_piece_at_a_time(store):
    commit(store, draft_of(shards_of(store)))
    snapshot = open_library(store, "lib")
    pieces = list(snapshot.tables(models=["m2"], columns=["model", "phase"]))
    assert {record.shard.model for record, _ in pieces} == {"m2"}
    assert pa.concat_tables([table for _, table in pieces]).equals(
        snapshot.read(models=["m2"], columns=["model", "phase"])
    )
    assert list(snapshot.tables(methods=["ilp"])) == []
    with pytest.raises(InputError, match="no model 'm3'"):
        snapshot.tables(models=["m3"])
    store.delete(snapshot.manifest.present[2].key)
    stream = snapshot.tables()
    assert sum(next(stream)[1].num_rows + next(stream)[1].num_rows for _ in range(2)) == 20
    with pytest.raises(StoreError, match="a data file of the library is missing"):
        next(stream)
