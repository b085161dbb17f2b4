"""`coral models`: which models can be planned, and how to add one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson
from coral_core.cli.output import print_json, print_table, print_text
from coral_core.domain.models import ModelShape
from coral_core.errors import unknown_name

app = App(name="models", help="Models that can be planned; add one from a Hugging Face config.json.")


@app.command(name="list")
def list_models(*, as_json: AsJson = False) -> None:
    """List the models: parameters, layers, attention, experts, and the dtype variants each may be served in."""
    from coral_core.catalog import load_models
    from coral_core.config.settings import load_settings

    shapes = sorted(load_models(load_settings().models).values(), key=lambda shape: shape.name)
    if as_json:
        print_json([_model_json(shape) for shape in shapes])
        return
    rows = []
    for shape in shapes:
        facts = _model_json(shape)
        rows.append(
            (
                shape.name,
                _billions(facts["total_params"]),
                _billions(facts["active_params"]),
                shape.layers,
                _attention_text(shape).replace(", window", "\nwindow"),
                f"{shape.moe.top_k}/{shape.moe.experts}" if shape.moe else "-",
                round(facts["weight_bytes"] / 1e9, 3),
                ", ".join(f"{name}*" if name == shape.default_variant else name for name in shape.variants),
            )
        )
    columns = ("model", "params B", "active B", "layers", "attention", "experts", "GB", "variants")
    print_table(
        "Models",
        columns,
        rows,
        note="* the default variant, whose weights take the GB shown; experts: used of all; window: tokens in so many layers",
    )


@app.command
def show(name: str, *, as_json: AsJson = False) -> None:
    """Show a model: dimensions, parameters beside the published count, variants, source and date."""
    from coral_core.catalog import load_models
    from coral_core.config.settings import load_settings

    shapes = load_models(load_settings().models)
    if name not in shapes:
        raise unknown_name("model", name, shapes, where="NAME")
    facts = {**_model_json(shapes[name]), "attention": _attention_text(shapes[name])}
    if as_json:
        print_json(facts)
        return
    facts["variants"] = ", ".join(facts["variants"])
    print_table(f"Model {name}", ("what", "value"), [(key.replace("_", " "), value) for key, value in facts.items()])


@app.command
def add(
    config_json: Path,
    *,
    name: Annotated[
        str | None, Parameter(help="Name in scenarios; default: the file's `_name_or_path`, else its folder's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add a model from a Hugging Face config.json (kept under CORAL_MODELS, default .coral/models).

    Configurations rarely say what they belong to (`_name_or_path`); a `config.json` that does not is called after its
    folder, any other file after itself. The name is printed; --name replaces it.
    """
    from coral_core.catalog import read_hf_config, save_user_model
    from coral_core.config.settings import load_settings

    shape = read_hf_config(config_json, name=name)
    path = save_user_model(shape, load_settings().models)
    if as_json:
        print_json({**_model_json(shape), "path": str(path)})
        return
    facts = _model_json(shape)
    print_text(
        f"added {shape.name}: {facts['total_params'] / 1e9:.2f} B parameters, {shape.layers} layers, "
        f"variants {', '.join(shape.variants)} -> {path}"
    )


def _attention_text(shape: ModelShape) -> str:
    if shape.mla:
        return "MLA"
    kind = f"{shape.heads} heads, {shape.kv_heads} KV"
    if shape.sliding_window:
        kind += f", window {shape.sliding_window.window_tokens} in {shape.sliding_window.layers}"
    return kind


def _billions(params: float) -> str:
    return f"{params / 1e9:.1f}" if params >= 1e8 else f"{params / 1e9:.1g}"


def _model_json(shape: ModelShape) -> dict[str, Any]:
    from coral_core.domain.model_math import active_params, total_params, weight_bytes

    return {
        "name": shape.name,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "total_params": total_params(shape),
        "active_params": active_params(shape),
        "published_params": shape.published_params,
        "weight_bytes": weight_bytes(shape, shape.default_variant),
        "default_variant": shape.default_variant,
        "variants": sorted(shape.variants),
        "max_context_tokens": shape.max_context_tokens,
        "source": shape.source,
        "as_of": shape.as_of.isoformat(),
    }
