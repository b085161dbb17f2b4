"""One contract for every executor (tasks.executor): in this process, in a process pool, on Ray."""

from __future__ import annotations

import numpy as np
import pytest

from tasks import fanout
from tasks.executor import InlineExecutor
from tasks.fanout import RayExecutor, ray_session
from tests.fakes.ray_work import Order, UnpicklableOrder, add_one_in_place, double, obey

ISOLATING = [
    pytest.param("pool", marks=pytest.mark.servers),
    pytest.param("ray", marks=pytest.mark.servers),
    pytest.param("ray-chunks", marks=pytest.mark.servers),
]


@pytest.fixture(scope="module")
def ray():
    with ray_session(workers=2):
        yield


def executor_named(name, request):
    if name.startswith("ray"):
        request.getfixturevalue("ray")
    return {
        "inline": InlineExecutor(),
        "pool": InlineExecutor(processes=2),
        "ray": RayExecutor(),
        "ray-chunks": RayExecutor(chunk_size=7),
    }[name]


@pytest.fixture(params=["inline", *ISOLATING])
def executor(request):
    return executor_named(request.param, request)


@pytest.fixture(params=ISOLATING)
def isolating_executor(request):
    """Executors whose workers may die without their caller."""
    return executor_named(request.param, request)


def outcomes(executor, items, work=obey):
    """By index, each exactly once."""
    collected = list(executor(items, work))
    assert sorted(outcome.index for outcome in collected) == list(range(len(items)))
    return sorted(collected, key=lambda outcome: outcome.index)


def test_every_item_has_its_value(executor):
    assert [outcome.result for outcome in outcomes(executor, list(range(40)), double)] == list(range(0, 80, 2))


def test_nothing_to_do_has_no_outcomes(executor):
    assert list(executor([], double)) == []


def test_items_arrive_as_they_are_and_may_be_changed(executor):
    items = [np.full(20_000, float(number)) for number in range(3)]
    assert [outcome.result for outcome in outcomes(executor, items, add_one_in_place)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("input-error", "input", "item 3: no such thing (give another)"),
        ("two-argument-error", "bug", "TwoArgumentError: one two"),
        ("return-two-argument-error", "bug", "TwoArgumentError.__init__() missing"),
        ("exit", "bug", "SystemExit: 3"),
        ("unpicklable", "bug", "not to be pickled"),
    ],
)
def test_a_failing_item_fails_alone_and_says_why(executor, action, kind, message):
    orders = [Order(number) if number != 3 else Order(3, action) for number in range(8)]
    result = outcomes(executor, orders)
    assert result[3].failure is not None
    assert result[3].failure.kind == kind
    assert message in result[3].failure.message
    with pytest.raises(ValueError, match="item 3 failed"):
        _ = result[3].result
    assert [outcome.result for outcome in result if outcome.index != 3] == [0, 2, 4, 8, 10, 12, 14]


def test_an_item_that_cannot_be_sent_fails_alone(isolating_executor):
    result = outcomes(isolating_executor, [Order(0), UnpicklableOrder(1), Order(2)])
    assert result[1].failure is not None
    assert "not to be pickled" in result[1].failure.message
    assert [result[0].result, result[2].result] == [0, 4]


def test_a_poison_item_is_quarantined_and_no_other_is_lost(isolating_executor):
    orders = [Order(number, "die" if number == 11 else "double") for number in range(20)]
    result = outcomes(isolating_executor, orders)
    assert result[11].failure is not None
    assert result[11].failure.kind == "worker_died"
    assert result[11].attempts >= 2
    assert [outcome.result for outcome in result if outcome.index != 11] == [2 * n for n in range(20) if n != 11]


def test_an_item_whose_worker_is_killed_once_is_tried_again(isolating_executor, tmp_path):
    orders = [Order(number, "die-once" if number == 4 else "double", str(tmp_path)) for number in range(10)]
    result = outcomes(isolating_executor, orders)
    assert [outcome.result for outcome in result] == list(range(0, 20, 2))
    assert result[4].attempts >= 2


def test_closing_early_ends_the_run(isolating_executor):
    run = isolating_executor([Order(0), *(Order(1, "sleep") for _ in range(3)), *(Order(n) for n in range(200))], obey)
    assert next(run).failure is None
    run.close()
    assert list(run) == []


@pytest.mark.servers
def test_no_more_than_the_bound_is_in_flight(ray, tmp_path, monkeypatch):
    submitted = []
    submit = fanout._Run._submit

    def counting(run, chunk):
        yield from submit(run, chunk)
        submitted.append(len(run.in_flight))

    monkeypatch.setattr(fanout._Run, "_submit", counting)
    orders = [Order(number, "count", str(tmp_path)) for number in range(12)]
    together = [outcome.result for outcome in outcomes(RayExecutor(max_in_flight=1), orders)]
    assert set(together) == {1}
    assert set(submitted) == {1}
    submitted.clear()
    outcomes(RayExecutor(max_in_flight=3), orders)
    assert max(submitted) == 3
