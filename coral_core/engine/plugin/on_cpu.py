"""What an engine's processes do otherwise on the CPU, where cores are what computes: they wait by sleeping, and start as forks.

* vLLM's processes wait for one another in loops that yield the processor and ask again, which suits cores that have nothing
  else to do. Here a yield is no small thing: on Linux 6.18 the loops of one engine of two stages kept more than a hundred
  runnable threads of the others waiting for a minute.
* vLLM forces `spawn` on the CPU, because threads bound to cores need processes that read OMP_* when they begin. Where the
  launch plan leaves one unbound thread to each process, forks do, and need not import again what takes most of a start.
* NIXL 1.5 asks for messages without a pause in a thread of each worker, which takes a core from an idle engine for good.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from typing import Any, Final

SHORTEST_S: Final = 0.0001
LONGEST_S: Final = 0.001
"""Of a pause: a longer wait has longer ones, each half as long as all before it. Short against a step, and few beside other work."""
NIXL_PAUSE_US: Final = 1000
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def sleep_to_yield() -> None:
    """On the CPU let Python code of this process, and of those it forks, sleep where it would yield the processor."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - after the version is answered for

    if current_platform.is_cpu():
        setattr(os, "sched_yield", _pauses.pause)  # noqa: B010 - a patch, and said so


def wait_patiently() -> None:
    """Let a worker on the CPU wait for others by sleeping, in compiled code too; to be called before groups of ranks are made."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: PLC0415 - serve.py needs none

    sleep_to_yield()
    # Its exchange through shared memory yields inside compiled code; without it ranks use Gloo, which blocks.
    setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda _self: False)  # noqa: B010


def let_nixl_sleep() -> None:
    """Let NIXL's agents of this process sleep between two looks; a message ends the sleep."""
    from nixl import _api  # noqa: PLC0415 - is there only where it is used

    class PatientAgent(_api.nixlBind.nixlAgent):
        def __init__(self, name: str, config: Any) -> None:  # noqa: ANN401 - compiled
            config.pthrDelay = NIXL_PAUSE_US  # its Python layer writes 0
            super().__init__(name, config)

    setattr(_api.nixlBind, "nixlAgent", PatientAgent)  # noqa: B010


def start_by_fork() -> None:
    """Where threads are single and unbound, make forks of what vLLM starts from here on; to be called before its engine is imported."""
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind" or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    from vllm.utils import system_utils  # noqa: PLC0415 - the engine's package imports it by name

    setattr(system_utils, "get_mp_context", lambda: multiprocessing.get_context("fork"))  # noqa: B010
    os.register_at_fork(after_in_child=_become_child)


def _become_child() -> None:
    """A fork holds the pipes by which its siblings would see that a parent has died, and its server's for signals: it must need neither."""
    end_with_parent()
    signal.set_wakeup_fd(-1)


class _Pauses(threading.local):
    """Of one thread: since when it waits, and when it last did."""

    began_s = ended_s = 0.0

    def pause(self) -> None:
        now_s = time.monotonic()
        if now_s - self.ended_s > SHORTEST_S:  # it has done something since: another wait
            self.began_s = now_s
        time.sleep(min(max((now_s - self.began_s) / 2, SHORTEST_S), LONGEST_S))
        self.ended_s = time.monotonic()


_pauses = _Pauses()
