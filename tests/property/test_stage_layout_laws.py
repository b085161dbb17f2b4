"""Binding, block pools and layouts of the stage runtime, against counting by hand."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coral_core.engine.plugin.stage_layout import (
    Bindings,
    BlockPools,
    Layout,
    LayoutError,
    Node,
    Rota,
    Stage,
    StageLostError,
    layout_of,
)

weights = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 50.0), min_size=1)


def two_three() -> Layout:
    first = Stage(layers=5, nodes=(Node(name="a", throughput=2.0, local=True), Node(name="b", local=True)))
    second = Stage(layers=3, nodes=tuple(Node(name=name, throughput=1.0, local=True) for name in "cde"))
    return Layout(stages=(first, second))


@given(weights, st.integers(1, 400))
def test_turns_are_in_proportion_at_every_moment(shares, turns):
    rota = Rota(shares)
    had = Counter(rota.turn() for _ in range(turns))
    whole = sum(shares.values())
    assert all(abs(had[name] - turns * weight / whole) < len(shares) for name, weight in shares.items())


def test_turns_of_two_to_one_alternate_as_evenly_as_can_be():
    rota = Rota({"a": 2.0, "b": 1.0})
    assert [rota.turn() for _ in range(6)] == ["a", "b", "a", "a", "b", "a"]


@given(st.lists(st.sampled_from("abcde"), unique=True), st.integers(1, 60))
def test_a_request_keeps_its_path_and_new_ones_avoid_what_is_lost(lost, count):
    bindings = Bindings(two_three())
    before = {f"old{number}": bindings.bind(f"old{number}") for number in range(count)}
    for turn, name in enumerate(lost):
        stage = {"a", "b"} if name in "ab" else {"c", "d", "e"}
        if stage <= {*lost[: turn + 1]}:
            with pytest.raises(StageLostError, match="no node left"):
                bindings.lose(name, "gone")
            return
        assert set(bindings.lose(name, "gone")) == {request for request, path in before.items() if name in path}
    assert {request: bindings.bind(request) for request in before} == before
    left = {node for number in range(count) for node in bindings.bind(f"new{number}")}
    assert not left & {*lost}
    first = sum(weight for name, weight in {"a": 2.0, "b": 1.0}.items() if name not in lost)
    second = sum(1.0 for name in "cde" if name not in lost)
    assert bindings.weight_frac == pytest.approx(min(first, second) / 3.0)


class Pools(RuleBasedStateMachine):
    """What requests hold on each node, beside a plain count."""

    SIZES: ClassVar = {"a": 9, "b": 5, "c": 7, "d": 4}
    PATHS: ClassVar = [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]

    def __init__(self) -> None:
        super().__init__()
        self.pools = BlockPools(self.SIZES)
        self.held: dict[int, tuple[tuple[str, str], int]] = {}
        self.lost: set[str] = set()
        self.next = 0

    def free(self, path: tuple[str, str]) -> int:
        used = {node: sum(count for own, count in self.held.values() if node in own) for node in self.SIZES}
        return min(0 if node in self.lost else self.SIZES[node] - 1 - used[node] for node in path)

    @rule(path=st.sampled_from(PATHS), count=st.integers(1, 6))
    def begin(self, path, count):
        self.next += 1
        if count > self.free(path):
            with pytest.raises(ValueError, match="too few blocks"):
                self.pools.grow(str(self.next), path, count)
        else:
            self.pools.grow(str(self.next), path, count)
            self.held[self.next] = path, count

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(1, 3))
    def grow(self, data, more):
        request = data.draw(st.sampled_from(sorted(self.held)))
        path, count = self.held[request]
        if self.lost & {*path} or more > self.free(path):
            return
        before = {node: list(self.pools.held(str(request), node)) for node in path}
        self.pools.grow(str(request), path, count + more)
        self.held[request] = path, count + more
        assert all(self.pools.held(str(request), node)[:count] == before[node] for node in path)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data):
        request = data.draw(st.sampled_from(sorted(self.held)))
        self.pools.release(str(request), self.pools.holders(str(request)))
        del self.held[request]

    @precondition(lambda self: len(self.lost) < 2)
    @rule(node=st.sampled_from(["b", "d"]))
    def lose(self, node):
        self.lost.add(node)
        self.pools.lose(node)

    @invariant()
    def no_block_has_two_owners_and_counts_agree(self):
        for node in self.SIZES:
            ids = [block for request in self.held for block in self.pools.held(str(request), node)]
            assert len(ids) == len({*ids})
            assert not {*ids} - {*range(1, self.SIZES[node])}
            wanted = 0 if node in self.lost else sum(count for path, count in self.held.values() if node in path)
            assert self.pools.in_use()[node] == len(ids) == wanted
        assert all(self.pools.free_blocks(path) == self.free(path) for path in self.PATHS)


TestPools = Pools.TestCase


def test_the_schedulers_pool_is_what_the_tightest_stage_holds():
    pools = BlockPools({"a": 11, "b": 6, "c": 5, "d": 5, "e": 4})
    assert pools.scheduler_blocks(two_three()) == 1 + (4 + 4 + 3)


def nodes(*names: str, **figures: object) -> list[dict[str, object]]:
    return [{"name": name, "local": True, **figures} for name in names]


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (None, "has no 'coral_stages'"),
        ({"stages": []}, "needs a stage"),
        ({"stages": [{"layers": 0, "nodes": nodes("a")}]}, "at least one layer"),
        ({"stages": [{"layers": 1, "nodes": []}]}, "one node"),
        ({"stages": [{"layers": 1, "nodes": nodes("a", "a")}]}, "used twice: a"),
        ({"stages": [{"layers": 1, "nodes": nodes("")}]}, "needs a name"),
        ({"stages": [{"layers": 1, "nodes": nodes("a", throughput=0)}]}, "throughput"),
        ({"stages": [{"layers": 1, "nodes": nodes("a", throughput=float("nan"))}]}, "throughput"),
        ({"stages": [{"layers": 1, "nodes": nodes("a", throughput="2")}]}, "Expected `float`"),
        ({"stages": [{"layers": 1, "nodes": nodes("a", tp=0)}]}, "tp 0"),
        ({"stages": [{"layers": 1, "nodes": nodes("a", max_num_seqs=-1)}]}, "max_num_seqs -1"),
        ({"stages": [{"layers": 1, "nodes": [{"name": "a"}]}]}, "needs a port"),
        ({"stages": [{"layers": 1, "nodes": nodes("a")}], "listen": "127.0.0.1"}, "no HOST:PORT"),
        ({"stages": [{"layers": 1, "nodes": nodes("a")}], "listen": "127.0.0.1:70000"}, "no HOST:PORT"),
        ({"stages": [{"layers": 1, "nodes": nodes("a")}], "silence_s": 0}, "silence_s 0"),
        ({"stages": [{"layers": 1, "nodes": nodes("a")}], "stage": 1}, "unknown field `stage`"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(layout, word):
    with pytest.raises(LayoutError, match=word):
        layout_of(None if layout is None else {"coral_stages": layout})


def test_a_layout_tells_stages_nodes_and_layers():
    layout = two_three()
    assert layout.layers == (5, 3)
    assert [node.name for node in layout.nodes] == [*"abcde"]
    assert [layout.stage_of(name) for name in "aec"] == [0, 1, 1]
