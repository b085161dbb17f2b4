"""What an evaluation's notes and ratios say beside the figures, so that none is taken for more than it is."""

from __future__ import annotations

from copy import deepcopy

import pytest

from coral_core.report.evaluation_report import evaluation_notes, ratios_table
from tests.fakes.report_cases import evaluation


@pytest.fixture
def document():
    return deepcopy(evaluation()[0])


def test_a_ratio_stands_beside_what_each_policy_leaves_unserved(document):
    document["policies"]["homo"]["shortfall_frac"] = 0.25
    table = ratios_table(document, "coral")
    at = table.columns.index("planned shortfall")
    assert {row[0]: row[at] for row in table.rows}["homo"] == "25.0%"
    assert any(note.startswith("homo") and "leave demand unserved" in note for note in evaluation_notes(document))


def test_epochs_shorter_than_a_start_are_named(document):
    document["epochs"] = 3
    document["inputs"]["epochs"]["duration_s"] = 60.0
    assert any("what an epoch plans is up only after it is over" in note for note in evaluation_notes(document))
    document["inputs"]["epochs"]["duration_s"] = 600.0
    assert not any("is up only after" in note for note in evaluation_notes(document))


def test_intervals_over_seeds_of_traces_say_nothing(document):
    assert not any("seeds change nothing" in note for note in evaluation_notes(document))
    for model in document["inputs"]["models"]:
        model["lengths"] = {"trace": "mine.csv", "format": "auto"}
    assert any("seeds change nothing" in note for note in evaluation_notes(document))
