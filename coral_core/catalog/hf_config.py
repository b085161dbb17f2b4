"""Model shapes from Hugging Face `config.json` files.

The meaning of each field, and its value where the file leaves it out, are those of the architecture's configuration
class in the transformers library. What cannot be represented is refused, never approximated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

from coral_core.catalog.hf_fields import Fields, shown
from coral_core.catalog.hf_quantization import variants_of
from coral_core.catalog.json_files import read_json
from coral_core.catalog.shape_check import LARGEST, checked_shape
from coral_core.clock import SystemClock
from coral_core.domain.models import Mla, ModelShape, Moe, SlidingWindow
from coral_core.errors import InputError


def read_hf_config(path: Path, name: str | None = None) -> ModelShape:
    """The model that the config.json at `path` describes; without a `name`, called after the file or its folder.

    InputError as in `read_json`, and with file and key path as in `model_from_hf_config`; `as_of` is the day the file was last changed.
    """
    _, config = read_json(path)
    as_of = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).date()
    return model_from_hf_config(config, name=name or _name_from(config, path), where=str(path), as_of=as_of)


def model_from_hf_config(config: Mapping[str, Any], *, name: str, where: str, as_of: date | None = None) -> ModelShape:
    """The shape that `config` (a parsed config.json) describes, with the variants it may be served in.

    Raises InputError that names `where` and the key path: for an architecture that is not known (with those that
    are), a field that is missing, not a number, not finite, negative, zero or beyond any model, fields that contradict each other, and
    a quantisation that cannot be represented. `as_of` is today where it is not given.
    """
    if not isinstance(config, Mapping):
        raise InputError("is not a JSON object", where=where, fix="hand in a model's config.json")
    outer = Fields(values=config, where=where)
    model_type = outer.text("model_type")
    inner = outer.section("text_config") if model_type == "gemma3" else outer
    model_type = "gemma3_text" if model_type == "gemma3" else model_type
    if model_type not in FAMILIES:
        raise outer.fault(
            "model_type", f"is {shown(model_type)}, which is not known", fix=f"known: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    variants, default_variant = variants_of(outer, has_experts=family.moe is not None)
    fields = inner.with_defaults(family.defaults)
    layers = fields.count("num_hidden_layers", most=LARGEST["layers"])
    heads = fields.count("num_attention_heads")
    mla = _mla(fields) if family.mla else None
    context_tokens = fields.count("max_position_embeddings")
    shape = ModelShape(
        name=name,
        layers=layers,
        hidden=fields.count("hidden_size"),
        heads=heads,
        kv_heads=_kv_heads(fields, heads, family),
        head_dim=_head_dim(fields, heads) if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        intermediate=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_context_tokens=context_tokens,
        attention_bias=fields.flag("attention_bias", default=False),
        moe=family.moe(fields, layers) if family.moe else None,
        mla=mla,
        sliding_window=_sliding_window(fields, family, layers, context_tokens),
        variants=variants,
        default_variant=default_variant,
        source=f"Hugging Face config.json of a {model_type} model ({Path(where).name})",
        as_of=as_of or SystemClock().now().date(),
    )
    return checked_shape(shape, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How an architecture reads its config.json.

    `defaults`: values of fields left out. `moe`: its experts, from the fields and the number of layers.
    `sliding_layers`: how many layers have a sliding window where the file lists no `layer_types`; None: the
    architecture has none. `kv_heads_default_to_heads`: where `num_key_value_heads` is left out.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    moe: Callable[[Fields, int], Moe | None] | None = None
    mla: bool = False
    sliding_layers: Callable[[Fields, int], int] | None = None
    kv_heads_default_to_heads: bool = False


def _kv_heads(fields: Fields, heads: int, family: _Family) -> int:
    if family.mla or (family.kv_heads_default_to_heads and fields.get("num_key_value_heads") is None):
        return heads
    return fields.count("num_key_value_heads")


def _head_dim(fields: Fields, heads: int) -> int:
    head_dim = fields.optional_count("head_dim")
    if head_dim is not None:
        return head_dim
    hidden = fields.count("hidden_size")
    if hidden % heads:
        raise fields.fault("head_dim", f"is missing, and hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _mla(fields: Fields) -> Mla:
    return Mla(
        kv_lora_rank=fields.count("kv_lora_rank"),
        q_lora_rank=fields.optional_count("q_lora_rank"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
    )


def _sliding_window(fields: Fields, family: _Family, layers: int, context_tokens: int) -> SlidingWindow | None:
    window_tokens = fields.optional_count("sliding_window")
    if family.sliding_layers is None or window_tokens is None or window_tokens >= context_tokens:
        return None
    layer_types = fields.array("layer_types")
    if layer_types and len(layer_types) != layers:
        raise fields.fault("layer_types", f"has {len(layer_types)} entries for {layers} layers")
    # A tuple: what is not a text may have no hash.
    unknown = [kind for kind in layer_types if kind not in ("sliding_attention", "full_attention")]
    if unknown:
        raise fields.fault("layer_types", f"holds {shown(unknown[0])}, known are sliding_attention and full_attention")
    sliding = layer_types.count("sliding_attention") if layer_types else family.sliding_layers(fields, layers)
    return SlidingWindow(window_tokens=window_tokens, layers=sliding) if sliding else None


def _all_slide(_fields: Fields, layers: int) -> int:
    return layers


def _every_other_slides(_fields: Fields, layers: int) -> int:
    return (layers + 1) // 2


def _upper_slide(fields: Fields, layers: int) -> int:
    """Qwen: the layers from `max_window_layers` on, where windows are switched on at all."""
    if not fields.flag("use_sliding_window", default=False):
        return 0
    return max(0, layers - fields.count("max_window_layers", least=0))


def _all_but_every_nth_slide(fields: Fields, layers: int) -> int:
    """Gemma 3: five sliding layers, then a full one."""
    key = "_sliding_window_pattern" if fields.get("_sliding_window_pattern") is not None else "sliding_window_pattern"
    return layers - layers // fields.count(key)


def _mixtral_moe(fields: Fields, _layers: int) -> Moe:
    return Moe(
        experts=fields.count("num_local_experts", most=LARGEST["experts"]),
        top_k=fields.count("num_experts_per_tok"),
        intermediate=fields.count("intermediate_size"),
    )


def _gpt_oss_moe(fields: Fields, _layers: int) -> Moe:
    return Moe(
        experts=fields.count("num_local_experts", most=LARGEST["experts"]),
        top_k=fields.count("num_experts_per_tok"),
        intermediate=fields.count("intermediate_size"),
        expert_bias=True,
    )


def _qwen3_moe(fields: Fields, layers: int) -> Moe:
    if fields.count("decoder_sparse_step") != 1:
        raise fields.fault("decoder_sparse_step", "is not 1: layers with experts between dense ones are not known")
    dense = fields.array("mlp_only_layers")
    if sorted(dense, key=str) != sorted(range(len(dense)), key=str):
        raise fields.fault("mlp_only_layers", f"is {shown(dense)}: dense layers are known as the first ones only")
    if len(dense) >= layers:
        raise fields.fault("mlp_only_layers", f"leaves none of the {layers} layers to the experts")
    return Moe(
        experts=fields.count("num_experts", most=LARGEST["experts"]),
        top_k=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size"),
        dense_layers=len(dense),
    )


def _deepseek_moe(fields: Fields, _layers: int) -> Moe | None:
    if fields.get("n_routed_experts") is None:
        return None
    if fields.count("moe_layer_freq") != 1:
        raise fields.fault("moe_layer_freq", "is not 1: layers with experts between dense ones are not known")
    return Moe(
        experts=fields.count("n_routed_experts", most=LARGEST["experts"]),
        top_k=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size"),
        shared_experts=fields.optional_count("n_shared_experts", least=0) or 0,
        dense_layers=fields.count("first_k_dense_replace", least=0),
    )


_DEEPSEEK: Final = _Family(mla=True, moe=_deepseek_moe, defaults={"moe_layer_freq": 1, "first_k_dense_replace": 0})

FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(kv_heads_default_to_heads=True),
    "mistral": _Family(sliding_layers=_all_slide),
    "mixtral": _Family(sliding_layers=_all_slide, moe=_mixtral_moe),
    # The class has no field for the biases of its query, key and value projections: they are always there.
    "qwen2": _Family(sliding_layers=_upper_slide, defaults={"attention_bias": True}),
    "qwen3": _Family(sliding_layers=_upper_slide, defaults={"head_dim": 128}),
    "qwen3_moe": _Family(sliding_layers=_upper_slide, moe=_qwen3_moe, defaults={"decoder_sparse_step": 1}),
    "phi3": _Family(sliding_layers=_all_slide, kv_heads_default_to_heads=True),
    "gpt_oss": _Family(
        sliding_layers=_every_other_slides, moe=_gpt_oss_moe, defaults={"attention_bias": True, "head_dim": 64}
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma3_text": _Family(
        sliding_layers=_all_but_every_nth_slide,
        defaults={
            "tie_word_embeddings": True,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
}


def _name_from(config: object, path: Path) -> str:
    """A lower-case name from the file's own record of where it came from, its folder, or its name."""
    recorded = config.get("_name_or_path") if isinstance(config, Mapping) else None
    plain = path.resolve().parent.name if path.stem == "config" else path.stem
    text = recorded if isinstance(recorded, str) and recorded else plain
    return re.sub(r"[^a-z0-9._-]+", "-", text.rsplit("/", 1)[-1].lower()).strip("-._")
