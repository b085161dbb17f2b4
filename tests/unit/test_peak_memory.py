"""Peak memory of a process tree: children count, what has been given back still counts, a vanished process does not hurt."""

import os
import subprocess
import sys

from tasks import peak_memory
from tasks.peak_memory import PeakMemory, tree_bytes
from tests.fakes.waiting import until

MIB = 2**20


def test_memory_of_children_counts_even_when_it_is_given_back():
    script = f"data = bytearray(b'x') * {200 * MIB}; input()"
    before = tree_bytes(os.getpid())
    with PeakMemory() as memory, subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        try:
            until(lambda: memory.peak_bytes >= before + 200 * MIB - 20 * MIB, "what the child takes is seen")
        finally:
            child.communicate(b"\n")
        assert tree_bytes(os.getpid()) < before + 150 * MIB
    assert memory.peak_bytes >= before + 200 * MIB - 20 * MIB


def test_an_ended_process_has_no_memory():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert tree_bytes(ended.pid) == 0


def test_without_proc_the_kernels_own_peaks_stand_in(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_PROC", tmp_path / "none")
    with PeakMemory() as memory:
        pass
    assert memory.peak_bytes >= 10 * MIB
