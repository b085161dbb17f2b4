"""Models and GPUs by the names that others give them: Hugging Face ids, systems of benchmark tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from coral_core.catalog.lookup import find_gpu, find_model
from coral_core.domain.hardware import Gpu
from coral_core.domain.models import ModelShape
from coral_core.errors import InputError

SAME_SHAPE: Final = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "meta-llama-3.1-70b": "llama-3-70b",
    "meta-llama-3-70b": "llama-3-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "qwen3-30b-a3b": "qwen3-30b",
    "qwen3-235b-a22b": "qwen3-235b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mistral-small-24b": "mistral-small-24b",
    "gemma-3-27b": "gemma-3-27b",
    "kimi-k2": "kimi-k2.5",
}
"""Names of models with the dimensions of one that ships."""

SAME_DTYPE: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp4": "mxfp4",
    "nvfp4": "mxfp4",
    "w4a16_mxfp4": "mxfp4",
}
"""Dtypes by the names of benchmark tables; models that come in MXFP4 are often listed under NVFP4."""

_SUFFIXES: Final = re.compile(r"-(instruct|chat|base|hf|it|fp8|fp4|nvfp4|awq|bf16|thinking|v0\.\d|\d{4})$")


def model_by_any_name(models: Mapping[str, ModelShape], name: str) -> ModelShape:
    """A model by its own name or by its id elsewhere, such as `openai/gpt-oss-120b`; InputError where there is none."""
    if name in models:
        return models[name]
    last = name.rsplit("/", 1)[-1].lower()
    while last not in models and last not in SAME_SHAPE and (shorter := _SUFFIXES.sub("", last)) != last:
        last = shorter
    found = SAME_SHAPE.get(last, last)
    return models[found] if found in models else find_model(models, name)


def gpu_by_any_name(gpus: Mapping[str, Gpu], name: str) -> Gpu:
    """A GPU by its own name or one that only differs in case and form factor, such as `h200_sxm`."""
    short = re.sub(r"_(sxm|server)$", "", name.lower()).replace("_", "-")
    for gpu in gpus.values():
        if gpu.name.lower() in {name.lower(), short}:
            return gpu
    return find_gpu(gpus, name)


def variant_by_dtype(shape: ModelShape, dtype: str | None) -> str:
    """The variant that a dtype names: the model's default without one; `fp4` and `int4` also name their expert-only forms.

    InputError lists the variants where none is meant.
    """
    if dtype is None:
        return shape.default_variant
    plain = SAME_DTYPE.get(dtype, dtype.removesuffix("_block").removesuffix("_wo"))
    for name in (dtype, plain, {"int4": "int4-experts"}.get(plain, plain)):
        if name in shape.variants:
            return name
    known = ", ".join(sorted(shape.variants))
    raise InputError(f"model {shape.name} has no variant {dtype!r}", where="dtype", fix=f"known: {known}")
