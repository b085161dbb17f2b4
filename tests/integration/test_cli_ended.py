"""A command that is told to end takes its workers and its temporary folder with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_ended_leaves_nothing_behind(tmp_path, number):
    coral = str(Path(sys.executable).parent / "coral")
    command = [coral, "bench", "library", "--workers", "2", "--sample", "0", "--scenario", "paper-extended"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, start_new_session=True, stderr=subprocess.PIPE) as process:
        parent = psutil.Process(process.pid)
        deadline = time.monotonic() + 120
        workers: list[psutil.Process] = []
        while len(workers) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
            workers = [child for child in parent.children(recursive=True) if "spawn_main" in " ".join(child.cmdline())]
        assert len(workers) == 2
        assert list(tmp_path.glob("coral-bench-*"))
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # a terminal interrupts all that is in front
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + number, errors
    assert not list(tmp_path.glob("coral-bench-*"))
    psutil.wait_procs(workers, timeout=10)
    assert not [worker for worker in workers if worker.is_running()]
