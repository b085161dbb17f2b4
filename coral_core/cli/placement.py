"""`coral placement`: placement problems of your own, JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from coral_core.cli.options import AsJson, InputFile
from coral_core.cli.output import print_json, print_note, print_table
from coral_core.domain.placement import PlacementStatus
from coral_core.errors import InputError, NoSolutionError
from coral_core.report.figures import stages_text

app = App(name="placement", help="Solve placement problems of your own (JSON in, JSON out).")


@app.command
def solve(
    file: InputFile,
    *,
    method: Annotated[Literal["lattice", "ilp"], Parameter(help="Both find the same optimum.")] = "lattice",
    time_limit_s: Annotated[
        float, Parameter(validator=validators.Number(gt=0, lte=86_400), help="Method ilp: per number of stages.")
    ] = 60.0,
    as_json: AsJson = False,
) -> int:
    """Find the throughput-optimal placement of one problem or a list (format: docs/formats.md).

    The exit code is 3 where a time limit ended an integer program before its optimum was proven.
    """
    from coral_core.config.placement_file import placement_result_to_json, read_placement_file
    from coral_core.placement.methods import placement_method
    from coral_core.placement.verify import verify_placement

    problems, was_list = read_placement_file(file)
    solver = placement_method(method, time_limit_s=time_limit_s)
    results = []
    for index, problem in enumerate(problems):
        try:
            result = solver.solve(problem)
        except InputError as error:
            raise error.at(f"{file}[{index}]" if was_list else str(file)) from None
        if result.placement is not None:
            verify_placement(problem, result.placement, result.throughput_tokens_per_s)
        results.append(result)
    answers = [placement_result_to_json(result) for result in results]
    if as_json:
        print_json(answers if was_list else answers[0])
    else:
        _print(method, answers)
    unproven = [str(index) for index, result in enumerate(results) if result.status is PlacementStatus.UNPROVEN]
    if unproven:
        print_note(f"coral: not proven optimal within the time limit: problem {', '.join(unproven)}")
        return NoSolutionError.exit_code
    return 0


def _print(method: str, answers: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            index,
            answer["status"],
            answer["throughput_tokens_per_s"],
            stages_text(answer["stages"]) or None,
        )
        for index, answer in enumerate(answers)
    ]
    print_table(f"Placements ({method})", ("problem", "status", "tokens/s", "layers on nodes"), rows)
