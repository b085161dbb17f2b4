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
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp4": "mxfp4",
    "nvfp4": "mxfp4",
    "w4a16_mxfp4": "mxfp4",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
}
"""Dtypes by the names of benchmark tables; models that come in MXFP4 are often listed under NVFP4."""

_SUFFIXES: Final = re.compile(
    r"-(?P<word>instruct|chat|base|hf|it|thinking|dynamic|block|kv|quantized|v0\.\d|\d{4}"
    r"|(?P<dtype>fp8|fp4|nvfp4|mxfp4|bf16|awq|gptq|int4|int8|w4a16|w8a8))$"
)
_GPU_WORDS: Final = frozenset({"nvidia", "tesla", "sxm", "sxm2", "sxm4", "sxm5", "hbm3", "hbm3e", "server"})
_GPU_GB: Final = re.compile(r"-(\d+)(gb)?$")


def model_by_any_name(models: Mapping[str, ModelShape], name: str) -> ModelShape:
    """A model by its own name or by its id elsewhere, such as `openai/gpt-oss-120b`; InputError where there is none."""
    if name in models:
        return models[name]
    short = _shortened(models, name)[0]
    return models[short] if short in models else find_model(models, name)


def variant_by_name(models: Mapping[str, ModelShape], name: str, dtype: str | None) -> str:
    """The variant of the model called `name` that a dtype names; without one, what the name says: `Qwen/Qwen3-32B-FP8` is FP8.

    InputError for an unknown model, and with the variants where none is meant.
    """
    said = None if name in models else _shortened(models, name)[1]
    return variant_by_dtype(model_by_any_name(models, name), dtype or said)


def _shortened(models: Mapping[str, ModelShape], name: str) -> tuple[str, str | None]:
    """A name without owner and endings, and the dtype among these."""
    last, dtype = name.rsplit("/", 1)[-1].lower(), None
    while last not in models and last not in SAME_SHAPE and (ending := _SUFFIXES.search(last)):
        dtype = ending["dtype"] or dtype
        last = last[: ending.start()]
    return SAME_SHAPE.get(last, last), dtype


def gpu_by_any_name(gpus: Mapping[str, Gpu], name: str) -> Gpu:
    """A GPU by its own name or one that differs in case, form factor and memory size: `h200_sxm`, `NVIDIA H100 80GB HBM3`.

    InputError where there is none, also for a memory size that the GPU does not have.
    """
    short = "-".join(word for word in re.split(r"[-_ ]+", name.lower()) if word not in _GPU_WORDS)
    size = _GPU_GB.search(short)
    for gpu in gpus.values():
        own = gpu.name.lower()
        if own in {name.lower(), short}:
            return gpu
        if size and own in {f"{short[: size.start()]}-{size[1]}", short[: size.start()]} and _has_gb(gpu, int(size[1])):
            return gpu
    return find_gpu(gpus, name)


def _has_gb(gpu: Gpu, nominal_gb: int) -> bool:
    return abs(gpu.memory_bytes / (nominal_gb * 1e9) - 1) < 0.1  # drivers show somewhat more or less than the name says


def variant_by_dtype(shape: ModelShape, dtype: str | None) -> str:
    """The variant that a dtype names: the model's default without one; `fp4` and `int4` also name their expert-only forms.

    InputError lists the variants where none is meant.
    """
    if dtype is None or dtype.lower() == "auto":
        return shape.default_variant
    lower = dtype.lower()
    plain = SAME_DTYPE.get(lower, lower.removesuffix("_block").removesuffix("_wo"))
    for name in (dtype, plain, {"int4": "int4-experts"}.get(plain, plain)):
        if name in shape.variants:
            return name
    known = ", ".join(sorted(shape.variants))
    raise InputError(f"model {shape.name} has no variant {dtype!r}", where="dtype", fix=f"known: {known}")
