"""A command that is told to end takes its workers and its temporary folder with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fakes.waiting import PATIENT_S, until

pytestmark = pytest.mark.servers


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Both, once they are there."""
    assert process.poll() is None
    below = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in below if "spawn_main" in " ".join(child.cmdline())]
    return workers if len(workers) == 2 else []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_ended_leaves_nothing_behind(tmp_path, number):
    coral = str(Path(sys.executable).parent / "coral")
    command = [coral, "bench", "library", "--workers", "2", "--sample", "0", "--scenario", "paper-extended"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, start_new_session=True, stderr=subprocess.PIPE) as process:
        try:
            workers = until(lambda: workers_of(process), "two workers", within_s=300.0)
            assert list(tmp_path.glob("coral-bench-*"))
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # a terminal interrupts all that is in front
            else:
                process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == 128 + number, errors
    assert not list(tmp_path.glob("coral-bench-*"))
    psutil.wait_procs(workers, timeout=PATIENT_S)
    assert not [worker for worker in workers if worker.is_running()]
