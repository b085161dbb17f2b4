"""`coral library gc` and `coral artifacts gc` through the real command: what goes, what stays and why, and dry runs."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from artifacts.keys import manifest_key, plan_group, time_text
from artifacts.library import commit, list_versions, open_library, read_manifest
from artifacts.plans import list_plans, write_plan
from artifacts.retention import Rule, plan_removal, remove_unneeded
from artifacts.shards import moved_shard
from artifacts.store import Store, open_store
from coral_core.cli.entry import run
from coral_core.clock import ManualClock
from coral_core.errors import InputError, StoreConflictError, StoreError
from tests.fakes.artifact_cases import draft_of, shards_of

NOW = datetime.now(UTC)
PLAN = {
    "scenario": "s",
    "status": "optimal",
    "cost_usd_per_h": 1.0,
    "churn_usd_per_h": 0.0,
    "objective_usd_per_h": 1.0,
    "instances": [],
    "shortfall": [],
}


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def store(folder, monkeypatch) -> Store:
    monkeypatch.setenv("CORAL_STORE", folder.as_uri())
    return open_store(folder.as_uri())


@pytest.fixture
def coral(capsys):
    def call(*arguments: str):
        code = run([*arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def age(folder: Path, days: float) -> None:
    """Make all that is there as old as this."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - days * 86400,) * 2)


def three_versions(store: Store, folder: Path) -> None:
    """Versions of m1, of m1 and m2, and of m2, the first two replaced 40 days ago."""
    for models in (["m1"], ["m1", "m2"], ["m2"]):
        commit(store, draft_of(shards_of(store, models=models)))
    age(folder, 40)


def record_plan(store: Store, when: datetime, *, version: int = 1, fleet: str = "blue", **files: object) -> str:
    decision = {"library": {"name": "lib", "version": version}, "explanation": {}}
    write_plan(store, fleet, when, plan=PLAN, decision=decision, report_md="r")
    for name, content in files.items():
        store.put(f"{plan_group(fleet, when)}/{name}.json", json.dumps(content).encode())
    return time_text(when)


def test_a_dry_run_says_what_would_go_and_removes_nothing(store, folder, coral):
    three_versions(store, folder)
    before = store.list_keys("")
    code, out, err = coral("library", "gc", "lib", "--keep", "1", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["removed"], found["versions"]) == (False, [1, 2])
    assert len(found["files"]) == 4  # those of m1
    assert found["size_bytes"] == sum(store.size_bytes(key) for key in found["files"])
    assert found["kept"] == [{"version": 3, "reason": "newest"}]
    code, out, err = coral("library", "gc", "lib", "--keep", "1", "--yes", "--dry-run")
    assert code == 0
    assert "4 data files" in out
    assert "nothing was removed: --yes does it" in err
    assert store.list_keys("") == before


def test_what_nothing_needs_goes(store, folder, coral):
    three_versions(store, folder)
    code, out, _ = coral("library", "gc", "lib", "--keep", "1", "--yes")
    assert code == 0
    assert "removed" in out
    assert list_versions(store, "lib") == [3, 4]
    assert open_library(store, "lib").models == ("m2",)
    assert open_library(store, "lib").read().num_rows == 40
    assert read_manifest(store, "lib", 4).repeats == 3
    assert len([key for key in store.list_keys("libraries/lib/data") if key.endswith(".parquet")]) == 4
    page = store.get("libraries/lib/index.md").decode()
    assert "manifests/00000000000000000004.json" in page
    assert "00000000000000000001.json" not in page
    with pytest.raises(InputError, match=r"no version 1 \(it has 3, 4\)"):
        open_library(store, "lib", 1)
    # A second time there is nothing to do, and no number is taken for it.
    age(folder, 40)
    code, out, _ = coral("library", "gc", "lib", "--keep", "1", "--yes", "--json")
    assert (json.loads(out)["versions"], json.loads(out)["files"]) == ([], [])
    assert list_versions(store, "lib") == [3, 4]


def test_a_build_after_it_stores_anew_what_is_retired(store, folder):
    three_versions(store, folder)
    remove_unneeded(store, "lib", Rule(keep=1), ManualClock(start=NOW))
    manifest = commit(store, draft_of(shards_of(store, models=["m1"])))
    assert all("-repair1" in record.key for record in manifest.present)
    assert open_library(store, "lib").read().num_rows == 40
    assert manifest.retired == read_manifest(store, "lib", 4).retired
    # The next one finds those, and the retired names are free again after a week.
    again = commit(store, draft_of(shards_of(store, models=["m1"])))
    assert {record.key for record in again.present} == {record.key for record in manifest.present}
    age(folder, 50)
    removal = remove_unneeded(store, "lib", Rule(keep=1), ManualClock(start=NOW + timedelta(days=8)))
    assert removal.keys
    assert set(open_library(store, "lib").manifest.retired) == set(removal.keys)


def test_what_plans_need_stays_and_so_does_what_is_young(store, folder, coral):
    three_versions(store, folder)
    when = record_plan(store, NOW, version=2)
    _, out, _ = coral("library", "gc", "lib", "--keep", "1", "--json")
    found = json.loads(out)
    assert found["kept"][0] == {"version": 2, "reason": f"needed by plans/blue/{when}"}
    assert (found["versions"], found["files"]) == ([1], [])  # the second needs all that the first does
    age(folder, 2)
    _, out, _ = coral("library", "gc", "lib", "--keep", "1", "--older-than", "30d", "--json")
    assert [kept["version"] for kept in json.loads(out)["kept"]] == [1, 2, 3]
    _, out, _ = coral("library", "gc", "lib", "--keep", "1", "--older-than", "0d", "--json")
    assert json.loads(out)["versions"] == [1]
    age(folder, 0.5)
    _, out, _ = coral("library", "gc", "lib", "--keep", "1", "--older-than", "0d")
    assert "replaced at" in out


def test_data_files_of_a_build_under_way_wait(store, folder, coral):
    three_versions(store, folder)
    shards_of(store, models=["m7"])
    (folder / "libraries/lib/data/notes.txt").write_text("of somebody")
    _, out, _ = coral("library", "gc", "lib", "--older-than", "0d", "--json")
    assert json.loads(out)["waiting_files"] == 4
    _, out, _ = coral("library", "gc", "lib", "--older-than", "0d")
    assert "4 more are too young to go" in out
    age(folder, 40)
    _, out, _ = coral("library", "gc", "lib", "--yes", "--json")
    assert len(json.loads(out)["files"]) == 4
    assert store.exists("libraries/lib/data/notes.txt")


def test_nothing_goes_while_it_is_not_known_what_is_needed(store, folder, coral):
    three_versions(store, folder)
    store.put("plans/blue/x/decision.json", b"{")
    code, _, err = coral("library", "gc", "lib", "--keep", "1", "--yes")
    assert code == 6
    assert "plans/blue/x/decision.json: nothing is removed" in err
    store.delete("plans/blue/x/decision.json")
    store.put(manifest_key("lib", 2), b"{}")
    code, _, err = coral("library", "gc", "lib", "--keep", "1", "--yes")
    assert code == 6
    assert f"{manifest_key('lib', 2)}: nothing is removed, as what it needs is not known" in err
    assert list_versions(store, "lib") == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["library", "gc", "lib", "--keep", "0"], "--keep: 0 kept would leave nothing"),
        (["library", "gc", "lib", "--older-than", "-3d"], "is no age from 0 to 36500 days"),
        (["library", "gc", "lib", "--older-than", "900000d"], "is no age from 0"),
        (["library", "gc", "lib", "--older-than", "old"], "--older-than"),
        (["library", "gc", "libb"], "no such library in the store"),
        (["artifacts", "gc", "libraries/none"], "no such library in the store"),
        (["artifacts", "gc", "plans"], "no group with a retention"),
        (["artifacts", "gc", "leases/blue"], "no group with a retention"),
        (["artifacts", "gc", "plans/blue/x"], "no group with a retention"),
        (["artifacts", "gc", "plans/nobody"], "nothing is recorded here (see `coral artifacts ls plans`)"),
    ],
)
def test_nonsense_is_refused(store, folder, coral, arguments, message):
    three_versions(store, folder)
    code, out, err = coral(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_plan_of_a_version_that_is_going_is_refused(store, folder):
    three_versions(store, folder)
    remove_unneeded(store, "lib", Rule(keep=1), ManualClock(start=NOW))
    with pytest.raises(StoreConflictError, match=r"is being removed \(retention\) \(plan again with the newest"):
        record_plan(store, NOW, version=2)
    assert list_plans(store, "blue") == []


def test_a_removal_that_takes_too_long_stops(store, folder, monkeypatch):
    three_versions(store, folder)
    clock = ManualClock(start=NOW)
    delete = Store.delete

    def slow(self, key):
        clock.advance(2000)
        delete(self, key)

    monkeypatch.setattr(Store, "delete", slow)
    with pytest.raises(StoreError, match=r"took too long \(run it again: it goes on\)"):
        remove_unneeded(store, "lib", Rule(keep=1), clock)
    monkeypatch.undo()
    assert open_library(store, "lib").read().num_rows == 40
    age(folder, 40)
    remove_unneeded(store, "lib", Rule(keep=1), ManualClock(start=NOW))
    assert len(store.list_keys("libraries/lib/data")) == 4


def test_a_removal_gives_way_to_writers_that_do_not_stop(store, folder, monkeypatch):
    three_versions(store, folder)
    draft = draft_of(shards_of(store))
    made = []

    def overtaken(*arguments, whole=plan_removal):
        removal = whole(*arguments)
        made.append(commit(store, draft.model_copy(update={"commit_id": str(len(made))})))
        return removal

    monkeypatch.setattr("artifacts.retention.plan_removal", overtaken)
    with pytest.raises(StoreConflictError, match="other writers committed 5 times meanwhile"):
        remove_unneeded(store, "lib", Rule(keep=1), ManualClock(start=NOW))
    assert list_versions(store, "lib") == list(range(1, 9))


def test_old_plans_go_but_those_the_fleet_may_run_from(store, folder, coral):
    steps, done, failed = {"mode": "apply"}, {"outcome": "converged"}, {"outcome": "failed"}
    times = [NOW - timedelta(days=60 - day) for day in range(9)]
    record_plan(store, times[0], steps=steps, result=done)
    record_plan(store, times[1])
    converged = record_plan(store, times[2], steps=steps, result=done)
    acted = [record_plan(store, times[3], steps=steps, result=failed), record_plan(store, times[4], steps=steps)]
    record_plan(store, times[5])
    store.put(f"{plan_group('blue', times[6])}/decision.json", b'{"library": {"name": "lib", "version": 1}}')
    store.put("plans/blue/notes/plan.json", b"of somebody")
    age(folder, 40)
    young = time_text(times[7])
    store.put(f"{plan_group('blue', times[7])}/decision.json", b'{"library": {"name": "lib", "version": 1}}')
    newest = record_plan(store, times[8])
    code, out, _ = coral("artifacts", "gc", "plans/blue", "--keep", "1", "--json")
    found = json.loads(out)
    assert code == 0
    assert [item["folder"] for item in found["kept"]] == [converged, *acted, young, newest]
    assert found["folders"] == [time_text(times[day]) for day in (0, 1, 5, 6)]
    code, out, err = coral("artifacts", "gc", "plans/blue", "--keep", "1")
    assert "nothing was removed: --yes does it" in err
    assert "the fleet may run from it" in out
    assert len(list_plans(store, "blue")) == 7
    code, out, _ = coral("artifacts", "gc", "plans/blue/", "--keep", "1", "--yes")
    assert code == 0
    assert "4 of 9 records" in out
    assert [time_text(when) for when in list_plans(store, "blue")] == [converged, *acted, newest]
    assert {key.split("/")[2] for key in store.list_keys("plans/blue")} == {
        "index.md",
        "notes",
        converged,
        *acted,
        young,
        newest,
    }
    store.put(f"plans/blue/{acted[1]}/result.json", b"{")
    _, out, _ = coral("artifacts", "gc", "plans/blue", "--keep", "1", "--json")
    assert json.loads(out)["folders"] == []


def test_a_plan_that_is_half_removed_is_none_and_goes_next_time(store, folder, coral, monkeypatch):
    old = record_plan(store, NOW - timedelta(days=60))
    record_plan(store, NOW - timedelta(days=59))
    age(folder, 40)
    delete, calls = Store.delete, []

    def dies(self, key):
        if calls:
            raise RuntimeError("killed")
        calls.append(key)
        delete(self, key)

    monkeypatch.setattr(Store, "delete", dies)
    with pytest.raises(RuntimeError, match="killed"):
        coral("artifacts", "gc", "plans/blue", "--keep", "1", "--yes")
    monkeypatch.setattr(Store, "delete", delete)
    assert calls == [f"plans/blue/{old}/plan.json"]
    assert len(list_plans(store, "blue")) == 1
    coral("artifacts", "gc", "plans/blue", "--keep", "1", "--yes")
    assert not any(old in key for key in store.list_keys("plans/blue") if not key.endswith("index.md"))


def test_old_evaluations_go(store, folder, coral):
    for day in range(3):
        group = f"evaluations/tiny/{time_text(NOW - timedelta(days=60 - day))}"
        store.put(f"{group}/summary.json", b"{}")
        store.put(f"{group}/report.md", b"r")
    age(folder, 40)
    code, out, _ = coral("artifacts", "gc", "evaluations/tiny", "--keep", "2", "--yes", "--json")
    assert code == 0
    assert json.loads(out)["folders"] == [time_text(NOW - timedelta(days=60))]
    assert len(store.list_keys("evaluations/tiny")) == 4 + 1
    assert store.exists("evaluations/tiny/index.md")
    assert json.loads(coral("artifacts", "gc", "libraries/lib", "--json")[1] or "null") is None


def test_a_shard_is_stored_under_another_name_whatever_is_in_the_way(store):
    first = shards_of(store, models=["m1"])[0]
    data = store.get(first.key)
    names = [first.shard.key("lib", repair=repair) for repair in range(10)]
    moved = moved_shard(store, "lib", first, avoid={names[0]})
    assert (moved.key, store.get(names[1])) == (names[1], data)
    store.put(names[1], b"damaged")
    assert moved_shard(store, "lib", first, avoid={names[0]}).key == names[2]
    store.delete(first.key)
    # Its own file has gone: what is whole is found behind what is not.
    assert moved_shard(store, "lib", first, avoid={names[0]}).key == names[2]
    with pytest.raises(StoreError, match=r"was removed by retention before it could be used \(build the library again"):
        moved_shard(store, "lib", first, avoid={names[0], names[2]})
    with pytest.raises(StoreError, match="was removed by retention"):
        moved_shard(store, "lib", first, avoid=names)
