"""What the fan-out refuses before any Ray starts."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from coral_core.errors import InputError
from tasks.executor import InlineExecutor, run_inline
from tasks.fanout import RayExecutor, fan_out
from tests.fakes.ray_work import double


@pytest.mark.parametrize("setting", ["workers", "chunk_size", "max_in_flight"])
def test_settings_that_run_nothing_are_refused(setting):
    with pytest.raises(InputError, match=f"{setting}: 0 is too small"):
        list(fan_out([1], double, **{setting: 0}))


@pytest.mark.parametrize("address", ["auto", "", "ray://head:10001", "head", "head:port", "head:6379/x", "a b:1"])
def test_addresses_that_are_not_explicit_are_refused(address):
    with pytest.raises(InputError, match="give local, or host:port"):
        list(fan_out([1], double, address=address))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no-such-host.invalid:6379"])
def test_an_address_where_nothing_answers_is_named(address):
    with pytest.raises(InputError, match=f"no Ray head answers at {address}"):
        list(fan_out([1], double, address=address))


def test_without_ray_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"Ray is not installed .*coral-serve\[flows\]"):
        list(RayExecutor()([1], double))


def test_nothing_to_do_starts_nothing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("looked for Ray"))
    assert list(fan_out([], double)) == []


def test_importing_the_fan_out_does_not_import_ray():
    code = "import sys, tasks.fanout, tasks.executor; sys.exit('ray' in sys.modules)"
    assert _exit_code(code) == 0


def test_processes_below_one_are_refused():
    with pytest.raises(InputError, match="processes: 0 processes"):
        run_inline([1], double, processes=0)


def test_inline_runs_as_it_is_asked_for_results():
    started = []

    def work(item):
        started.append(item)
        return item

    run = InlineExecutor()([1, 2, 3], work)
    assert next(run).result == 1
    assert started == [1]


def _exit_code(code: str) -> int:
    import subprocess

    return subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode
