"""Shapes of models that only reference data is about; they do not ship in the catalogue."""

from __future__ import annotations

from datetime import date
from typing import Final

from coral_core.catalog.models import standard_variants
from coral_core.domain.models import ModelShape

_AS_OF: Final = date(2026, 11, 29)


def _dense(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    source: str,
    gated_mlp: bool = True,
) -> ModelShape:
    variant = standard_variants()["bf16"]
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        tied_embeddings=False,
        max_context_tokens=32768,
        gated_mlp=gated_mlp,
        source=source,
        as_of=_AS_OF,
        variants={"bf16": variant},
    )


SHAPES: Final = {
    shape.name: shape
    for shape in (
        _dense(
            "llama1_30b",
            layers=60,
            hidden=6656,
            heads=52,
            kv_heads=52,
            intermediate=17920,
            vocab=32000,
            source="Llama 1, 30B: its paper",
        ),
        _dense(
            "llama2_70b",
            layers=80,
            hidden=8192,
            heads=64,
            kv_heads=8,
            intermediate=28672,
            vocab=32000,
            source="config.json of meta-llama/Llama-2-70b-hf on Hugging Face",
        ),
        _dense(
            "llama2-13b",
            layers=40,
            hidden=5120,
            heads=40,
            kv_heads=40,
            intermediate=13824,
            vocab=32000,
            source="config.json of meta-llama/Llama-2-13b-hf on Hugging Face",
        ),
        _dense(
            "mistral-7b",
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            intermediate=14336,
            vocab=32000,
            source="config.json of mistralai/Mistral-7B-v0.1 on Hugging Face",
        ),
        _dense(
            "bloom-176b",
            layers=70,
            hidden=14336,
            heads=112,
            kv_heads=112,
            intermediate=57344,
            vocab=250880,
            source="config.json of bigscience/bloom on Hugging Face",
            gated_mlp=False,
        ),
    )
}
"""By the names that the reference data uses."""
