"""Shapes from config.json files: each architecture gives the shape that its makers publish, and faults name the key."""

from __future__ import annotations

import dataclasses
import json
from datetime import date
from pathlib import Path

import pytest

from coral_core.catalog import load_models, model_from_hf_config, read_hf_config
from coral_core.catalog.hf_config import FAMILIES
from coral_core.domain.model_math import total_params, weight_bytes
from coral_core.errors import InputError

BASE = {"torch_dtype": "bfloat16", "tie_word_embeddings": False}


def config(model_type: str, layers: int, hidden: int, heads: int, **fields: object) -> dict[str, object]:
    return BASE | {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **fields,
    }


def rest(kv_heads: int, intermediate: int, vocab: int, context: int) -> dict[str, object]:
    return {
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


QWEN3 = {"head_dim": 128, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 64}
QWEN3_MOE = QWEN3 | {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
GPT_OSS = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "num_experts_per_tok": 4}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
DEEPSEEK = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip

# The fields of the published files that shape the model.
PUBLISHED = {
    "phi-4": config("phi3", 40, 5120, 40, **rest(10, 17920, 100352, 16384), sliding_window=None),
    "gpt-oss-20b": config(
        "gpt_oss", 24, 2880, 64, **rest(8, 2880, 201088, 131072), **GPT_OSS, num_local_experts=32,
        layer_types=["sliding_attention", "full_attention"] * 12, quantization_config=MXFP4,
    ),
    "gpt-oss-120b": config(
        "gpt_oss", 36, 2880, 64, **rest(8, 2880, 201088, 131072), **GPT_OSS, num_local_experts=128,
        quantization_config=MXFP4,
    ),
    "qwen3-32b": config("qwen3", 64, 5120, 64, **rest(8, 25600, 151936, 40960), **QWEN3),
    "qwen3-235b": config("qwen3_moe", 94, 4096, 64, **rest(4, 12288, 151936, 40960), **QWEN3_MOE, moe_intermediate_size=1536),
    "qwen3-30b": config("qwen3_moe", 48, 2048, 32, **rest(4, 6144, 151936, 40960), **QWEN3_MOE, moe_intermediate_size=768),
    "llama-3-70b": config("llama", 80, 8192, 64, **rest(8, 28672, 128256, 8192)),
    "llama-3.1-8b": config("llama", 32, 4096, 32, **rest(8, 14336, 128256, 131072)),
    "mistral-small-24b": config("mistral", 40, 5120, 32, **rest(8, 32768, 131072, 32768), head_dim=128, sliding_window=None),
    "mixtral-8x7b": config(
        "mixtral", 32, 4096, 32, **rest(8, 14336, 32000, 32768), num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    "deepseek-v3": config("deepseek_v3", 61, 7168, 128, **rest(128, 18432, 129280, 163840), **DEEPSEEK),
    # Gemma 3's file holds what differs from its class, below text_config.
    "gemma-3-27b": {
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {},
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
        },
    },
}  # fmt: skip
DIMENSIONS = [
    field.name
    for field in dataclasses.fields(load_models()["phi-4"])
    if field.name not in {"name", "source", "as_of", "published_params", "variants"}
]


def shape_of(values: dict[str, object], **changes: object):
    changed = {key: value for key, value in (values | changes).items() if value is not ...}
    return model_from_hf_config(changed, name="m", where="config.json")


UNREAD = {"kimi-k2.5", "minimax-m2.5"}
"""Their files are nested or of an architecture that `coral models add` does not read; their rows were taken down by hand."""


def test_every_package_model_is_covered():
    assert set(PUBLISHED) | UNREAD == {name for name in load_models() if not name.startswith("tiny-")}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_file_gives_the_package_model(name):
    found, stated = shape_of(PUBLISHED[name]), load_models()[name]
    for field in DIMENSIONS:
        assert getattr(found, field) == getattr(stated, field), field
    assert total_params(found) == total_params(stated)


def test_defaults_of_classes_are_used_where_fields_are_left_out():
    assert shape_of(PUBLISHED["llama-3.1-8b"], num_key_value_heads=...).kv_heads == 32
    assert shape_of(PUBLISHED["qwen3-32b"], head_dim=...).head_dim == 128
    qwen2 = shape_of(config("qwen2", 28, 3584, 28, **rest(4, 18944, 152064, 32768)))
    assert qwen2.attention_bias
    # Qwen2.5-7B has 7.62 B parameters.
    assert total_params(qwen2) == pytest.approx(7.62e9, rel=5e-3)
    small = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240}
    gemma = shape_of(small | {"sliding_window": 1024})
    # The text part of Gemma 3 4B has 3.88 B parameters.
    assert total_params(gemma) == pytest.approx(3.88e9, rel=5e-3)
    assert (gemma.tied_embeddings, gemma.sliding_window.layers) == (True, 29)


def test_sliding_windows_are_counted_as_the_architecture_does():
    mistral = shape_of(config("mistral", 32, 4096, 32, **rest(8, 14336, 32000, 32768)), sliding_window=4096)
    assert (mistral.sliding_window.window_tokens, mistral.sliding_window.layers) == (4096, 32)
    assert shape_of(PUBLISHED["phi-4"], sliding_window=16384).sliding_window is None
    qwen = PUBLISHED["qwen3-32b"] | {"sliding_window": 4096}
    assert shape_of(qwen).sliding_window is None
    assert shape_of(qwen, use_sliding_window=True, max_window_layers=50).sliding_window.layers == 14
    assert shape_of(qwen, use_sliding_window=True, max_window_layers=64).sliding_window is None
    assert shape_of(PUBLISHED["gpt-oss-20b"], layer_types=...).sliding_window.layers == 12
    assert shape_of(PUBLISHED["llama-3-70b"], sliding_window=128).sliding_window is None


def test_deepseek_v2_lite_has_no_compressed_queries_and_may_have_no_experts():
    lite = PUBLISHED["deepseek-v3"] | {"model_type": "deepseek_v2", "q_lora_rank": None}
    assert shape_of(lite).mla.q_lora_rank is None
    assert shape_of(lite, n_routed_experts=None).moe is None
    assert shape_of(lite, n_shared_experts=None).moe.shared_experts == 0


def test_a_plain_checkpoint_may_be_served_in_the_standard_variants():
    for dtype, default in {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16", None: "bf16"}.items():
        shape = shape_of(PUBLISHED["phi-4"], torch_dtype=dtype)
        assert shape.default_variant == default
        assert set(shape.variants) == {"bf16", "fp16", "fp8", "int4"}
    assert shape_of(PUBLISHED["phi-4"], torch_dtype=..., dtype="float16").default_variant == "fp16"


@pytest.mark.parametrize(
    ("quantization", "name", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8 + 32 / 128**2),
        ({"quant_method": "fp8"}, "fp8", 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4", 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "int4", 4 + 16 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "int4", 4 + 20 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", 8),
    ],
)
def test_a_quantised_checkpoint_is_served_as_it_is(quantization, name, bits):
    shape = shape_of(PUBLISHED["llama-3.1-8b"], quantization_config=quantization)
    assert list(shape.variants) == [shape.default_variant] == [name]
    variant = shape.variants[name]
    assert variant.weight_bits == variant.expert_bits == pytest.approx(bits)
    assert variant.embedding_bits == variant.kv_bits == 16
    outer = 2 * shape.vocab * shape.hidden
    assert weight_bytes(shape, name) == pytest.approx((total_params(shape) - outer) * bits / 8 + outer * 2)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi-4", {"model_type": ...}, "config.json: model_type is missing"),
        ("phi-4", {"model_type": 5}, "config.json: model_type is 5, must be a text"),
        ("phi-4", {"model_type": "mamba"}, r"model_type is 'mamba', which is not known \(known: llama, mistral, .*gemma3"),
        ("phi-4", {"hidden_size": ...}, "config.json: hidden_size is missing"),
        ("phi-4", {"hidden_size": None}, "hidden_size is missing"),
        ("phi-4", {"hidden_size": NAN}, "hidden_size is nan, must be a whole number of at least 1"),
        ("phi-4", {"hidden_size": INF}, "hidden_size is inf"),
        ("phi-4", {"hidden_size": 0}, "hidden_size is 0"),
        ("phi-4", {"hidden_size": -5120}, "hidden_size is -5120"),
        ("phi-4", {"hidden_size": 5120.5}, "hidden_size is 5120.5"),
        ("phi-4", {"hidden_size": "5120"}, "hidden_size is '5120', must be a whole number"),
        ("phi-4", {"hidden_size": True}, "hidden_size is True, must be a whole number"),
        ("phi-4", {"hidden_size": 10**12}, "config.json: hidden_size is 1000000000000, must be at most 1000000000"),
        ("phi-4", {"num_hidden_layers": 10**400}, r"num_hidden_layers is 1000\d*\.\.\.\d*, must be at most 10000"),
        ("phi-4", {"num_hidden_layers": 10_001}, "num_hidden_layers is 10001, must be at most 10000"),
        ("phi-4", {"vocab_size": -(10**400)}, r"vocab_size is -1000\d*\.\.\.\d*, must be a whole number of at least 1"),
        ("phi-4", {"vocab_size": 1e308}, r"vocab_size is 1e\+308, must be at most"),
        ("phi-4", {"vocab_size": "9" * 5000}, r"vocab_size is '999\d*\.\.\.9*', must be a whole number"),
        ("phi-4", {"model_type": ["llama"]}, r"model_type is \['llama'\], must be a text"),
        ("mixtral-8x7b", {"num_local_experts": 100_001}, "num_local_experts is 100001, must be at most 100000"),
        ("qwen3-235b", {"mlp_only_layers": [10**400]}, "dense layers are known as the first ones only"),
        ("gpt-oss-20b", {"layer_types": [["a"]] * 24}, r"layer_types holds \['a'\], known are"),
        ("gpt-oss-20b", {"layer_types": [{}] * 24}, r"layer_types holds \{\}, known are"),
        ("phi-4", {"hidden_size": 5121}, "head_dim is missing, and hidden_size 5121 is no multiple of 40 heads"),
        ("phi-4", {"num_key_value_heads": 7}, "heads 40 is no multiple of kv_heads 7"),
        ("phi-4", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', must be true or false"),
        ("phi-4", {"quantization_config": []}, r"quantization_config is \[\], must be an object"),
        ("phi-4", {"quantization_config": {}}, "quantization_config.quant_method is missing"),
        ("phi-4", {"quantization_config": {"quant_method": "bitsandbytes"}}, r"quantization_config.quant_method is 'bitsandbytes', which is not known \(known: mxfp4"),
        ("phi-4", {"quantization_config": MXFP4}, "is mxfp4, which is known for the experts"),
        ("phi-4", {"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config.bits is 3"),
        ("phi-4", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.group_size is missing"),
        ("phi-4", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}, "weight_block_size.1 is 0"),
        ("phi-4", {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "weight_block_size is 128, must be a list"),
        ("gemma-3-27b", {"text_config": ...}, "text_config is missing"),
        ("gemma-3-27b", {"text_config": {"num_hidden_layers": 62}}, "text_config.hidden_size is missing"),
        ("gemma-3-27b", {"text_config": {"num_hidden_layers": "x"}}, "text_config.num_hidden_layers is 'x'"),
        ("qwen3-235b", {"decoder_sparse_step": 2}, "decoder_sparse_step is not 1"),
        ("qwen3-235b", {"mlp_only_layers": [5]}, "dense layers are known as the first ones only"),
        ("qwen3-235b", {"mlp_only_layers": list(range(94))}, "leaves none of the 94 layers"),
        ("qwen3-235b", {"num_experts_per_tok": 129}, "moe.top_k 129 is more than moe.experts 128"),
        ("qwen3-235b", {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ("mixtral-8x7b", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
        ("deepseek-v3", {"kv_lora_rank": ...}, "kv_lora_rank is missing"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 24 layers"),
        ("gpt-oss-20b", {"layer_types": ["chunked"] * 24}, "layer_types holds 'chunked'"),
        ("gpt-oss-20b", {"sliding_window": -128}, "sliding_window is -128"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(name, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        shape_of(PUBLISHED[name], **changes)
    assert caught.value.where == "config.json"


def test_first_layers_may_be_dense():
    assert shape_of(PUBLISHED["qwen3-235b"], mlp_only_layers=[1, 0]).moe.dense_layers == 2


def write(folder: Path, content: object, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("digits", [401, 5001])
def test_a_number_of_any_length_is_refused_by_its_key(tmp_path, digits):
    text = json.dumps(PUBLISHED["phi-4"]).replace('"num_hidden_layers": 40', f'"num_hidden_layers": {"7" * digits}')
    with pytest.raises(InputError, match=r"config.json: num_hidden_layers is 7+\.\.\.7+, must be at most 10000$"):
        read_hf_config(write(tmp_path, text))


def test_a_file_is_read_named_and_dated(tmp_path):
    path = write(tmp_path / "My Phi-4", PUBLISHED["phi-4"])
    shape = read_hf_config(path, "phi-x")
    assert (shape.name, shape.layers, shape.published_params) == ("phi-x", 40, None)
    assert isinstance(shape.as_of, date)
    assert read_hf_config(path).name == "my-phi-4"
    assert read_hf_config(write(tmp_path, PUBLISHED["phi-4"], "Phi_4.json")).name == "phi_4"
    recorded = PUBLISHED["phi-4"] | {"_name_or_path": "microsoft/Phi-4"}
    assert read_hf_config(write(tmp_path, recorded)).name == "phi-4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama",\n', r"config.json:2: not valid JSON"),
        ("[1]", r"config.json: is not a JSON object"),
        ("", r"config.json:1: not valid JSON"),
        ("[" * 200_000, r"config.json: cannot be read"),
        (b"\xff", r"config.json: cannot be read"),
        (b" " * 10_000_001, r"config.json: is larger than 10 MB \(hand in a model's config.json\)"),
        ('{"model_type": "llama", "model_type": "phi3"}', r"config.json: key 'model_type' is there twice"),
        ('{"model_type": "llama", "a": [{"b": {"c": 1, "c": 2}}]}', r"config.json: key 'c' is there twice"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read_hf_config(write(tmp_path, content))


def test_an_absent_file_and_an_impossible_name_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_hf_config(tmp_path / "absent.json")
    with pytest.raises(InputError, match="name 'A b' is not a lower-case name"):
        read_hf_config(write(tmp_path, PUBLISHED["phi-4"]), "A b")


def test_every_architecture_named_in_the_documentation_is_known():
    assert set(FAMILIES) == {
        *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gpt_oss", "mixtral"),
        *("deepseek_v2", "deepseek_v3", "gemma3_text"),
    }
