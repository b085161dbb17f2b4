"""`coral placement`: placement problems of your own, JSON in, JSON out."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson, InputFile
from coral_core.cli.output import print_json, print_table

app = App(name="placement", help="Solve placement problems of your own (JSON in, JSON out).")


@app.command
def solve(
    file: InputFile,
    *,
    method: Annotated[Literal["lattice", "ilp"], Parameter(help="Both find the same optimum.")] = "lattice",
    as_json: AsJson = False,
) -> None:
    """Find the throughput-optimal placement of one problem or a list (format: docs/formats.md)."""
    from coral_core.config.placement_file import placement_result_to_json, read_placement_file
    from coral_core.placement.methods import placement_method
    from coral_core.placement.verify import verify_placement

    problems, was_list = read_placement_file(file)
    solver = placement_method(method)
    results = []
    for problem in problems:
        result = solver.solve(problem)
        if result.placement is not None:
            verify_placement(problem, result.placement, result.throughput_tokens_per_s)
        results.append(result)
    answers = [placement_result_to_json(result) for result in results]
    if as_json:
        print_json(answers if was_list else answers[0])
        return
    rows = [
        (
            index,
            result.status.value,
            result.throughput_tokens_per_s,
            " | ".join(f"{stage.layers}: {' '.join(stage.nodes)}" for stage in result.placement.stages)
            if result.placement
            else "-",
        )
        for index, result in enumerate(results)
    ]
    print_table(f"Placements ({method})", ("problem", "status", "tokens/s", "stages (layers: nodes)"), rows)
