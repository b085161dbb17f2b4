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


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["plan", "launch"], "in start order. Nothing is started."),
        (["plan"], "beside the baselines, and record it (nothing is rented)"),
        (["evaluate", "levers"], "Costs are predicted"),
    ],
)
def test_a_command_within_a_group_has_its_own_page_too(capsys: pytest.CaptureFixture[str], command, told) -> None:
    assert run([*command, "--help"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_the_page_of_a_group_that_is_no_command_has_the_groups_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gateway", "--help"]) == 0
    assert "OpenAI's API in front of the fleet's instances" in " ".join(capsys.readouterr().out.split())


def test_the_list_has_a_line_for_every_command_of_one_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    words = capsys.readouterr().out.split()
    assert set(SINGLE) <= set(words)
