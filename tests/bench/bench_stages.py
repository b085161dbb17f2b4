"""Pace of unequal nodes in a (2,3) pipeline beside the best chain that stock vLLM can run on the same nodes: JSON to standard output.

    PYTHONPATH=. python tests/bench/bench_stages.py --engine-python .venv-engine/bin/python

Nodes are emulated: each sleeps so many milliseconds per step and layer, whatever the step holds, and takes at most 4 requests
per step. `predicted` is the template's throughput from the same delays; `chain` the best of all chains (one node per stage,
any nodes, whole layers) by the same formula, and `stock` what vLLM's own pipeline gives on that chain, run with its own executor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fakes.stage_internals import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", required=True, help="an interpreter that has vLLM")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "STAGE_DRIVER_FOLDER": folder}
        model = f"{folder}/model"
        subprocess.run([given.engine_python, "-m", "coral_core.engine.plugin.tiny_model", model], env=env, check=True)
        command = [given.engine_python, f"{ROOT}/tests/fakes/stage_driver.py", model, "pace", "chain"]
        ran = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    pace, chain = map(json.loads, ran.stdout.splitlines())
    for result in (pace, chain):
        if "failed" in result:
            sys.exit(result["failed"])
    measured = pace["measured_tokens_per_s"]
    report = {
        "predicted_tokens_per_s": pace["predicted_tokens_per_s"],
        "measured_tokens_per_s": measured,
        "measured_of_predicted": measured / pace["predicted_tokens_per_s"],
        "chain_predicted_tokens_per_s": pace["chain_tokens_per_s"],
        "stock_measured_tokens_per_s": chain["measured_tokens_per_s"],
        "measured_of_chain_predicted": measured / pace["chain_tokens_per_s"],
        "measured_of_stock_measured": measured / chain["measured_tokens_per_s"],
    }
    json.dump({name: round(value, 3) for name, value in report.items()}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
