"""Count what the tests of a CI run did, and refuse a run that shows less than it seems to.

usage: summary.py JUNIT_XML... [NAME OF A FAILED STEP...]

Prints skipped tests with their reasons, what is wrong, and as the last line `N passed, N failed, N skipped`. Exit code 1
where a report is missing or empty, a test or step failed, a reference or engine test was skipped or none ran.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

# What may be missing on a developer's machine and must have run here, with how to get it.
REQUIRED = {
    "reference": "set CORAL_REFERENCE_DATA to the folder of reference data",
    "engine": "make engine-cpu, or set CORAL_ENGINE_PYTHON",
}


def main(arguments: list[str]) -> int:
    """Read the reports, print the summary, return the exit code."""
    counts: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    wrong = [f"step failed: {step}" for step in arguments if not step.endswith(".xml")]
    for path in (Path(argument) for argument in arguments if argument.endswith(".xml")):
        cases = list(ET.parse(path).iter("testcase")) if path.is_file() else []  # noqa: S314 - our own pytest wrote it
        if not cases:
            wrong.append(f"no test ran: {path.name} is missing or empty")
        for case in cases:
            outcome = _outcome(case)
            counts[outcome] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            if outcome == "failed":
                wrong.append(f"test failed: {name}{_why(case)}")
            if outcome == "skipped":
                print(f"skipped: {name}: {case.find('skipped').get('message')}")
            for marker in _markers(case) & REQUIRED.keys():
                ran[marker] += outcome == "passed"
                if outcome == "skipped":
                    wrong.append(f"{marker} test skipped: {name}")
    wrong += [f"no {marker} test passed: {fix}" for marker, fix in REQUIRED.items() if not ran[marker]]
    for line in wrong:
        print(f"ci: {line}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if wrong else 0


def _why(case: ET.Element) -> str:
    """The last lines of what the test said: where a machine is out of reach, this may be all that is seen of it."""
    said = [part.text or part.get("message") or "" for part in case if part.tag in {"failure", "error"}]
    lines = [line for text in said for line in text.splitlines() if line.startswith("E ") or ": " in line]
    return "".join(f"\n    {line[:200]}" for line in lines[-12:])


def _markers(case: ET.Element) -> set[str | None]:
    return {item.get("value") for item in case.iter("property") if item.get("name") == "marker"}


def _outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "expected to fail" if skipped.get("type") == "pytest.xfail" else "skipped"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
