"""The setting that names the engine's interpreter."""

from __future__ import annotations

import pytest

from coral_core.config.settings import load_settings
from coral_core.errors import InputError


def test_the_interpreter_is_the_named_one_and_keeps_its_environment(tmp_path, monkeypatch):
    real = tmp_path / "real"
    real.write_text("#!/bin/sh\n", encoding="utf-8")
    real.chmod(0o755)
    (tmp_path / "python").symlink_to(real)
    monkeypatch.setenv("CORAL_ENGINE_PYTHON", "python")
    monkeypatch.chdir(tmp_path)
    assert load_settings().engine_interpreter() == tmp_path / "python"


@pytest.mark.parametrize("kind", ["missing", "folder", "not executable"])
def test_what_is_no_program_is_refused_with_the_way_out(tmp_path, monkeypatch, kind):
    path = tmp_path / "python"
    if kind == "folder":
        path.mkdir()
    if kind == "not executable":
        path.write_text("", encoding="utf-8")
        path.chmod(0o644)
    monkeypatch.setenv("CORAL_ENGINE_PYTHON", str(path))
    with pytest.raises(InputError, match=f"CORAL_ENGINE_PYTHON: no interpreter for engines at {path}.*make engine-cpu"):
        load_settings().engine_interpreter()


def test_planning_needs_no_engine(tmp_path, monkeypatch):
    monkeypatch.delenv("CORAL_ENGINE_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="make engine-cpu"):
        load_settings().engine_interpreter()
