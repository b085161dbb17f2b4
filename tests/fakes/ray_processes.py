"""Whether Ray's processes are gone."""

from __future__ import annotations

import contextlib

import psutil

# After SIGKILL of their raylet, these two try to report it for a minute before they go.
AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


def descendants(pid):
    return psutil.Process(pid).children(recursive=True)


def survivors(processes, within_s):
    """Names of those that still live after `within_s`; they are then ended, so that no test leaves any."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    names = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
            process.kill()
    return names
