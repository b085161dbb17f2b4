"""What a stage executor says of itself, as its node's agent reads it."""

from __future__ import annotations

import json

import pytest

from coral_core.domain.launch import NodeLaunch
from coral_core.engine.plugin import stage_layout
from coral_core.engine.stage_status import STATUS_FILE, STATUS_VARIABLE, StageStatus, StatusFile
from coral_core.errors import ServingError

NODES = {"0": {"stage": 0, "lost": None}, "1": {"stage": 0, "lost": "its connection ended"}}


def said(**changes) -> str:
    return json.dumps({"state": "degraded", "weight_frac": 0.67, "nodes": NODES, "pid": 1, **changes})


def test_the_newest_status_is_read_and_none_is_none(tmp_path):
    status, path = StatusFile(tmp_path), tmp_path / STATUS_FILE
    assert status.read() is None
    path.write_text(said(), encoding="utf-8")
    assert status.read() == StageStatus(weight_frac=0.67, lost_nodes={"1": "its connection ended"})
    new = tmp_path / "new"
    new.write_text(said(state="failed", weight_frac=0.3), encoding="utf-8")
    new.replace(path)
    assert status.read().weight_frac == status.read().weight_frac == 0.0
    status.clear()
    status.clear()
    assert status.read() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        said(weight_frac=-0.1),
        said(weight_frac=float("nan")),
        said(weight_frac=float("inf")),
        said(weight_frac="much"),
        said(weight_frac=None),
        said(nodes=[]),
        said(nodes={"1": {}}),
        said(nodes={"1": None}),
        json.dumps({"state": "ready"}),
    ],
)
def test_what_is_no_status_is_not_known(tmp_path, text):
    (tmp_path / STATUS_FILE).write_text(text, encoding="utf-8")
    assert StatusFile(tmp_path).read() is None


def test_sums_that_round_to_more_than_the_whole_are_the_whole(tmp_path):
    (tmp_path / STATUS_FILE).write_text(said(state="ready", weight_frac=1.0000000000000002), encoding="utf-8")
    assert StatusFile(tmp_path).read().weight_frac == 1.0


def test_the_engine_writes_where_its_agent_reads(tmp_path, monkeypatch):
    assert stage_layout.STATUS_VARIABLE == STATUS_VARIABLE
    stages = {"stages": [{"layers": 1, "nodes": [{"name": "0", "local": True}]}]}
    assert stage_layout.layout_of({"coral_stages": stages}).status_file is None
    for name, path in StatusFile(tmp_path).env.items():
        monkeypatch.setenv(name, path)
    assert stage_layout.layout_of({"coral_stages": stages}).status_file == str(tmp_path / STATUS_FILE)
    assert stage_layout.layout_of({"coral_stages": {**stages, "status_file": "/s"}}).status_file == "/s"


def test_an_old_status_that_cannot_be_taken_away_is_told(tmp_path):
    from tasks.engine_runner import EngineRunner

    (tmp_path / STATUS_FILE).mkdir()
    runner = EngineRunner(interpreter=tmp_path / "none", folder=tmp_path)
    launch = NodeLaunch(node="0", argv=(), env={}, ports=(), serves=True)
    with pytest.raises(ServingError, match="earlier engine's status"):
        runner.start(launch, "http://127.0.0.1:1")
