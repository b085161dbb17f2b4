"""A plan says which of its replicas serve what is planned only where steps are computed whole."""

from __future__ import annotations

from types import SimpleNamespace

from coral_core.domain.templates import Placement, Stage
from coral_core.domain.workload import Phase
from tasks.plan_documents import _pipelines


def template(model, phase, *nodes_of_stages):
    stages = tuple(Stage(layers=2, nodes=nodes) for nodes in nodes_of_stages)
    return SimpleNamespace(model=model, phase=phase, placement=Placement(stages=stages))


def test_only_pipelines_with_several_nodes_in_a_stage_are_named_and_each_once():
    templates = {
        "side by side": template("a", Phase.DECODE, ("x", "x")),
        "chain": template("a", Phase.DECODE, ("x",), ("y",)),
        "two": template("b", Phase.DECODE, ("x", "y"), ("y",)),
        "three": template("b", Phase.DECODE, ("x",), ("x",), ("y", "y")),
    }

    def notes(*names):
        return _pipelines(SimpleNamespace(instances=[SimpleNamespace(template=name) for name in names]), templates)

    assert notes("side by side", "chain") == []
    (note,) = notes("side by side", "two", "three")
    assert note.startswith("b decode: replicas in several stages")
