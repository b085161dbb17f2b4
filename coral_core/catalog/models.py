"""Model shapes that ship with the package; `load_models` (user_models) adds the user's own."""

from __future__ import annotations

from functools import cache
from importlib.resources.abc import Traversable
from typing import Final

from coral_core.catalog.shape_check import checked_shape
from coral_core.catalog.tables import Row, add_once, package_table, read_table
from coral_core.domain.models import Mla, ModelShape, Moe, SlidingWindow, Variant

VARIANT_COLUMNS: Final = (
    *("variant", "weight_bits", "expert_bits", "embedding_bits", "kv_bits"),
    *("compute_dtype", "expert_compute_dtype", "source", "as_of"),
)
MODEL_COLUMNS: Final = (
    *("model", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"),
    *("tied_embeddings", "max_context_tokens", "attention_bias"),
    *("experts", "top_k", "expert_intermediate", "shared_experts", "dense_layers", "expert_bias"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("window_tokens", "window_layers", "published_params", "variants", "source", "as_of"),
)


def package_models() -> dict[str, ModelShape]:
    """The package's models by name."""
    return dict(_package_models())


def standard_variants() -> dict[str, Variant]:
    """The ways to store and compute a model that the package knows, by name."""
    return dict(_standard_variants())


def read_variants(file: Traversable) -> dict[str, Variant]:
    """Variants of a table with VARIANT_COLUMNS."""
    variants: dict[str, Variant] = {}
    for row in read_table(file, VARIANT_COLUMNS):
        row.text("source")
        row.day("as_of")
        variant = Variant(
            name=row.text("variant"),
            weight_bits=row.positive("weight_bits"),
            expert_bits=row.positive("expert_bits"),
            embedding_bits=row.positive("embedding_bits"),
            kv_bits=row.positive("kv_bits"),
            compute_dtype=row.text("compute_dtype"),
            expert_compute_dtype=row.text("expert_compute_dtype"),
        )
        add_once(variants, variant.name, variant, row)
    return variants


def read_models(file: Traversable, variants: dict[str, Variant]) -> dict[str, ModelShape]:
    """Models of a table with MODEL_COLUMNS; the first of a model's variants is its default."""
    models: dict[str, ModelShape] = {}
    for row in read_table(file, MODEL_COLUMNS):
        allowed = row.members("variants", variants)
        shape = ModelShape(
            name=row.text("model"),
            layers=row.count("layers"),
            hidden=row.count("hidden"),
            heads=row.count("heads"),
            kv_heads=row.count("kv_heads"),
            head_dim=row.count("head_dim"),
            intermediate=row.count("intermediate"),
            vocab=row.count("vocab"),
            tied_embeddings=row.flag("tied_embeddings"),
            max_context_tokens=row.count("max_context_tokens"),
            attention_bias=row.flag("attention_bias"),
            moe=_moe(row) if row.filled("experts") else None,
            mla=_mla(row) if row.filled("kv_lora_rank") else None,
            sliding_window=_window(row) if row.filled("window_tokens") else None,
            published_params=row.optional_positive("published_params"),
            variants={variant.name: variant for variant in allowed},
            default_variant=allowed[0].name,
            source=row.text("source"),
            as_of=row.day("as_of"),
        )
        add_once(models, shape.name, checked_shape(shape, where=row.where), row)
    return models


def _moe(row: Row) -> Moe:
    return Moe(
        experts=row.count("experts"),
        top_k=row.count("top_k"),
        intermediate=row.count("expert_intermediate"),
        shared_experts=row.count_or_zero("shared_experts"),
        dense_layers=row.count_or_zero("dense_layers"),
        expert_bias=row.flag("expert_bias"),
    )


def _mla(row: Row) -> Mla:
    return Mla(
        kv_lora_rank=row.count("kv_lora_rank"),
        q_lora_rank=row.count("q_lora_rank") if row.filled("q_lora_rank") else None,
        qk_rope_head_dim=row.count("qk_rope_head_dim"),
        qk_nope_head_dim=row.count("qk_nope_head_dim"),
        v_head_dim=row.count("v_head_dim"),
    )


def _window(row: Row) -> SlidingWindow:
    return SlidingWindow(window_tokens=row.count("window_tokens"), layers=row.count("window_layers"))


@cache
def _standard_variants() -> dict[str, Variant]:
    return read_variants(package_table("variants.csv"))


@cache
def _package_models() -> dict[str, ModelShape]:
    return read_models(package_table("models.csv"), _standard_variants())
