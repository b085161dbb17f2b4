"""`coral bench fidelity`: the simulator beside real serving on this machine."""

from __future__ import annotations

import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.work import open_configured_store
from coral_core.errors import InputError, MeasurementError

if TYPE_CHECKING:
    from tasks.fidelity_compare import Fidelity

ServingName = Literal["aggregated", "disaggregated", "pipeline"]


def fidelity(
    *,
    serving: Annotated[
        tuple[ServingName, ...],
        Parameter(negative="", help="How the model is served; may be given several times. Default: all."),
    ] = (),
    requests: Annotated[int, Parameter(validator=validators.Number(gte=2), help="In the trace.")] = 60,
    requests_per_s: Annotated[float, Parameter(validator=validators.Number(gt=0), help="Poisson arrivals.")] = 1.5,
    runs: Annotated[int, Parameter(validator=validators.Number(gte=2), help="Real runs of the trace.")] = 2,
    layer_delay_ms: Annotated[
        str, Parameter(help="Sleep per layer, and per layer and token, in ms: a device of known speed. Empty: none.")
    ] = "10,0.05",
    kv_connector: Annotated[
        Literal["coral", "nixl"],
        Parameter(help="What moves KV from prefill to decode. NIXL's threads take most of a machine with two cores."),
    ] = "coral",
    max_cv: Annotated[float, Parameter(help="Coefficient of variation above which the profile refuses steps.")] = 0.25,
    seed: Annotated[int, Parameter(help="Of the trace.")] = 0,
    profile: Annotated[
        str | None, Parameter(help="Key of a profile in the store, measured with the same flags; default: measure one.")
    ] = None,
    store: StoreUrl = None,
    folder: Annotated[Path | None, Parameter(help="Keep models and logs here; default: a temporary folder.")] = None,
    as_json: AsJson = False,
) -> int:
    """Profile a tiny model on this machine's CPU, serve it with real vLLM behind the gateway, and simulate the same requests.

    A deviation is the mean over requests of |simulated - measured| over the mean measured; allowed are 10%, or 1.5 times
    the noise floor (one real run against another). Takes two to five minutes for each way of serving. Exit code 9 where
    a deviation is not allowed, or a way of serving could not be measured.
    """
    from dataclasses import replace

    from artifacts.profiles import read_profile
    from coral_core.cli.serve_extra import refuse_without
    from coral_core.config.settings import load_settings

    refuse_without("serving", "aiohttp", "msgspec", "prometheus_client", "uvicorn", "zmq")
    from coral_core.domain.launch import Runtime
    from tasks.fidelity import FidelitySpec, bench_fidelity
    from tasks.fidelity_compare import Fidelity, Serving

    if not re.fullmatch(r"(\d+(\.\d+)?(,\d+(\.\d+)?)?)?", layer_delay_ms):
        raise InputError(
            f"{layer_delay_ms!r} is no delay", where="--layer-delay-ms", fix="give milliseconds, such as 4 or 10,0.05"
        )
    chosen = tuple(Serving(name) for name in dict.fromkeys(serving)) or tuple(Serving)
    spec = FidelitySpec(
        servings=chosen,
        runtimes=(Runtime.VLLM, Runtime.CORAL) if kv_connector == "coral" else (Runtime.VLLM,),
        layer_delay_ms=layer_delay_ms,
        requests=requests,
        requests_per_s=requests_per_s,
        runs=runs,
        seed=seed,
    )
    spec = replace(spec, sweep=replace(spec.sweep, max_cv_frac=max_cv))
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coral-fidelity-")))
        _, found = bench_fidelity(
            spec,
            folder=place.absolute(),
            interpreter=load_settings().engine_interpreter(),
            profile=None if profile is None else read_profile(open_configured_store(store), profile),
            on_step=lambda text: None if as_json else print_note(text),
        )
    for each in found:
        if not isinstance(each, Fidelity):
            print_note(f"{each.serving.value} was not measured: {each.why}")
    if as_json:
        print_json({"layer_delay_ms": layer_delay_ms, "servings": [one.to_json() for one in found]})
    else:
        _print([one for one in found if isinstance(one, Fidelity)])
    met = all(isinstance(each, Fidelity) and all(one.met for one in each.compared) for each in found)
    return 0 if met else MeasurementError.exit_code


def _print(found: list[Fidelity]) -> None:
    if not found:
        return
    rows: list[dict[str, Any]] = [row for each in found for row in each.rows()]
    print_table("Latencies, seconds", tuple(rows[0]), [tuple(row.values()) for row in rows])
    columns = ("serving", "metric", "deviation", "noise floor", "allowed", "of the mean", "met")
    table = [
        (
            each.serving.value,
            one.metric,
            f"{one.deviation_frac:.1%}",
            f"{one.noise_floor_frac:.1%}",
            f"{one.allowed_frac:.1%}",
            f"{one.mean_deviation_frac:+.1%}",
            "yes" if one.met else "NO",
        )
        for each in found
        for one in each.compared
    ]
    print_table("Simulated against measured, request by request", columns, table)
    for each in found:
        print_text(f"{each.serving.value}: outside of steps {each.outside_s * 1e3:.1f} ms (measured on lone requests)")
