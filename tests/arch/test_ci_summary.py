"""The summary of a CI run refuses what only looks green."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUMMARY = Path(__file__).resolve().parents[2] / ".ci" / "summary.py"
REFERENCE = '<properties><property name="marker" value="reference"/></properties>'
OK = '<testcase classname="a" name="ok"/>'
ENGINE = REFERENCE.replace("reference", "engine")
COMPARED = f'<testcase classname="a" name="compared">{REFERENCE}</testcase>'
SERVED = f'<testcase classname="a" name="served">{ENGINE}</testcase>'
GOOD = OK + COMPARED + SERVED


def summary(tmp_path, cases: str | None, *steps: str) -> tuple[int, list[str]]:
    report = tmp_path / "test.xml"
    if cases is not None:
        report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", encoding="utf-8")
    done = subprocess.run([sys.executable, SUMMARY, report, *steps], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_a_good_run_ends_with_its_count(tmp_path):
    assert summary(tmp_path, GOOD) == (0, ["3 passed, 0 failed, 0 skipped"])


@pytest.mark.parametrize(
    ("cases", "steps", "complaint", "count"),
    [
        (None, [], "ci: no test ran: test.xml is missing or empty", "0 passed, 0 failed, 0 skipped"),
        ("", [], "ci: no test ran: test.xml is missing or empty", "0 passed, 0 failed, 0 skipped"),
        (OK + SERVED, [], "ci: no reference test passed", "2 passed, 0 failed, 0 skipped"),
        (OK + COMPARED, [], "ci: no engine test passed", "2 passed, 0 failed, 0 skipped"),
        (GOOD, ["demo (exit 2)"], "ci: step failed: demo (exit 2)", "3 passed, 0 failed, 0 skipped"),
        (
            GOOD + '<testcase classname="a" name="bad"><error message="x"/></testcase>',
            [],
            "ci: test failed: a::bad",
            "3 passed, 1 failed, 0 skipped",
        ),
        (
            GOOD + f'<testcase classname="a" name="absent">{REFERENCE}<skipped message="not set"/></testcase>',
            [],
            "ci: reference test skipped: a::absent",
            "3 passed, 0 failed, 1 skipped",
        ),
        (
            GOOD + f'<testcase classname="a" name="absent">{ENGINE}<skipped message="no vLLM"/></testcase>',
            [],
            "ci: engine test skipped: a::absent",
            "3 passed, 0 failed, 1 skipped",
        ),
    ],
)
def test_a_run_that_shows_too_little_fails(tmp_path, cases, steps, complaint, count):
    code, lines = summary(tmp_path, cases, *steps)
    assert code == 1
    assert any(line.startswith(complaint) for line in lines)
    assert lines[-1] == count


def test_a_failed_test_is_told_with_what_it_said(tmp_path):
    said = "def test():\n    x = 1\nE   AssertionError: assert 1 == 2\nE     more\n\ntests/a.py:7: AssertionError"
    bad = f'<testcase classname="a" name="bad"><failure message="short">{said}</failure></testcase>'
    _, lines = summary(tmp_path, GOOD + bad)
    told = ["    E   AssertionError: assert 1 == 2", "    E     more", "    tests/a.py:7: AssertionError"]
    assert lines[:-1] == ["ci: test failed: a::bad", *told]


def test_a_skip_elsewhere_and_an_expected_failure_are_named_but_allowed(tmp_path):
    other = '<testcase classname="b" name="gpu"><skipped message="no GPU"/></testcase>'
    expected = '<testcase classname="b" name="x"><skipped type="pytest.xfail" message=""/></testcase>'
    code, lines = summary(tmp_path, GOOD + other + expected)
    assert code == 0
    assert lines == ["skipped: b::gpu: no GPU", "3 passed, 0 failed, 1 skipped"]
