"""The list of commands has a line for each; the page of a command has all that its docstring says."""

from __future__ import annotations

import pytest

from coral_core.cli.entry import SINGLE, run
from coral_core.errors import MeasurementError


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_page_of_a_command_is_its_docstring(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run(["predict", flag]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "Exit code 3 where the model does not fit." in page
    assert f"{MeasurementError.exit_code} measurement" in page


def test_the_list_has_a_line_for_every_command_of_one_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    words = capsys.readouterr().out.split()
    assert set(SINGLE) <= set(words)
