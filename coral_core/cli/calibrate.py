"""`coral calibrate`: how much of a capacity a plan may count on, found in the simulator."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from coral_core.cli.evaluate_scenario import Scenario, Seeds, prepared
from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.errors import NoSolutionError


def calibrate(
    scenario: Scenario = "tiny",
    *,
    policy: Annotated[str, Parameter(help="Whose plans are tried.")] = "coral",
    seeds: Seeds = (),
    target: Annotated[float, Parameter(help="Least share of every model's tokens within their SLO.")] = 0.99,
    handover: Annotated[
        bool, Parameter(help="Count hand-over from prefill to decode as time per output token, as clients see it.")
    ] = True,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Find the highest max_utilization_frac per phase at which a plan's simulated goodput still meets its demand.

    The exit code is 3 where the target is not met even at the lowest fraction tried.
    """
    from coral_core.report.evaluation_report import percent
    from tasks.calibrate import Trial
    from tasks.calibrate import calibrate as calibrated

    source, chosen = prepared(scenario, [policy], store=store, quiet=as_json)

    def tell(trial: Trial) -> None:
        if not as_json:
            shares = ", ".join(f"{phase} {value:g}" for phase, value in trial.utilization.items())
            worst = min(trial.goodput_frac.values(), default=0.0)
            print_note(f"{shares}: {trial.cost_usd_per_h:.2f} USD/h, worst model {worst:.1%} within its SLO")

    found = calibrated(
        source,
        chosen[policy],
        list(dict.fromkeys(seeds)) or list(source.resolved.scenario.seeds),
        target_frac=target,
        handover=handover,
        on_trial=tell,
    )
    code = 0 if found.found else NoSolutionError.exit_code
    if as_json:
        print_json(found.document)
        return code
    last = found.trials[-1] if found.found else found.trials[0]
    shown = next((one for one in found.trials if one.utilization == found.found), last)
    rows = [
        (
            model,
            percent(shown.goodput_frac[model]),
            percent(shown.without_handover_goodput_frac[model]),
            *(
                shown.latencies_s.get(model, {}).get(name)
                for name in ("ttft_p99", "ttft_bound", "tpot_p99", "tpot_bound")
            ),
        )
        for model in shown.goodput_frac
    ]
    shares = ", ".join(f"{phase}: {value:g}" for phase, value in shown.utilization.items())
    columns = ("model", "goodput", "but for hand-over", "TTFT p99 s", "bound s", "TPOT p99 s", "bound s")
    print_table(f"{found.scenario}, {policy} at {shares} (simulated, shares of the offered tokens/s)", columns, rows)
    if found.found:
        print_text(f"put into the scenario:  capacity: {{max_utilization_frac: {{{shares}}}}}")
    else:
        print_text(f"{target:.1%} of every model's demand is not met at any fraction tried; this is the lowest")
    return code
