"""Seeds on the command line: only what the random number generators take, named in the error, before any work."""

from __future__ import annotations

import pytest

from coral_core.cli.entry import run


@pytest.mark.parametrize("given", ["-1", "1.5", "99999999999999999999", "x", "nan", "1e3", ""])
@pytest.mark.parametrize(
    "command", [["evaluate", "tiny", "--seeds", "0"], ["calibrate", "tiny", "--seeds", "0"], ["simulate", "--seed"]]
)
def test_what_is_no_seed_is_refused_and_named(command, given, capsys, tmp_path):
    assert run([*command, given, "--store", f"file://{tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "no seed" in said
    assert f'"{given}"' in said
    assert "2^63 - 1" in said
    assert not list(tmp_path.iterdir())
