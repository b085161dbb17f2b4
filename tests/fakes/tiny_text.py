"""The demo scenario for tests that change it: without headroom, whose shares are those of its own models and templates."""

from __future__ import annotations

import re

from coral_core.config.scenario import scenario_text


def tiny_without_headroom() -> str:
    text, times = re.subn(r"^capacity:\n(?:  .*\n)+", "", scenario_text("tiny"), flags=re.MULTILINE)
    assert times == 1
    return text
