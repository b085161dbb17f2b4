"""`coral predict`: TTFT and TPOT of one model replica under load, with error bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from coral_core.cli.options import AsJson, WholeNumber
from coral_core.cli.output import print_json, print_table, print_text

if TYPE_CHECKING:
    from coral_core.perf.prediction import Bar, Prediction


def predict(
    *,
    model: Annotated[str, Parameter(help="A model's name (`coral models list`) or its Hugging Face id.")],
    gpu: Annotated[str, Parameter(help="A GPU of the catalogue, such as H100.")],
    tp: Annotated[WholeNumber, Parameter(help="GPUs that the model is split over.")] = 1,
    input_tokens: Annotated[float, Parameter(help="Of each request.")] = 1024,
    output_tokens: Annotated[float, Parameter(help="Of each request.")] = 1024,
    concurrency: Annotated[WholeNumber, Parameter(help="Clients, each with one request at a time.")] = 16,
    dtype: Annotated[
        str | None, Parameter(help="Variant of the model; default: what its id says, else its own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the mean TTFT and TPOT of a replica under so many clients.

    Error bars are quantiles of the relative error on runs of models that nothing was fitted to (`coral ledger`). What
    lies beyond such comparisons on that GPU is said. Exit code 3 where the model does not fit.
    """
    from coral_core.catalog import load_models
    from coral_core.catalog.hardware import load_gpus
    from coral_core.catalog.model_ids import gpu_by_any_name, model_by_any_name, variant_by_name
    from coral_core.config.settings import load_settings
    from coral_core.perf.prediction import prediction
    from coral_core.perf.serving import ServingPoint

    models = load_models(load_settings().models)
    shape = model_by_any_name(models, model)
    found = prediction(
        ServingPoint(
            shape=shape,
            variant=variant_by_name(models, model, dtype),
            gpu=gpu_by_any_name(load_gpus(), gpu),
            tp=tp,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
        )
    )
    document = prediction_json(found)
    if as_json:
        print_json(document)
        return
    rows = [
        (name, document[f"{metric}_s"], *document[f"{metric}_p90_range_s"], document[f"{metric}_error"]["basis"])
        for name, metric in (("first token", "ttft"), ("per further token", "tpot"))
        if document[f"{metric}_s"] is not None
    ]
    point = found.point
    print_table(
        f"{shape.name} in {point.variant} on {tp} x {point.gpu.name}: {input_tokens:g} in, {output_tokens:g} out, "
        f"{concurrency} clients (predicted)",
        ("", "s", "low", "high", "error bars from"),
        rows,
        note="low and high hold nine of ten measurements of the comparisons named"
        + ("; no high: errors there reach 100%" if any(row[3] is None for row in rows) else ""),
    )
    if found.queue_bound:
        print_text(f"{document['running_requests']} of {concurrency} requests run at a time: the others wait")
    for reason in found.extrapolated:
        print_text(f"extrapolated: {reason}")


def prediction_json(found: Prediction) -> dict[str, Any]:
    """The prediction as a JSON document."""
    point, latencies = found.point, found.latencies
    return {
        "kind": "predicted",
        "model": point.shape.name,
        "dtype": point.variant,
        "gpu": point.gpu.name,
        "tp": point.tp,
        "input_tokens": point.input_tokens,
        "output_tokens": point.output_tokens,
        "concurrency": point.concurrency,
        "ttft_s": latencies.ttft_s,
        "ttft_p90_range_s": list(found.ttft.bounds(latencies.ttft_s)),
        "ttft_error": _bar_json(found.ttft),
        "tpot_s": latencies.tpot_s if found.tpot else None,
        "tpot_p90_range_s": list(found.tpot.bounds(latencies.tpot_s)) if found.tpot else None,
        "tpot_error": _bar_json(found.tpot) if found.tpot else None,
        "running_requests": latencies.running,
        "queue_bound": found.queue_bound,
        "source": "estimated",
        "extrapolated": list(found.extrapolated),
    }


def _bar_json(bar: Bar) -> dict[str, Any]:
    return {
        "n": bar.error.n,
        "p50_abs_error_frac": bar.error.median_frac,
        "p90_abs_error_frac": bar.error.p90_frac,
        "basis": bar.basis,
    }
