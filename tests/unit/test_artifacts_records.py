"""Keys, canonical JSON, plan records and index pages."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, date, datetime, timedelta
from pathlib import PurePosixPath

import numpy as np
import pytest

from artifacts import keys
from artifacts.canonical import canonical_json, parsed_object, sha256_hex
from artifacts.diff import diff_libraries
from artifacts.index import index_libraries, index_plans
from artifacts.library import commit, draft_manifest, open_library
from artifacts.plans import DECISION, PAGE, PLAN, REPORT, list_fleets, list_plans, read_plan, write_plan
from artifacts.shards import failed_shard, write_shard
from artifacts.store import Store, open_store
from coral_core.domain.allocation import InstanceCount
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError, StoreConflictError, StoreError
from tests.fakes.artifact_cases import capacity_table, rows_of, shard_key_of

NOW = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
PLAN_DICT = {
    "scenario": "tiny",
    "status": "optimal",
    "cost_usd_per_h": np.float64(0.1) + 0.2,
    "churn_usd_per_h": 0,
    "objective_usd_per_h": 0.3,
    "instances": [{"template": "t", "region": "r", "count": np.int64(2)}],
    "shortfall": [{"model": "m", "phase": "decode", "frac": 0.25, "tokens_per_s": 1e-5}],
    "more": [1e22, -0.0, 2**60, "é\u2028"],
}
DECISION_DICT = {"explanation": {"limits": []}, "library": {"name": "lib", "version": 1}, "bound_usd_per_h": 0.3}


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def test_keys_are_laid_out_as_designed():
    slo = Slo(ttft_s=1, tpot_s=0.05)
    assert keys.profile_group("m", "g6.xlarge", "vllm-0.32.0") == "profiles/m/g6.xlarge/vllm-0.32.0"
    assert keys.shard_key(
        "lib",
        model="m",
        variant="fp8",
        phase=Phase.DECODE,
        slo=slo,
        method="ilp",
        part=2,
        parts=10,
        inputs_hash="ab" * 32,
    ) == (
        "libraries/lib/data/model=m/phase=decode/slo=ttft1.0s-tpot0.05s/"
        f"part-fp8-ilp-00002-of-00010-{'ab' * 16}.parquet"
    )
    assert keys.manifest_key("lib", 12) == "libraries/lib/manifests/00000000000000000012.json"
    assert keys.plan_group("f", NOW) == "plans/f/20300102T030405.000678Z"
    assert keys.evaluation_group("paper-core", NOW) == "evaluations/paper-core/20300102T030405.000678Z"
    assert keys.lease_key("fleet", 3) == "leases/fleet/00000000000000000003.json"
    assert keys.index_key("plans/f") == "plans/f/index.md"


@pytest.mark.parametrize(
    ("key", "version"),
    [
        (keys.manifest_key("lib", 7), 7),
        ("m/00000000000000000007.json.tmp", None),
        ("m/00000000000000000000.json", None),
        ("m/7.json", None),
        ("m/0000000000000000000x.json", None),
        ("m/00000000000000000007", None),
        ("m/99999999999999999999.json", None),
        ("m/00000999999999999999.json", 10**15 - 1),
        ("m/00001000000000000000.json", None),
    ],
)
def test_only_manifests_have_versions(key, version):
    assert keys.manifest_version(key) == version


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "-a", "ä", "a" * 129, "a=b", "a\n"])
def test_names_that_cannot_be_keys(name):
    with pytest.raises(InputError, match=r"fleet: .*cannot be a name in the store"):
        keys.checked_name(name, "fleet")


def test_other_parts_of_keys_are_checked():
    with pytest.raises(InputError, match=r"slo\.ttft_s"):
        keys.slo_text(Slo(ttft_s=float("nan"), tpot_s=1.0))
    with pytest.raises(InputError, match=r"slo\.tpot_s"):
        keys.slo_text(Slo(ttft_s=1.0, tpot_s=0.0))
    with pytest.raises(InputError, match="no time zone"):
        keys.time_text(NOW.replace(tzinfo=None))
    with pytest.raises(InputError, match="not a time of the store"):
        keys.parse_time("2030-01-02")
    with pytest.raises(InputError, match="not an epoch"):
        keys.lease_key("fleet", -1)


def test_what_json_can_hold():
    instance = InstanceCount(template="t", region="r", count=1)
    value = {
        "z": (1, 2.5, None, True),
        Phase.DECODE: instance,
        "array": np.array([[1, 2]]),
        "number": np.float32(0.5),
        "path": PurePosixPath("a/b"),
        "day": date(2030, 1, 2),
        "time": NOW,
        "text": "é",
    }
    assert canonical_json(value).decode() == (
        '{"array":[[1,2]],"day":"2030-01-02","decode":{"count":1,"region":"r","template":"t"},"number":0.5,'
        '"path":"a/b","text":"é","time":"2030-01-02T03:04:05.000678+00:00","z":[1,2.5,null,true]}'
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{"b": float("nan")}]}, r"^a\[0\]\.b: nan cannot be stored"),
        ({"a": np.array([1.0, np.inf])}, r"^a\[1\]: inf"),
        ({"a": {1: 2}}, "^a: key 1 is not text"),
        ({"a": {1, 2}}, "^a: a set cannot be stored"),
        (b"x", "^value: a bytes"),
        ({"a": InstanceCount}, "^a: a type cannot"),
        (float("-inf"), "^value: -inf"),
    ],
)
def test_what_json_cannot_hold_is_named(value, message):
    with pytest.raises(InputError, match=message):
        canonical_json(value)


def test_only_objects_are_parsed():
    assert parsed_object(b'{"a":1}', where="x") == {"a": 1}
    for data in (b"", b"[1]", b"\xff"):
        with pytest.raises(StoreError, match=r"^x: not"):
            parsed_object(data, where="x")


def test_a_plan_may_have_a_page(store):
    content = {"plan": PLAN_DICT, "decision": DECISION_DICT, "report_md": "r"}
    record = write_plan(store, "prod", NOW, **content, report_html="<p>")
    assert store.get(record.keys[PAGE]) == b"<p>"
    write_plan(store, "prod", NOW + timedelta(minutes=1), **content)
    assert PAGE not in read_plan(store, "prod").record.urls
    assert read_plan(store, "prod", NOW).record == record
    index_plans(store, "prod")
    newest, oldest = store.get("plans/prod/index.md").decode().splitlines()[-2:]
    assert "report.html" in oldest
    assert "report.html" not in newest
    assert "report.md" in newest


def test_a_plan_is_read_back_exactly(store):
    record = write_plan(store, "prod", NOW, plan=PLAN_DICT, decision=DECISION_DICT, report_md="# Résumé\n")
    stored = read_plan(store, "prod")
    assert stored == read_plan(store, "prod", NOW)
    assert stored.record == record
    assert stored.plan == PLAN_DICT
    assert stored.plan["cost_usd_per_h"] == 0.1 + 0.2
    assert stored.decision == DECISION_DICT
    assert stored.report_md == "# Résumé\n"
    assert record.keys[PLAN] == "plans/prod/20300102T030405.000678Z/plan.json"
    assert record.urls[REPORT] == f"{store.url}/plans/prod/20300102T030405.000678Z/report.md"
    assert set(record.sha256) == {PLAN, DECISION, REPORT}
    # The same content has the same hashes elsewhere: that is what a replay is compared by.
    elsewhere = open_store(f"memory://{uuid.uuid4().hex}")
    again = write_plan(
        elsewhere, "prod", NOW, plan=dict(reversed(PLAN_DICT.items())), decision=DECISION_DICT, report_md="# Résumé\n"
    )
    assert again.sha256 == record.sha256


def test_repeating_a_write_is_harmless_and_another_plan_is_a_conflict(store):
    for _ in range(2):
        write_plan(store, "prod", NOW, plan=PLAN_DICT, decision=DECISION_DICT, report_md="r")
    with pytest.raises(StoreConflictError):
        write_plan(store, "prod", NOW, plan={**PLAN_DICT, "later": 1}, decision=DECISION_DICT, report_md="r")
    assert "later" not in read_plan(store, "prod").plan


def test_a_plan_that_was_not_finished_is_none(store, monkeypatch):
    write_plan(store, "prod", NOW, plan=PLAN_DICT, decision=DECISION_DICT, report_md="old")
    later = NOW + timedelta(minutes=10)

    def die(self, key, data, whole=Store.put_once):
        if key.endswith(PLAN):
            raise StoreError("killed here", where=key)
        whole(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_once", die)
        with pytest.raises(StoreError):
            write_plan(store, "prod", later, plan=PLAN_DICT, decision=DECISION_DICT, report_md="new")
    assert store.exists(f"{keys.plan_group('prod', later)}/{REPORT}")
    assert list_plans(store, "prod") == [NOW]
    assert read_plan(store, "prod").report_md == "old"
    write_plan(store, "prod", later, plan=PLAN_DICT, decision=DECISION_DICT, report_md="new")
    assert list_plans(store, "prod") == [NOW, later]
    assert read_plan(store, "prod").report_md == "new"


def test_what_people_leave_beside_the_plans_is_no_plan(store):
    write_plan(store, "prod", NOW, plan=PLAN_DICT, decision=DECISION_DICT, report_md="r")
    whole = store.get(f"{keys.plan_group('prod', NOW)}/{PLAN}")
    own = keys.time_text(NOW)
    for folder in ("backup", f"old/{own}", f"{own} (copy)", "20300102T030405.6Z", f"{own}.bak"):
        store._objects.put(f"plans/prod/{folder}/{PLAN}", whole)
    for path in (f"plans/prod/{PLAN}", "plans/My Fleet/x", "plans/.Trash-0/x"):
        store._objects.put(path, whole)
    assert list_plans(store, "prod") == [NOW]
    assert read_plan(store, "prod").record.time == NOW
    assert list_fleets(store) == ["prod"]
    assert index_plans(store, "prod")


def test_nothing_unstorable_is_half_written(store):
    with pytest.raises(InputError, match="cost"):
        write_plan(store, "prod", NOW, plan={"cost": float("nan")}, decision=DECISION_DICT, report_md="r")
    for part, lacking in (("plan", "instances"), ("plan", "shortfall"), ("decision", "library")):
        content = {"plan": PLAN_DICT, "decision": DECISION_DICT}
        content[part] = {key: value for key, value in content[part].items() if key != lacking}
        with pytest.raises(InputError, match=f"^{part}: {lacking}: Field required"):
            write_plan(store, "prod", NOW, **content, report_md="r")
    assert store.list_keys("") == []


def test_absent_and_damaged_plans_are_told(store):
    with pytest.raises(InputError, match="the fleet has no plan"):
        read_plan(store, "prod")
    with pytest.raises(InputError, match="has no plan of 2030"):
        read_plan(store, "prod", NOW)
    record = write_plan(store, "prod", NOW, plan=PLAN_DICT, decision=DECISION_DICT, report_md="r")
    whole = {name: store.get(key) for name, key in record.keys.items()}
    damages = [
        (REPORT, b"other", r"report\.md: is not what its plan\.json names"),
        (DECISION, whole[DECISION][:-1], "is not what its plan"),
        (PLAN, whole[PLAN][:-1], "not valid JSON"),
        (PLAN, b"{}", "schema version None, not 2"),
        (PLAN, b'{"schema_version":2}', "fleet: Field required"),
        (PLAN, whole[PLAN].replace(b'"count":2', b'"count":3'), "not the one that was recorded"),
        (PLAN, whole[PLAN].replace(b'"region":"r"', b'"region":"q"'), "not the one that was recorded"),
        (PLAN, whole[PLAN].replace(b'"instances"', b'"instance"'), "not the one that was recorded"),
        (PLAN, whole[PLAN].replace(b'"fleet":"prod"', b'"fleet":"test"'), "is not the plan of prod"),
        (PLAN, whole[PLAN].replace(b'"schema_version":2', b'"schema_version":1'), "schema version 1, not 2"),
    ]
    for name, data, message in damages:
        assert data != whole[name]
        store.put(record.keys[name], data)
        with pytest.raises(StoreError, match=message):
            read_plan(store, "prod")
        store.put(record.keys[name], whole[name])
    # Hashes that somebody made to fit do not make it a plan that callers can read.
    for lacking in ("instances", "scenario"):
        part = {key: value for key, value in PLAN_DICT.items() if key != lacking}
        forged = {**json.loads(whole[PLAN]), "plan": part, "plan_sha256": sha256_hex(canonical_json(part))}
        store.put(record.keys[PLAN], canonical_json(forged))
        with pytest.raises(StoreError, match=rf"plan\.json: {lacking}: Field required"):
            read_plan(store, "prod")
    store.put(record.keys[PLAN], whole[PLAN])
    store.delete(record.keys[REPORT])
    with pytest.raises(StoreError, match="no such object"):
        read_plan(store, "prod")


def snapshot_of(store: Store, rows: int, *, lost: bool = False):
    table = capacity_table()
    shards = [write_shard(store, "lib", shard_key_of(table, seed=rows), rows_of(table, rows))]
    if lost:
        shards.append(failed_shard(shard_key_of(capacity_table(model="m2")), error="died", attempts=3))
    draft = draft_manifest(
        library="lib",
        shards=shards,
        shards_expected=len(shards),
        created_at=NOW,
        code_version="1",
        inputs={},
        parameters={},
        allow_partial=lost,
    )
    return commit(store, draft)


def test_snapshots_differ_by_what_was_built(store):
    snapshot_of(store, 10)
    snapshot_of(store, 15)
    diff = diff_libraries(open_library(store, "lib", 1), open_library(store, "lib", 2))
    ours, theirs = (
        dict(
            zip(
                *(
                    open_library(store, "lib", v).read()[c].to_pylist()
                    for c in ("template_id", "throughput_tokens_per_s")
                ),
                strict=True,
            )
        )
        for v in (1, 2)
    )
    assert set(diff.added["template_id"].to_pylist()) == theirs.keys() - ours.keys()
    (row,) = diff.summary()
    assert (row.model, row.phase, row.added, row.removed) == ("m", "decode", len(diff.added), len(diff.removed))
    assert row.added > 0


def test_index_pages_say_what_lies_there(store):
    snapshot_of(store, 10)
    snapshot_of(store, 12, lost=True)
    assert index_libraries(store, "lib")
    page = store.get("libraries/lib/index.md").decode()
    assert (
        "| [2](manifests/00000000000000000002.json) | 20300102T030405.000678Z | 12 | 1 | partial: 1 shards failed |"
        in page
    )
    assert "| 10 | 1 | whole |" in page
    assert "[lib](lib/index.md) | 2 |" in store.get("libraries/index.md").decode()
    assert "libraries/index.md" in store.get("index.md").decode()
    for minutes in range(22):
        write_plan(
            store, "prod", NOW + timedelta(minutes=minutes), plan=PLAN_DICT, decision=DECISION_DICT, report_md="r"
        )
    assert index_plans(store, "prod")
    assert list_fleets(store) == ["prod"]
    page = store.get("plans/prod/index.md").decode()
    assert page.count("[report.md]") == 20
    assert "The newest 20 of 22 plans" in page
    # Pages are no records: nothing that is read counts them.
    assert len(list_plans(store, "prod")) == 22
    assert open_library(store, "lib").manifest.version == 2


def test_an_index_that_cannot_be_written_stops_nobody(store, monkeypatch, caplog):
    snapshot_of(store, 3)

    def refuse(self, key, data):
        raise StoreError("permission denied", where=key)

    monkeypatch.setattr(Store, "put", refuse)
    assert not index_libraries(store, "lib")
    assert "index pages were not written: libraries/index.md: permission denied" in caplog.text
