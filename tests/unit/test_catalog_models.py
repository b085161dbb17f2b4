"""The package's models: dimensions against published parameter counts, architecture facts, and the strict reader."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from coral_core.catalog import find_model, load_models
from coral_core.catalog.models import MODEL_COLUMNS, VARIANT_COLUMNS, read_models, read_variants, standard_variants
from coral_core.catalog.tables import package_table
from coral_core.domain.model_math import active_params, total_params, weight_bytes
from coral_core.errors import InputError

PAPER_MODELS = {"phi-4", "gpt-oss-20b", "gpt-oss-120b", "qwen3-32b", "qwen3-235b", "llama-3-70b"}

TINY_MODELS = {"tiny-chat", "tiny-split"}
SERVED_ONLY = {"kimi-k2.5", "minimax-m2.5"}
"""Models that the reference has serving runs of, but no dimensions; their parameters agree with the published counts."""
"""Made by the engine's script, hence in no reference."""


@pytest.mark.parametrize("name", sorted(load_models()))
def test_parameters_agree_with_what_the_makers_publish(name):
    shape = load_models()[name]
    assert shape.published_params is not None
    assert total_params(shape) == pytest.approx(shape.published_params, rel=0.02)


@pytest.mark.parametrize(
    ("name", "published_active"),
    [
        ("gpt-oss-20b", 3.6e9),
        ("gpt-oss-120b", 5.1e9),
        ("qwen3-235b", 22e9),
        ("mixtral-8x7b", 12.9e9),
        ("deepseek-v3", 37e9),
    ],
)
def test_active_parameters_of_expert_models_agree_with_what_is_published(name, published_active):
    assert active_params(load_models()[name]) == pytest.approx(published_active, rel=0.03)


def test_the_six_published_models_and_at_least_four_more():
    assert set(load_models()) >= PAPER_MODELS
    assert len(load_models()) >= len(PAPER_MODELS) + 4


def test_what_makes_each_architecture_special_is_there():
    models = load_models()
    assert (models["gpt-oss-120b"].sliding_window.window_tokens, models["gpt-oss-120b"].sliding_window.layers) == (
        128,
        18,
    )
    assert models["gpt-oss-20b"].moe.expert_bias
    assert models["phi-4"].kv_heads == 10
    assert models["gemma-3-27b"].tied_embeddings
    assert models["gemma-3-27b"].sliding_window.layers == 52
    assert models["deepseek-v3"].mla.kv_lora_rank == 512
    assert (models["deepseek-v3"].moe.shared_experts, models["deepseek-v3"].moe.dense_layers) == (1, 3)
    assert all(models[name].moe is None for name in ("phi-4", "qwen3-32b", "llama-3-70b"))


def test_gpt_oss_as_published_has_experts_in_mxfp4_and_all_else_in_16_bits():
    shape = load_models()["gpt-oss-120b"]
    assert shape.default_variant == "mxfp4"
    # Its makers state a checkpoint of 60.8 GiB.
    assert weight_bytes(shape, "mxfp4") / 2**30 == pytest.approx(60.8, rel=0.01)
    assert weight_bytes(shape, "bf16") == 2 * total_params(shape)


def test_quantised_variants_are_smaller_and_16_bit_ones_exact():
    for shape in (shape for name, shape in load_models().items() if name not in TINY_MODELS):
        full = weight_bytes(shape, "bf16")
        assert full == 2 * total_params(shape)
        for name in set(shape.variants) - {"bf16", "fp16"}:
            assert 0.2 * full < weight_bytes(shape, name) < 0.62 * full


def test_tiny_models_are_in_32_bits_unless_asked_otherwise():
    for name in TINY_MODELS:
        shape = load_models()[name]
        assert shape.default_variant == "fp32"
        assert weight_bytes(shape, "fp32") == 4 * total_params(shape)


def test_a_wrong_name_gets_near_misses():
    with pytest.raises(InputError, match=r"unknown model 'Qwen3-32' \(did you mean qwen3-32b"):
        find_model(load_models(), "Qwen3-32")


def test_callers_cannot_change_what_others_load():
    load_models().clear()
    standard_variants().clear()
    assert "phi-4" in load_models()
    assert "bf16" in standard_variants()


def models_table(tmp_path: Path, **changes: str) -> Path:
    header, line = package_table("models.csv").read_text().splitlines()[0:2]
    cells = dict(zip(header.split(","), line.split(","), strict=True)) | changes
    path = tmp_path / "models.csv"
    path.write_text(f"{header}\n{','.join(cells.values())}\n")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "0"}, r"models.csv:2: layers is '0', must be a whole number of at least 1"),
        ({"layers": "nan"}, r"models.csv:2: layers is 'nan'"),
        ({"hidden": "-5120"}, r"models.csv:2: hidden is '-5120'"),
        ({"heads": ""}, r"models.csv:2: heads is empty"),
        ({"kv_heads": "7"}, r"models.csv:2: heads 40 is no multiple of kv_heads 7"),
        ({"layers": "1000000"}, r"models.csv:2: layers is 1000000, must be above 0 and at most 10000"),
        ({"tied_embeddings": "maybe"}, r"models.csv:2: unknown tied_embeddings 'maybe'"),
        ({"variants": "bf16 fp9"}, r"models.csv:2: unknown variants 'fp9' \(did you mean fp8"),
        ({"model": "Phi 4"}, r"models.csv:2: name 'Phi 4' is not a lower-case name"),
        ({"as_of": "yesterday"}, r"models.csv:2: as_of is 'yesterday'"),
        ({"window_tokens": "128", "window_layers": "41"}, r"sliding_window.layers 41 is more than the model's 40"),
        (
            {"experts": "4", "top_k": "5", "expert_intermediate": "8", "shared_experts": "0", "dense_layers": "0", "expert_bias": "no"},
            r"moe.top_k 5 is more than moe.experts 4",
        ),
        (
            {"experts": "4", "top_k": "2", "expert_intermediate": "8", "shared_experts": "0", "dense_layers": "40", "expert_bias": "no"},
            r"moe.dense_layers 40 leaves none",
        ),
        (
            {"experts": "4", "top_k": "2", "expert_intermediate": "8", "shared_experts": "x", "dense_layers": "0", "expert_bias": "no"},
            r"shared_experts is 'x', must be a whole number of at least 0",
        ),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_by_file_line_and_column(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        read_models(models_table(tmp_path, **changes), standard_variants())


def test_the_tables_have_the_documented_columns():
    for name, columns in {"models.csv": MODEL_COLUMNS, "variants.csv": VARIANT_COLUMNS}.items():
        assert package_table(name).read_text().splitlines()[0] == ",".join(columns)


def test_a_repeated_variant_is_refused(tmp_path):
    lines = package_table("variants.csv").read_text().splitlines()
    path = tmp_path / "variants.csv"
    path.write_text("\n".join([*lines, lines[-1]]))
    with pytest.raises(InputError, match=rf"variants.csv:{len(lines) + 1}: 'int4-experts' is there twice"):
        read_variants(path)


REFERENCE_NAMES = {
    "microsoft/phi-4": "phi-4",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b",
    "meta-llama/Llama-3.1-70B (=3.3-70B shape)": "llama-3-70b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "google/gemma-3-27b-it (text)": "gemma-3-27b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
}


def test_dimensions_agree_with_the_reference(reference_data):
    assert set(REFERENCE_NAMES.values()) == set(load_models()) - TINY_MODELS - SERVED_ONLY
    columns = {
        "hidden": "hidden",
        "layers": "layers",
        "heads": "heads",
        "kv_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate": "intermediate_dense",
        "vocab": "vocab",
    }
    with (reference_data / "specs" / "models.csv").open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    for reference, name in REFERENCE_NAMES.items():
        row, shape = rows[reference], load_models()[name]
        for field, column in columns.items():
            assert getattr(shape, field) == int(row[column]), (name, field)
        assert str(shape.tied_embeddings) == row["tied_embeddings"], name
        assert (shape.moe.experts if shape.moe else None) == (int(row["experts"]) if row["experts"] else None), name
        # The reference states the 3.1 release's context for Llama 3 70B; ours is that of the first release.
        if name != "llama-3-70b":
            assert shape.max_context_tokens == int(row["max_positions"]), name


@pytest.mark.parametrize(
    ("name", "changes"), [("tiny-chat", {}), ("tiny-split", {"hidden": 192, "heads": 6, "ffn": 384})]
)
def test_tiny_models_have_the_shape_that_their_script_writes(name, changes):
    from coral_core.engine.plugin.tiny_model import TinyModel

    written, shape = TinyModel(**changes), load_models()[name]
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (
        written.layers, written.hidden, written.heads, written.kv_heads,
    )  # fmt: skip
    assert (shape.head_dim, shape.intermediate, shape.vocab) == (written.head_dim, written.ffn, written.vocab)
    assert shape.max_context_tokens == written.context
    counted = sum(rows * columns for _, (rows, columns) in written.matrices()) + sum(n for _, n in written.norms())
    assert shape.published_params == counted
