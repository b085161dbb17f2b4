"""An engine's interpreter for those who profile: `profile_server` is the real one, `profile_steps` counts on a closed form.

`interpreter(folder)` writes an executable that takes `-m MODULE ARGUMENTS` as Python does.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIES = "FAKE_DIES_AFTER"
"""Variable: the program of steps ends after so many questions."""


def interpreter(folder: Path) -> Path:
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.fakes.profile_interpreter import main\nmain({str(path)!r})\n"
    )
    path.chmod(0o755)
    return path


def main(own: str) -> None:
    _, module, *arguments = sys.argv[1:]
    if module == "coral_core.engine.plugin.profile_steps":
        steps(arguments)
    else:
        sys.executable = own
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__")


def steps(arguments: list[str]) -> None:
    """As `profile_steps`: 10 ms and per layer 2 ms, 0.05 ms per token of a prompt, 0.2 ms per decoding request."""
    layers, tp = (int(arguments[arguments.index(flag) + 1]) for flag in ("--layers", "--tensor-parallel-size"))
    if "--refuse" in arguments:
        sys.stderr.write("ValueError: no such device\n")
        sys.exit(3)
    say({"layers": layers, "kv_tokens": 8000 // layers, "engine_start_s": 0.0, "version": "0.32.0"})
    left = int(os.environ.get(DIES, "1000000"))
    for line in sys.stdin:
        if left == 0:
            sys.exit(9)
        left -= 1
        asked = json.loads(line)
        tokens = asked["requests"] * asked["tokens"]
        own_s = 5e-5 * tokens if asked["phase"] == "prefill" else 2e-4 * asked["requests"] + 1e-6 * tokens
        seconds = 0.01 + layers * (2e-3 + own_s) / tp
        say({"samples_s": [seconds] * asked["samples"]})


def say(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
