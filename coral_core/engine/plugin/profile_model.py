"""A model cut to its first layers: what profiles are measured on. Imported by name in every process of an engine."""

from __future__ import annotations

from typing import Any


def truncated(config: Any, layers: int) -> Any:  # noqa: ANN401 - a model's configuration, of whatever class
    """The configuration with `layers` layers; lists with one entry per layer are cut too. ValueError where it has fewer."""
    text = config.get_text_config()
    whole = getattr(text, "num_hidden_layers", None)
    if whole is None:  # vLLM also looks at a configuration that is not of the model's class yet
        return config
    if not 1 <= layers <= whole:
        raise ValueError(f"{layers} layers cannot be cut from a model of {whole}")
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == whole and name.startswith("layer"):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config
