"""A scenario of one small model on three instance types in two AWS regions, at a rate of one's choice."""

from __future__ import annotations

from pathlib import Path

SCENARIO = """\
name: two-regions
catalog: aws-real
configs: [g5.xlarge, g6.xlarge, g6e.xlarge]
regions: [us-east-1, us-west-2]
models:
  - model: phi-4
    requests_per_s: {rate}
    lengths: azure-conv
    slo: {{ttft_s: 2.5, tpot_s: 0.2}}
library: {{n_max: 3, rho: 12}}
"""


def two_regions(folder: Path, rate: float, more: str = "") -> str:
    """The path of the scenario's file, with `more` at its end."""
    path = folder / f"rate-{rate:g}.yaml"
    path.write_text(SCENARIO.format(rate=rate) + more)
    return str(path)


def both_runtimes(folder: Path, rate: float, more: str = "") -> str:
    """The same for all that can be run: with vLLM alone a fleet on rented nodes would have hardly a choice."""
    return two_regions(folder, rate, "runtimes: [vllm, coral]\n" + more)
