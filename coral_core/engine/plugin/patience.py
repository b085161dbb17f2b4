"""Waits of an engine on the CPU: they sleep, so that what is waited for gets the processor.

vLLM's processes wait for one another in loops that yield the processor and ask again, which suits cores that have nothing
else to do. On a CPU node the cores are what computes, and a yield is no small thing there: on Linux 6.18 the loops of one
engine of two stages kept more than a hundred runnable threads of the others waiting for a minute.
"""

from __future__ import annotations

import os
import time
from typing import Final

PAUSE_S: Final = 0.0001
"""Short against a step; a waiting process costs a few hundredths of a core."""


def sleep_to_yield() -> None:
    """Let Python code of this process, and of those it forks, sleep where it would yield the processor."""
    setattr(os, "sched_yield", _pause)  # noqa: B010 - a patch, and said so


def wait_patiently() -> None:
    """Let a worker on the CPU wait for others by sleeping, in compiled code too; to be called before groups of ranks are made."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: PLC0415 - serve.py needs none
    from vllm.platforms import current_platform  # noqa: PLC0415

    if current_platform.is_cpu():
        sleep_to_yield()
        # Its exchange through shared memory yields inside compiled code; without it ranks use Gloo, which blocks.
        setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda _self: False)  # noqa: B010


def _pause() -> None:
    time.sleep(PAUSE_S)
