"""Building a library in this process: what is committed, reused, retried and recorded."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count

import numpy as np
import pytest

from artifacts.library import open_library
from artifacts.shards import ShardStatus
from artifacts.store import open_store
from coral_core.clock import ManualClock
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, NoSolutionError, StoreError
from tasks import library
from tasks import solve_shard as solving
from tasks.executor import Failure, InlineExecutor, Outcome
from tasks.library import (
    Build,
    build_library,
    build_spec_from_scenario,
    failure_rows,
    manifest_rows,
    plan_shards,
)
from tasks.solve_shard import combinations, shard_rows, shard_templates, solve_shard
from tests.fakes.ray_build import CONFIGS, small_spec

NAMES = count()


@pytest.fixture
def store():
    return open_store(f"memory://library-{next(NAMES)}")


class Fake:
    """An executor that answers failures for some shards and does the others' work."""

    def __init__(self, failures):
        self.failures = failures
        self.calls = []

    def __call__(self, items, work):
        self.calls.append(len(items))
        for index, item in enumerate(items):
            failure = self.failures(item, len(self.calls))
            value = None if failure else work(item)
            yield Outcome(index=index, value=value, failure=failure)

    def session(self):
        return nullcontext()


NONE_FAILS = Fake(lambda item, call: None)


def best_by_combination(snapshot):
    rows = snapshot.read().to_pylist()
    return {
        (row["model"], row["phase"], tuple(row["node_configs"]), tuple(row["node_counts"])): row[
            "throughput_tokens_per_s"
        ]
        for row in rows
    }


def test_a_build_is_committed_and_holds_every_combination_worth_it_once(store):
    start = datetime(2026, 1, 2, tzinfo=UTC)
    manifest = build_library(small_spec(), store, InlineExecutor(), clock=ManualClock(start=start))
    assert (manifest.version, manifest.shards_expected, manifest.shards_failed) == (1, 4, 0)
    assert manifest.created_at == start
    assert open_library(store, "lib").manifest == manifest
    by_combination = best_by_combination(open_library(store, "lib"))
    assert len(by_combination) == manifest.rows > 0
    tried = sum(len(combinations(shard.table, n_max=3, rho=40.0)) for shard in plan_shards(small_spec()))
    dropped = sum(manifest.statistics[name] for name in ("infeasible", "with_idle_nodes", "dominated"))
    assert manifest.statistics["combinations"] == tried
    assert manifest.rows == tried - dropped


def test_a_second_build_solves_nothing_and_commits_the_same_data(store):
    first = build_library(small_spec(), store, InlineExecutor())
    executor = Fake(lambda item, call: pytest.fail("solved again"))
    seen = []
    second = build_library(small_spec(), store, executor, on_progress=seen.append)
    assert second.version == 2
    assert second.shards == first.shards
    assert (seen[0].done, seen[0].reused, seen[0].total, seen[0].done_frac) == (4, 4, 4, 1.0)


@pytest.mark.parametrize(
    "change", [{"n_max": 2}, {"rho": 20.0}, {"configs": CONFIGS[:2]}, {"method": "ilp"}, {"keep_all": True}]
)
def test_what_matters_to_a_shard_changes_its_hash(change):
    before = {shard.inputs_hash for shard in plan_shards(small_spec())}
    after = {shard.inputs_hash for shard in plan_shards(small_spec(**change))}
    assert not before & after


@pytest.mark.parametrize("change", [{"library": "other"}, {"ilp_time_limit_s": 1.0}, {"lattice_parts": 2}])
def test_what_does_not_matter_to_a_shard_leaves_its_hash(change):
    before = {shard.inputs_hash for shard in plan_shards(small_spec())}
    assert {shard.inputs_hash for shard in plan_shards(small_spec(**change))} == before


def test_any_change_of_the_capacities_changes_the_hash():
    shard = plan_shards(small_spec())[0]
    for name in ("throughput", "usable_memory_bytes", "memory_bytes"):
        array = getattr(shard.table, name).copy()
        array.flat[0] = np.nextafter(array.flat[0], np.inf)
        assert replace(shard, table=replace(shard.table, **{name: array})).inputs_hash != shard.inputs_hash


def all_rows(store):
    """The rows of the newest snapshot by id, its statistics per shard aside."""
    rows = open_library(store, "lib").read().to_pylist()
    by_id = {row["template_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


COUNTED = ("combinations", "infeasible", "unproven", "with_idle_nodes", "dominated")


@pytest.mark.parametrize("keep_all", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 50])
def test_parts_keep_together_exactly_what_one_part_keeps(store, parts, keep_all):
    whole = build_library(small_spec(keep_all=keep_all), store, InlineExecutor())
    expected = all_rows(store)
    split = build_library(small_spec(keep_all=keep_all, lattice_parts=parts), store, InlineExecutor())
    assert (split.shards_expected, split.rows) == (4 * parts, whole.rows)
    assert all_rows(store) == expected
    assert {name: split.statistics[name] for name in COUNTED} == {name: whole.statistics[name] for name in COUNTED}
    assert whole.statistics["placed_besides"] == 0
    assert (split.statistics["placed_besides"] > 0) is not keep_all


def test_rows_written_in_small_pieces_are_the_same_rows(store, monkeypatch):
    build_library(small_spec(), store, InlineExecutor())
    expected = open_library(store, "lib").read()
    monkeypatch.setattr(solving, "PIECE_ROWS", 3)
    elsewhere = open_store(f"memory://library-{next(NAMES)}")
    build_library(small_spec(), elsewhere, InlineExecutor())
    assert open_library(elsewhere, "lib").read().equals(expected)


def test_integer_programs_keep_all_whatever_the_parts():
    assert not any(shard.prunes for shard in plan_shards(small_spec(method="ilp")))
    shards = plan_shards(small_spec(method="ilp", combinations_per_ilp_shard=7))
    counts = combinations(shards[0].table, n_max=3, rho=40.0)
    held = sum(shard_rows(shard, counts).astype(int) for shard in shards if shard.table is shards[0].table)
    assert held.tolist() == [1] * len(counts)


def test_a_shard_without_any_combination_is_stored_empty(store):
    shard = replace(plan_shards(small_spec())[0], rho=1e-9)
    statistics = {}
    assert [len(placed) for placed in shard_templates(shard, statistics)] == [0]
    assert statistics["combinations"] == 0
    assert solve_shard(shard, store.url).rows == 0


def test_integer_programs_find_the_same_throughputs(store):
    build_library(small_spec(method="lattice", keep_all=True), store, InlineExecutor())
    lattice = best_by_combination(open_library(store, "lib"))
    manifest = build_library(small_spec(method="ilp", combinations_per_ilp_shard=7), store, InlineExecutor())
    ilp = best_by_combination(open_library(store, "lib"))
    assert manifest.shards_expected > 4
    assert ilp.keys() == lattice.keys()
    assert ilp == pytest.approx(lattice, rel=1e-6)


def test_a_shard_that_fails_once_is_tried_again(store):
    executor = Fake(lambda item, call: Failure(kind="store", message="away") if call == 1 else None)
    manifest = build_library(small_spec(), store, executor)
    assert executor.calls == [4, 4]
    assert manifest.shards_failed == 0


def test_a_shard_that_fails_for_good_is_recorded_and_nothing_is_committed(store):
    def failures(item, call):
        return Failure(kind="bug", message="it broke") if item.table.model == "large" else None

    with pytest.raises(NoSolutionError, match=r"2 of 4 shards failed, .*it broke"):
        build_library(small_spec(), store, Fake(failures))
    with pytest.raises(InputError, match="no such library"):
        open_library(store, "lib")

    manifest = build_library(small_spec(), store, Fake(failures), allow_partial=True)
    assert (manifest.shards_present, manifest.shards_failed) == (2, 2)
    assert [record.attempts for record in manifest.failed] == [2, 2]
    assert {row["error"] for row in failure_rows(manifest.shards)} == {"it broke"}
    assert {row["failed"] for row in manifest_rows(manifest) if row["model"] == "large"} == {1}

    healed = build_library(small_spec(), store, NONE_FAILS)
    assert (healed.version, healed.shards_failed) == (2, 0)


def test_a_quarantined_shard_is_not_tried_again(store):
    executor = Fake(lambda item, call: Failure(kind="worker_died", message="gone") if item.part == 1 else None)
    with pytest.raises(NoSolutionError, match="gone"):
        build_library(small_spec(lattice_parts=2), store, executor)
    assert executor.calls == [8]


def test_a_damaged_data_file_is_made_anew_and_the_others_are_reused(store):
    manifest = build_library(small_spec(), store, InlineExecutor())
    damaged, before = manifest.shards[1], open_library(store, "lib").read()
    store.put(damaged.key, b"PAR1 no more")
    seen = []
    healed = build_library(small_spec(), store, InlineExecutor(), on_progress=seen.append)
    assert seen[0].reused == 3
    assert (healed.version, healed.statistics["damaged_files"]) == (2, 1)
    assert open_library(store, "lib").read().equals(before)


def test_a_store_that_workers_do_not_share_is_noticed(store):
    elsewhere = open_store(f"memory://elsewhere-{next(NAMES)}")

    class Elsewhere(Fake):
        def __call__(self, items, work):
            yield from super().__call__(items, lambda item: solve_shard(item, elsewhere.url))

    with pytest.raises(NoSolutionError, match="workers need a shared store"):
        build_library(small_spec(), store, Elsewhere(lambda item, call: None))


def test_a_store_that_is_away_is_said_and_not_taken_for_damage(store, monkeypatch):
    def away(*arguments):
        raise StoreError("the store cannot be reached", where="s3://bucket")

    monkeypatch.setattr(library, "find_shard", away)
    monkeypatch.setattr(type(store), "exists", away)
    with pytest.raises(StoreError, match="cannot be reached"):
        build_library(small_spec(), store, InlineExecutor())


def test_groups_cover_the_missing_shards(store, monkeypatch):
    monkeypatch.setattr(library, "SHARDS_PER_GROUP", 3)
    build = Build(small_spec(lattice_parts=2), store)
    assert [len(group) for group in build.groups] == [3, 3, 2]
    for group in build.groups:
        build.run(InlineExecutor(), group)
    assert build.missing == []
    assert [record.status for record in build.records] == [ShardStatus.PRESENT] * 8


def test_shards_survive_pickling_with_their_hash():
    for shard in plan_shards(small_spec()):
        assert pickle.loads(pickle.dumps(shard)).key == shard.key


def test_solving_a_shard_twice_stores_it_once(store):
    shard = plan_shards(small_spec())[0]
    assert solve_shard(shard, store.url) == solve_shard(shard, store.url)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_max": 0}, "n_max: 0 is below 1"),
        ({"rho": float("nan")}, "rho: nan is not a positive number"),
        ({"ilp_time_limit_s": 0.0}, "ilp_time_limit_s: 0.0 is not"),
        ({"method": "guess"}, "method: there is no method 'guess'"),
        ({"configs": ()}, "configs: there is nothing"),
        ({"models": ()}, "models: there is nothing"),
        ({"models": small_spec().models * 2}, r"models: small \(bf16\) is given 2 times"),
        ({"lattice_parts": 0}, "lattice_parts: 0"),
        ({"combinations_per_ilp_shard": 0}, "combinations_per_ilp_shard: 0"),
    ],
)
def test_a_build_of_nothing_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        small_spec(**change)


def test_a_scenario_becomes_a_build():
    resolved = resolve_scenario(load_scenario("tiny"))
    spec = build_spec_from_scenario(resolved)
    scenario = resolved.scenario
    assert spec.library == "tiny"
    assert (spec.n_max, spec.rho, spec.method) == (scenario.library.n_max, scenario.library.rho, "lattice-free")
    assert [config.name for config in spec.configs] == list(scenario.configs)
    assert {model.shape.name for model in spec.models} == {model.model for model in scenario.models}
    assert all(model.phases == (Phase.PREFILL, Phase.DECODE) for model in spec.models)
    assert build_spec_from_scenario(resolved, method="ilp").method == "ilp"
