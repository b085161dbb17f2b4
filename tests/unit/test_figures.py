"""Figures as people read them."""

from __future__ import annotations

import pytest

from coral_core.report.figures import usd


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00"), (-0.001, "0.00"), (-0.004999, "0.00"), (-3.2, "-3.20"), (1234.567, "1,234.57")]
)
def test_money_has_no_negative_nothing(value, text):
    assert usd(value) == text
