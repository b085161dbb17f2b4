"""When an engine hangs: it is noticed in time whatever it was doing, and one that works is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_core.engine.liveness import LONGEST_GAP_S, Liveness, LivenessTerms
from coral_core.engine.scrape import EngineSample

TERMS = LivenessTerms()
IDLE = EngineSample(
    running_requests=0.0,
    waiting_requests=0.0,
    kv_usage_frac=0.0,
    prompt_tokens_total=10.0,
    generation_tokens_total=10.0,
    steps_total=10.0,
)
BUSY = replace(IDLE, running_requests=3.0, waiting_requests=1.0, kv_usage_frac=0.5)
gaps = st.lists(st.floats(0.05, 2.0), min_size=1, max_size=60)


def looks(liveness: Liveness, samples, gaps_s, *, from_s: float = 0.0):
    """Each time of a look with what is then said; a probe that is due is sent and never returns."""
    at_s = from_s
    for sample, gap_s in zip(samples, gaps_s, strict=False):
        at_s += gap_s
        liveness.look(sample, at_s)
        if liveness.probe_is_due():
            liveness.probing = True
        yield at_s, liveness.hang()


@given(gaps_s=gaps, moving=st.sampled_from(["kv_usage_frac", "generation_tokens_total", "steps_total"]))
def test_an_engine_that_moves_between_looks_never_hangs(gaps_s, moving):
    samples = [replace(BUSY, **{moving: number / 100}) for number in range(len(gaps_s))]
    assert not any(hang for _, hang in looks(Liveness(), samples, gaps_s))


@given(gaps_s=st.lists(st.floats(0.2, 2.0), min_size=100, max_size=100), before=st.sampled_from([BUSY, IDLE]))
def test_an_engine_that_stops_is_noticed_within_15_s_and_not_before_its_time(gaps_s, before):
    liveness = Liveness()
    liveness.look(before, 0.0)
    hung_s = next(at_s for at_s, hang in looks(liveness, [before] * 100, gaps_s) if hang)
    assert TERMS.hung_after_s <= hung_s <= 15.0 + (max(gaps_s) if before is IDLE else 0.0)


def test_with_looks_every_second_or_every_two_that_are_not_answered_even_the_worst_is_within_15_s():
    for sample, every_s in ((IDLE, 1.0), (BUSY, 1.0), (None, 3.0)):
        liveness = Liveness()
        liveness.look(IDLE, 0.0)
        hung_s = next(at_s for at_s, hang in looks(liveness, [sample] * 100, [every_s] * 100) if hang)
        assert hung_s <= 15.0


@given(gaps_s=gaps)
def test_an_idle_engine_that_answers_its_probes_never_hangs(gaps_s):
    liveness = Liveness()
    at_s = 0.0
    for gap_s in gaps_s * 10:
        at_s += gap_s
        liveness.look(IDLE, at_s)
        if liveness.probe_is_due():
            liveness.probe_returned(answered=True)
        assert not liveness.hang()


def test_an_engine_that_refuses_probes_hangs_even_if_it_says_so_at_once():
    liveness = Liveness()
    for second in range(14):
        liveness.look(IDLE, float(second))
        if liveness.probe_is_due():
            liveness.probe_returned(answered=False)
    assert "no step, token or block" in liveness.hang()


def test_a_probe_refused_while_others_are_served_is_forgotten():
    liveness = Liveness()
    liveness.look(IDLE, 0.0)
    liveness.probe_returned(answered=False)
    liveness.look(replace(IDLE, steps_total=11.0), 1.0)
    for second in range(2, 30):
        liveness.look(replace(IDLE, steps_total=11.0), float(second))
        if liveness.probe_is_due():
            liveness.probe_returned(answered=True)
        assert not liveness.hang()


@given(asleep_s=st.floats(LONGEST_GAP_S, 1e6))
def test_a_watcher_that_was_asleep_does_not_blame_the_engine(asleep_s):
    liveness = Liveness()
    liveness.look(BUSY, 0.0)
    liveness.look(BUSY, asleep_s)
    liveness.look(None, 2.0 * asleep_s)
    assert not liveness.hang()


@given(back_s=st.floats(0.0, 1e6))
def test_time_that_goes_back_counts_nothing(back_s):
    liveness = Liveness()
    for look in range(20):
        liveness.look(BUSY, -look * back_s)
    assert not liveness.hang()


def test_an_engine_that_answers_nothing_is_said_to_be_silent():
    liveness = Liveness()
    for second in range(11):
        liveness.look(IDLE if second == 0 else None, float(second))
    assert "/metrics was not answered for 10 s" in liveness.hang()


def test_an_engine_without_figures_is_judged_by_its_probes_alone():
    liveness = Liveness()
    for second in range(100):
        liveness.look(EngineSample(), float(second))
        if liveness.probe_is_due():
            liveness.probe_returned(answered=True)
        assert not liveness.hang()
    for second in range(100, 115):
        liveness.look(EngineSample(), float(second))
        if liveness.probe_is_due():
            liveness.probing = True
    assert liveness.hang()


@pytest.mark.parametrize("answered", [True, False])
def test_one_probe_at_a_time(answered):
    liveness = Liveness()
    for second in range(5):
        liveness.look(IDLE, float(second))
    assert liveness.probe_is_due()
    liveness.probing = True
    assert not liveness.probe_is_due()
    liveness.probe_returned(answered=answered)
    assert liveness.probe_is_due() is not answered
