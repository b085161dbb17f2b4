"""`coral allocation`: allocation problems of your own, JSON in, JSON out."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson, InputFile
from coral_core.cli.output import print_json, print_note, print_table
from coral_core.errors import NoSolutionError

app = App(name="allocation", help="Solve allocation problems of your own (JSON in, JSON out).")


@app.command
def solve(
    file: InputFile,
    *,
    require_full: Annotated[
        bool, Parameter(negative="", help="Exit with code 3 where a demand or a floor is not fully met.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Find the cheapest allocation of one problem or a list (format: docs/formats.md)."""
    from coral_core.allocation.ilp import solve_allocation
    from coral_core.config.allocation_file import allocation_result_to_json, read_allocation_file
    from coral_core.report.figures import usd

    problems, was_list = read_allocation_file(file)
    results = [solve_allocation(problem) for problem in problems]
    answers = [allocation_result_to_json(result) for result in results]
    if as_json:
        print_json(answers if was_list else answers[0])
    else:
        for index, result in enumerate(results):
            print_table(
                f"Allocation {index}: {result.status.value}, {usd(result.objective_usd_per_h)} USD/h with start-up "
                f"(bound {usd(result.bound_usd_per_h)}, gap {result.gap_frac:.3%})",
                ("template", "region", "count"),
                [(item.template, item.region, item.count) for item in result.instances],
            )
            for item in result.shortfall:
                if item.unserved_frac > 0:
                    print_note(
                        f"shortfall: {item.model} {item.phase.value} misses {item.unserved_frac:.2%} of its demand"
                    )
                if item.spare_frac > 0:
                    print_note(
                        f"no spare: {item.model} {item.phase.value} would miss {item.after_loss_frac:.2%} of its demand "
                        "after the loss of an instance"
                    )
    missing = [index for index, result in enumerate(results) if not result.full]
    if require_full and missing:
        print_note(f"coral: not fully met: problem {', '.join(map(str, missing))}")
        return NoSolutionError.exit_code
    return 0
