"""Whether Ray's processes are gone."""

from __future__ import annotations

import contextlib

import psutil

from tests.fakes.waiting import until

# After SIGKILL of their raylet, these two try to report it for a minute before they go.
AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


def descendants(pid):
    return psutil.Process(pid).children(recursive=True)


def survivors(processes, but=frozenset()):
    """Names of those that do not end, having waited for all `but` some; they are then ended, so that no test leaves any."""
    alive = list(processes)
    names = []

    def only_those() -> bool:
        nonlocal alive, names
        _, alive = psutil.wait_procs(alive, timeout=0.1)
        names = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(process.name())
        return set(names) <= set(but)

    with contextlib.suppress(AssertionError):
        until(only_those)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [name for name in names if name not in but]
