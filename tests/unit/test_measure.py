"""Measuring shot by shot: kept as they come, gone on with after a kill, refused where noisy, published when clean."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from artifacts.profile_shots import kept_starts, kept_times
from artifacts.profiles import newest_profile
from artifacts.store import open_store
from coral_core.clock import ManualClock
from coral_core.domain.workload import Phase
from coral_core.errors import MeasurementError, StoreError
from coral_core.perf.profiling import Shot
from tasks.measure import Measuring, TimeUpError, begun, profile_rows, publish, refused_rows
from tests.fakes.profile_cases import KEY, SWEEP, ClosedFormEngines, subject

NUMBERS = itertools.count()


@pytest.fixture
def store():
    return open_store(f"memory://measure-{next(NUMBERS)}")


@pytest.fixture
def clock():
    return ManualClock(start=datetime(2026, 11, 29, tzinfo=UTC))


def measuring(store, clock, engines, *, until_s=1e6, fresh=False):
    measurement = begun(subject(), store, fresh=fresh)
    return Measuring(measurement=measurement, engines=engines, store=store, clock=clock, until_s=until_s)


def a_shot(layers=2, phase=Phase.DECODE, requests=4, tokens=64):
    return Shot(tp=1, layers=layers, phase=phase, requests=requests, tokens=tokens)


def test_a_profile_is_that_of_the_closed_form(store, clock):
    work = measuring(store, clock, ClosedFormEngines())
    work.run()
    found = publish(work.measurement, store, now=clock.now(), source="a test")
    profile = newest_profile(store, KEY.model, KEY.config, KEY.engine_name)
    assert profile == found.profile
    assert len(profile.points) == 6
    for point in profile.points:
        own_s = 5e-5 * point.tokens if point.phase is Phase.PREFILL else 2e-4 + 1e-6 * point.tokens
        assert point.layer_s == pytest.approx(2e-3 + own_s * point.requests)
        assert point.fixed_s == pytest.approx(0.01)
    assert (profile.kv_tokens, profile.start_s) == ({1: 12500.0}, {1: 18.0})
    assert (profile.key, found.refused) == (KEY, {})
    assert {row["label"] for row in profile_rows(found)} == {"measured"}


def test_a_killed_run_goes_on_where_it_was(store, clock):
    first = ClosedFormEngines(dies_after=5)
    with pytest.raises(MeasurementError, match="gone"):
        measuring(store, clock, first).run()
    assert first.opened == [(1, 2)]
    second = ClosedFormEngines()
    work = measuring(store, clock, second)
    work.run()
    assert second.opened == [(1, 2), (1, 4)]
    assert set(first.asked).isdisjoint(second.asked)
    assert len(first.asked) + len(second.asked) == len(subject().shots) == 12
    assert publish(work.measurement, store, now=clock.now(), source="a test").refused == {}
    third = ClosedFormEngines()
    clock.advance(1.0)
    measuring(store, clock, third).run()
    assert len(third.asked) == 12  # what went into a profile is not measured again by its name alone


def test_nothing_is_opened_where_nothing_is_missing(store, clock):
    measuring(store, clock, ClosedFormEngines()).run()
    again = ClosedFormEngines()
    measuring(store, clock, again).run()
    assert again.opened == again.asked == []
    afresh = ClosedFormEngines()
    measuring(store, clock, afresh, fresh=True).run()
    assert len(afresh.asked) == 12


def test_noise_is_measured_again_and_then_refused_not_averaged(store, clock):
    once, always = a_shot(), a_shot(layers=4)
    engines = ClosedFormEngines(noisy={once: 1, always: 99})
    work = measuring(store, clock, engines)
    work.run()
    assert engines.asked.count(once) == 2
    assert engines.asked.count(always) == SWEEP.attempts
    assert once in work.measurement.times
    found = publish(work.measurement, store, now=clock.now(), source="a test")
    assert "coefficient of variation" in found.refused[always]
    assert found.lacks == 1
    assert len(found.profile.points) == 5
    assert always not in kept_times(store, KEY, [always])
    assert refused_rows(found.refused)[0]["step"] == "tp1-layers4-decode-4x64"


def test_a_shot_that_the_engine_cannot_do_is_refused_at_once(store, clock):
    engines = ClosedFormEngines(impossible=frozenset({a_shot()}))
    work = measuring(store, clock, engines)
    work.run()
    assert work.measurement.refused == {a_shot(): "too many tokens"}
    assert engines.asked.count(a_shot()) == 1


def test_all_noise_makes_no_profile(store, clock):
    engines = ClosedFormEngines(noisy=dict.fromkeys(subject().shots, 99))
    work = measuring(store, clock, engines)
    work.run()
    with pytest.raises(MeasurementError, match=r"no kind of step was clean: tp1-layers2-.*quiet node"):
        publish(work.measurement, store, now=clock.now(), source="a test")
    assert newest_profile(store, KEY.model, KEY.config, KEY.engine_name) is None


def test_kept_times_that_the_sweep_would_not_keep_are_measured_again(store, clock):
    loose = replace(SWEEP, max_cv_frac=1.0)
    engines = ClosedFormEngines(noisy={a_shot(): 1})  # within the looser bound
    work = measuring(store, clock, engines)
    work.measurement.subject = subject(loose)
    work.run()
    assert begun(subject(loose), store).missing == {}
    assert begun(subject(), store).missing == {(1, 2): [a_shot()]}
    more = replace(loose, samples=loose.samples + 1)
    assert begun(subject(more), store).missing == {(1, depth): more.shots(1, depth) for depth in (2, 4)}


def test_what_made_no_profile_is_measured_again(store, clock):
    """A layer's time that comes out below 0, whatever is tried: to run again on a quiet node must not end the same."""

    class Flat(ClosedFormEngines):
        def measure(self, shot, samples, *, within_s):
            found = super().measure(shot, samples, within_s=within_s)
            return tuple(value / (4 if shot.layers == 4 else 1) for value in found)

    work = measuring(store, clock, Flat())
    work.run()
    with pytest.raises(MeasurementError, match="no kind of step was clean"):
        publish(work.measurement, store, now=clock.now(), source="a test")
    again = measuring(store, clock, ClosedFormEngines())
    assert sum(map(len, again.measurement.missing.values())) == 12  # without which no node would be started
    again.run()
    assert len(publish(again.measurement, store, now=clock.now(), source="a test").profile.points) == 6


@pytest.mark.parametrize("text", ["{}", '{"samples_s": 3}', '{"samples_s": ["x"]}', "[]", '{"samples_s": null}'])
def test_a_record_without_samples_is_named(store, clock, text):
    measuring(store, clock, ClosedFormEngines()).run()
    key = next(key for key in store.list_keys("profiles") if "/steps/tp1" in key)
    store.put(key, text.encode())
    with pytest.raises(StoreError, match=r"is no measured step.*delete it"):
        begun(subject(), store)


def test_samples_that_are_no_times_count_as_missing(store, clock):
    measuring(store, clock, ClosedFormEngines()).run()
    key = next(key for key in store.list_keys("profiles") if f"/steps/{a_shot().name}/" in key)
    store.put(key, b'{"samples_s": [NaN, 1, 1, 1, 1]}')
    assert begun(subject(), store).missing == {(1, 2): [a_shot()]}


def test_time_that_is_up_ends_a_run_and_keeps_what_it_has(store, clock):
    class Slow(ClosedFormEngines):
        def measure(self, shot, samples, *, within_s):
            clock.advance(10.0)
            return super().measure(shot, samples, within_s=within_s)

    with pytest.raises(TimeUpError, match="goes on with what is missing"):
        measuring(store, clock, Slow(), until_s=35.0).run()
    assert len(kept_times(store, KEY, subject().shots)) == 4
    assert [(one.tp, one.layers) for one in kept_starts(store, KEY)] == [(1, 2)]


@pytest.mark.parametrize("question", ["open", "measure"])
def test_a_question_that_the_end_of_the_time_cuts_short_is_no_fault_of_the_node(store, clock, question):
    """As a socket does it: no answer within what is left."""

    def no_answer(*_, within_s):
        clock.advance(within_s)
        raise MeasurementError("the node does not answer: TimeoutError")

    engines = ClosedFormEngines()
    setattr(engines, question, no_answer)
    with pytest.raises(TimeUpError, match=r"used up .*goes on with what is missing"):
        measuring(store, clock, engines, until_s=clock.monotonic_s() + 100.0).run()
    # Where there is time left, it is one.
    with pytest.raises(MeasurementError, match="does not answer"):
        measuring(store, clock, engines, until_s=clock.monotonic_s() + 1e6).run()


def test_times_that_fall_as_steps_grow_are_no_profile(store, clock):
    class Falling(ClosedFormEngines):
        def measure(self, shot, samples, *, within_s):
            found = super().measure(shot, samples, within_s=within_s)
            return tuple(value / (2 if shot.requests == 4 else 1) for value in found)

    work = measuring(store, clock, Falling())
    work.run()
    with pytest.raises(MeasurementError, match=r"falls from .* afresh"):
        publish(work.measurement, store, now=clock.now(), source="a test")


def test_times_that_fell_by_chance_are_measured_again(store, clock):
    """One shot of the deeper engine is 40% too fast at first, within its bound of noise."""

    class Once(ClosedFormEngines):
        def measure(self, shot, samples, *, within_s):
            again = shot in self.asked
            found = super().measure(shot, samples, within_s=within_s)
            wrong = shot == a_shot(layers=4, requests=4) and not again
            return tuple(value * (0.6 if wrong else 1.0) for value in found)

    engines = Once()
    work = measuring(store, clock, engines)
    work.run()
    assert engines.opened == [(1, 2), (1, 4), (1, 2), (1, 4)]
    assert len(publish(work.measurement, store, now=clock.now(), source="a test").profile.points) == 6


def test_a_damaged_record_is_named(store, clock):
    measuring(store, clock, ClosedFormEngines()).run()
    key = next(key for key in store.list_keys("profiles") if "/steps/tp1" in key)
    store.put(key, b"[1, 2")
    with pytest.raises(StoreError, match=r"is no measured step.*delete it"):
        begun(subject(), store)


def test_other_flags_are_another_measurement(store, clock):
    measuring(store, clock, ClosedFormEngines()).run()
    other = replace(subject(), key=replace(KEY, flags=("--dtype", "bfloat16")))
    assert begun(other, store).times == {}
