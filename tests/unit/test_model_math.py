"""Parameter and byte counts against the figures the makers publish, and against counts done by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from coral_core.domain import model_math
from coral_core.domain.models import Mla, ModelShape, Moe, SlidingWindow, Variant
from coral_core.errors import InputError

BF16 = Variant(
    name="bf16",
    weight_bits=16,
    expert_bits=16,
    embedding_bits=16,
    kv_bits=16,
    compute_dtype="bf16",
    expert_compute_dtype="bf16",
)
MXFP4 = replace(BF16, name="mxfp4", expert_bits=4.25)


def shape(
    name: str,
    dims: tuple[int, int, int, int, int, int, int],
    *,
    tied: bool = False,
    bias: bool = False,
    moe: Moe | None = None,
    mla: Mla | None = None,
    window: SlidingWindow | None = None,
) -> ModelShape:
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocab = dims
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        tied_embeddings=tied,
        max_context_tokens=4096,
        source="test",
        as_of=date(2026, 11, 29),
        attention_bias=bias,
        moe=moe,
        mla=mla,
        sliding_window=window,
        variants={"bf16": BF16, "mxfp4": MXFP4},
    )


def mla(q_lora: int | None) -> Mla:
    return Mla(kv_lora_rank=512, q_lora_rank=q_lora, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)


GPT_OSS_120B = shape(
    "gpt-oss-120b",
    (2880, 36, 64, 8, 64, 2880, 201088),
    bias=True,
    moe=Moe(experts=128, top_k=4, intermediate=2880, expert_bias=True),
    window=SlidingWindow(window_tokens=128, layers=18),
)
DEEPSEEK_V3 = shape(
    "deepseek-v3",
    (7168, 61, 128, 128, 192, 18432, 129280),
    moe=Moe(experts=256, top_k=8, intermediate=2048, shared_experts=1, dense_layers=3),
    mla=mla(1536),
)
QWEN3_32B = shape("qwen3-32b", (5120, 64, 64, 8, 128, 25600, 151936))

PUBLISHED = [
    (shape("qwen3-14b", (5120, 40, 40, 8, 128, 17408, 151936)), 14.8, 14.8),
    (QWEN3_32B, 32.8, 32.8),
    (
        shape("qwen3-30b-a3b", (2048, 48, 32, 4, 128, 6144, 151936), moe=Moe(experts=128, top_k=8, intermediate=768)),
        30.5,
        3.3,
    ),
    (
        shape(
            "qwen3-235b-a22b", (4096, 94, 64, 4, 128, 12288, 151936), moe=Moe(experts=128, top_k=8, intermediate=1536)
        ),
        235,
        22,
    ),
    (shape("llama-3.1-70b", (8192, 80, 64, 8, 128, 28672, 128256)), 70.6, 70.6),
    (shape("phi-4", (5120, 40, 40, 10, 128, 17920, 100352)), 14.7, 14.7),
    (
        shape(
            "gpt-oss-20b",
            (2880, 24, 64, 8, 64, 2880, 201088),
            bias=True,
            moe=Moe(experts=32, top_k=4, intermediate=2880, expert_bias=True),
        ),
        20.9,
        3.6,
    ),
    (GPT_OSS_120B, 116.8, 5.1),
    (shape("mistral-small-24b", (5120, 40, 32, 8, 128, 32768, 131072)), 23.6, 23.6),
    (
        shape("mixtral-8x7b", (4096, 32, 32, 8, 128, 14336, 32000), moe=Moe(experts=8, top_k=2, intermediate=14336)),
        46.7,
        12.9,
    ),
    (
        shape("mixtral-8x22b", (6144, 56, 48, 8, 128, 16384, 32000), moe=Moe(experts=8, top_k=2, intermediate=16384)),
        141,
        39,
    ),
    (
        shape(
            "deepseek-v2",
            (5120, 60, 128, 128, 192, 12288, 102400),
            moe=Moe(experts=160, top_k=6, intermediate=1536, shared_experts=2, dense_layers=1),
            mla=mla(1536),
        ),
        236,
        21,
    ),
    (DEEPSEEK_V3, 671, 37),
    (
        shape(
            "deepseek-v2-lite",
            (2048, 27, 16, 16, 192, 10944, 102400),
            moe=Moe(experts=64, top_k=6, intermediate=1408, shared_experts=2, dense_layers=1),
            mla=mla(None),
        ),
        15.7,
        2.4,
    ),
    (shape("gemma-3-27b-text", (5376, 62, 32, 16, 128, 21504, 262208), tied=True), 27.0, 27.0),
    (shape("llama-3.1-8b", (4096, 32, 32, 8, 128, 14336, 128256)), 8.03, 8.03),
    (shape("llama-3.1-405b", (16384, 126, 128, 8, 128, 53248, 128256)), 405.9, 405.9),
    (
        shape(
            "llama-4-scout",
            (5120, 48, 40, 8, 128, 8192, 202048),
            moe=Moe(experts=16, top_k=1, intermediate=8192, shared_experts=1),
        ),
        109,
        17,
    ),
]


@pytest.mark.parametrize(("model", "total_billion", "_active"), PUBLISHED, ids=[m.name for m, _, _ in PUBLISHED])
def test_total_is_within_two_percent_of_what_is_published(
    model: ModelShape, total_billion: float, _active: float
) -> None:
    assert model_math.total_params(model) == pytest.approx(total_billion * 1e9, rel=0.02)


@pytest.mark.parametrize(("model", "_total", "active_billion"), PUBLISHED, ids=[m.name for m, _, _ in PUBLISHED])
def test_active_matches_what_is_published_up_to_the_input_table(
    model: ModelShape, _total: float, active_billion: float
) -> None:
    # Makers differ in whether they count the input table; ours never does.
    active = model_math.active_params(model)
    with_table = active + (0 if model.tied_embeddings else model.vocab * model.hidden)
    published = active_billion * 1e9
    assert min(abs(active - published), abs(with_table - published)) / published < 0.15


def test_dense_model_counted_by_hand() -> None:
    tiny = replace(shape("tiny", (4, 2, 2, 1, 3, 5, 7), bias=True), gated_mlp=False)
    attention = 4 * 6 + 4 * 3 + 4 * 3 + 6 * 4 + (6 + 3 + 3 + 4)
    counts = model_math.parameter_counts(tiny)
    assert counts.attention == 2 * attention
    assert counts.dense_mlp == 2 * 2 * 4 * 5
    assert counts.norms == 5 * 4
    assert model_math.embedding_params(tiny) == 2 * 7 * 4
    assert model_math.embedding_params(replace(tiny, tied_embeddings=True)) == 7 * 4
    assert model_math.total_params(tiny) == counts.attention + counts.dense_mlp + counts.norms + 56
    assert model_math.active_params(tiny) == model_math.total_params(tiny) - 28
    assert model_math.expert_params(tiny) == model_math.router_params_per_layer(tiny) == 0


def test_weight_bytes_follow_the_bits_of_each_part() -> None:
    counts = model_math.parameter_counts(GPT_OSS_120B)
    expected = 2 * (counts.total - counts.routed_experts) + counts.routed_experts * 4.25 / 8
    assert model_math.weight_bytes(GPT_OSS_120B, "mxfp4") == pytest.approx(expected)
    assert model_math.weight_bytes(GPT_OSS_120B, "mxfp4") == pytest.approx(65e9, rel=0.03)  # about the published files
    assert model_math.weight_bytes(QWEN3_32B, "bf16") == 2 * model_math.total_params(QWEN3_32B)
    assert model_math.weight_bytes_per_layer(QWEN3_32B, "bf16") * 64 == model_math.weight_bytes(QWEN3_32B, "bf16")


def test_layer_equivalents_add_up_to_the_model() -> None:
    equivalents = model_math.layer_equivalents(QWEN3_32B, "bf16")
    layer = (model_math.total_params(QWEN3_32B) - model_math.embedding_params(QWEN3_32B)) / 64 * 2
    assert (64 + equivalents) * layer == pytest.approx(model_math.weight_bytes(QWEN3_32B, "bf16"))


def test_kv_bytes() -> None:
    assert model_math.kv_bytes_per_token_per_layer(QWEN3_32B, "bf16") * 64 == 262144
    assert model_math.kv_bytes_per_token_per_layer(DEEPSEEK_V3, "bf16") * 61 == 70272
    # Half the layers keep 128 tokens.
    assert model_math.kept_tokens_per_layer(GPT_OSS_120B, 1128) == 628
    assert model_math.kept_tokens_per_layer(GPT_OSS_120B, 100) == 100
    assert model_math.kv_bytes_per_request_per_layer(GPT_OSS_120B, "bf16", 1128) * 36 == 73728 * 628


def test_unknown_variant_is_named() -> None:
    with pytest.raises(InputError, match=r"qwen3-32b has no variant 'int3' \(known: bf16, mxfp4\)"):
        model_math.weight_bytes(QWEN3_32B, "int3")
