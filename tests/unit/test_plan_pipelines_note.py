"""A plan says which of its replicas serve less than predicted where their stages wait for one another."""

from __future__ import annotations

from types import SimpleNamespace

from coral_core.domain.templates import Placement, Stage
from coral_core.domain.workload import Phase
from tasks.plan_documents import _pipelines


def template(model, phase, *nodes_of_stages):
    stages = tuple(Stage(layers=2, nodes=nodes) for nodes in nodes_of_stages)
    return SimpleNamespace(model=model, phase=phase, placement=Placement(stages=stages))


def test_only_replicas_in_several_stages_are_named_and_each_once():
    templates = {
        "one": template("a", Phase.DECODE, ("x", "x")),
        "two": template("b", Phase.DECODE, ("x",), ("y",)),
        "three": template("b", Phase.DECODE, ("x",), ("x",), ("y",)),
    }

    def notes(*names):
        return _pipelines(SimpleNamespace(instances=[SimpleNamespace(template=name) for name in names]), templates)

    assert notes("one") == []
    (note,) = notes("one", "two", "three")
    assert note.startswith("b decode: replicas in several stages")
