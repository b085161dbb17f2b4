"""`coral calibrate`: how much headroom a plan needs, by model and phase, found in the simulator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from coral_core.cli.evaluate_scenario import Scenario, Seeds
from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.work import choose_executor, open_configured_store, resolved_scenario
from coral_core.errors import NoSolutionError

if TYPE_CHECKING:
    from tasks.calibrate import Calibration, Trial


def calibrate(
    scenario: Scenario = "tiny",
    *,
    policy: Annotated[str, Parameter(help="Whose plans are tried.")] = "coral",
    seeds: Seeds = (),
    target: Annotated[
        float | None, Parameter(help="Least share of every model's tokens within their SLO; default 0.995.")
    ] = None,
    handover: Annotated[
        bool, Parameter(help="Count hand-over from prefill to decode as time per output token, as clients see it.")
    ] = True,
    n_max: Annotated[
        int | None, Parameter(help="Most nodes in a combination, to be faster than with the scenario's own.")
    ] = None,
    executor: Annotated[Literal["auto", "ray", "inline"], Parameter(help="Who builds the libraries.")] = "auto",
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Find the cheapest headroom per model and phase at which a plan's simulated goodput meets its demand.

    Two shares are sought: slo_frac of the latency bound, and max_utilization_frac of the throughput. Seeds default to
    others than the scenarios', so that what is found is tried on requests it was not found with. The exit code is 3
    where a model misses the target at every headroom tried.
    """
    from coral_core.config.policies import scenario_policies
    from tasks.calibrate import SEEDS, TARGET_FRAC
    from tasks.calibrate import calibrate as calibrated
    from tasks.library import build_spec_from_scenario

    resolved = resolved_scenario(scenario)
    found = calibrated(
        resolved,
        scenario_policies(resolved, [policy])[policy],
        open_configured_store(store),
        choose_executor(executor, workers=os.cpu_count() or 1, spec=build_spec_from_scenario(resolved)),
        seeds=list(dict.fromkeys(seeds)) or SEEDS,
        target_frac=TARGET_FRAC if target is None else target,
        handover=handover,
        n_max=n_max,
        on_trial=(lambda _: None) if as_json else _tell,
    )
    if as_json:
        print_json(found.document)
    else:
        _show(found)
    return 0 if found.complete else NoSolutionError.exit_code


def _tell(trial: Trial) -> None:
    shares = ", ".join(f"{phase} {trial.slo_frac[phase]:g} x {share:g}" for phase, share in trial.utilization.items())
    print_note(f"{trial.model}: {shares}: {trial.cost_usd_per_h:.2f} USD/h, {trial.goodput_frac:.1%} within its SLO")


def _show(found: Calibration) -> None:
    """What was found, and the keys to put into the scenario."""
    from coral_core.report.evaluation_report import percent

    rows = [
        (one.model, phase, one.shown.slo_frac[phase], share)
        for one in found.models
        for phase, share in one.shown.utilization.items()
    ]
    print_table(
        f"{found.scenario}, {found.policy}: headroom", ("model", "phase", "slo_frac", "max_utilization_frac"), rows
    )
    print_text("")
    costs = [
        (
            one.model,
            one.without.cost_usd_per_h,
            percent(one.without.goodput_frac) if one.without.planned_full else "not planned",
            one.shown.cost_usd_per_h,
            percent(one.shown.goodput_frac),
            *map(one.shown.latencies_s.get, ("ttft_p99", "ttft_bound", "tpot_p99", "tpot_bound")),
        )
        for one in found.models
    ]
    columns = (
        *("model", "USD/h without", "goodput", "USD/h with", "goodput"),
        *("TTFT p99 s", "bound s", "TPOT p99 s", "bound s"),
    )
    print_table("Cost (predicted) and goodput (simulated, share of the offered tokens/s, worst seed)", columns, costs)
    for note in found.notes:
        print_text(f"note: {note}")
    if found.complete:
        print_text("\nput into the scenario:")
        print_text(found.capacity_yaml)
    else:
        missed = ", ".join(one.model for one in found.models if one.found is None)
        print_text(
            f"\n{found.target_frac:.1%} of the demand is not met at any headroom tried: {missed}; the best is shown"
        )
