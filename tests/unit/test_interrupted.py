"""Ctrl-C: it is said that a command was interrupted, and what serves on this machine ends however often it comes."""

from __future__ import annotations

import signal
import subprocess
import sys

from coral_core.cli.entry import run
from tasks.local_serving import ROOT, serving_processes

PROGRAM = r"""
import os, pathlib, signal, subprocess, sys
from tasks.local_serving import MARK, guarded
folder = pathlib.Path(sys.argv[1])
slow = folder / "slow-guard"
slow.write_text(f"#!/bin/sh\ncat >/dev/null\nsleep 1\nexec {sys.executable} \"$@\" </dev/null\n")
slow.chmod(0o755)
sys.executable = str(slow)  # so that the second interrupt surely comes while the guard is waited for
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with guarded(folder):
        subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(folder)}, start_new_session=True)
        try:
            print("up", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("ending", flush=True)
            raise
finally:
    print("over", flush=True)
"""


def test_a_command_that_is_interrupted_says_so(capsys, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coral_core.cli.scenario.print_table", interrupted)
    assert run(["scenario", "list"]) == 130
    assert capsys.readouterr().err == "coral: interrupted\n"


def test_whoever_is_impatient_and_interrupts_twice_leaves_nothing_either(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        for said in (b"up\n", b"ending\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"over\n"
        assert serving_processes(tmp_path) == 0
    assert process.returncode != 0
