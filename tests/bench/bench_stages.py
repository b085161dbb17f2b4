"""Throughput of the stage runtime on emulated nodes, beside stock vLLM's pipeline: JSON to standard output.

    PYTHONPATH=. python tests/bench/bench_stages.py --engine-python .venv-engine/bin/python [--runs 3] [--decodes]

Pace: a (2,3) layout of unequal nodes, and the best chain of the same nodes (one node per stage, whole layers) on vLLM's own
pipeline, with requests in groups that suit it and with 64 at once. Both run the same device (`tests/fakes/slow_worker.py`): a
step of n requests takes layers x layer_ms x ceil(n / 4). `predicted` is the template's formula.
Decodes: 16 requests that come at once, on layouts of two stages, where a step costs the same whatever it holds (`step`) or by
its tokens (`token`); `predicted` is what whole steps of half of the requests give.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fakes.stage_internals import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PACE = ("pace", "chain", "chain:64")
DECODES = tuple(f"decodes-{layout}-{cost}" for layout in ("1x2", "2-1", "2-3") for cost in ("step", "token"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", required=True, help="an interpreter that has vLLM")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--decodes", action="store_true", help="the second part instead of the first")
    given = parser.parse_args()
    for _ in range(given.runs):
        results = run(given.engine_python, DECODES if given.decodes else PACE)
        report = {name: figures(result) for name, result in results.items()}
        if not given.decodes:
            ours, chain = (results[name]["measured_tokens_per_s"] for name in ("pace", "chain"))
            report["pace"] |= {
                "of_predicted": round(ours / results["pace"]["predicted_tokens_per_s"], 3),
                "of_chain_predicted": round(ours / results["pace"]["chain_predicted_tokens_per_s"], 3),
                "of_chain_measured": round(ours / chain, 3),
            }
        json.dump({"load": os.getloadavg()[0]} | report, sys.stdout, indent=1)
        sys.stdout.write("\n")


def run(engine_python: str, scenarios: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What the driver says of each scenario."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "STAGE_DRIVER_FOLDER": folder}
        model = f"{folder}/model"
        subprocess.run([engine_python, "-m", "coral_core.engine.plugin.tiny_model", model], env=env, check=True)
        command = [engine_python, f"{ROOT}/tests/fakes/stage_driver.py", model, *scenarios]
        ran = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    results = {result.pop("scenario"): result for result in map(json.loads, ran.stdout.splitlines())}
    for name, result in results.items():
        if "failed" in result:
            sys.exit(f"{name}: {result['failed']}")
    return results


def figures(result: dict[str, Any]) -> dict[str, float]:
    """Those of a scenario that are numbers."""
    return {name: round(value, 3) for name, value in result.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    main()
