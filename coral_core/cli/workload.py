"""`coral workload`: what a trace asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson
from coral_core.cli.output import print_json, print_table

app = App(name="workload", help="Traces and their statistics.")


@app.command
def summarize(
    trace: Path,
    *,
    format: Annotated[  # noqa: A002 - the option's natural name
        Literal["auto", "azure", "burstgpt", "mooncake"], Parameter(help="Recognised by its header or fields.")
    ] = "auto",
    requests_per_s: Annotated[float | None, Parameter(help="Scale the trace's rate to this first.")] = None,
    as_json: AsJson = False,
) -> None:
    """Summarise a trace: rate, lengths, burstiness, and the demand in tokens/s by phase."""
    from coral_core.workload import length_statistics, read_trace, scale_rate

    loaded = read_trace(trace, format)
    if requests_per_s is not None:
        loaded = scale_rate(loaded, requests_per_s)
    statistics = dataclasses.asdict(length_statistics(loaded))
    rate = statistics["requests_per_s"]
    statistics["prefill_tokens_per_s"] = rate * statistics["mean_input_tokens"]
    statistics["decode_tokens_per_s"] = rate * statistics["mean_output_tokens"]
    if as_json:
        print_json({"trace": loaded.name, "source": loaded.source, **statistics})
        return
    note = "burstiness: standard deviation over mean of the gaps between arrivals; 1 is Poisson, more is burstier"
    print_table(
        f"Trace {loaded.name}", ("statistic", "value"), list(statistics.items()), note=f"{loaded.source}\n{note}"
    )
