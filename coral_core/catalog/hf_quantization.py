"""The dtype variants that a config.json allows: its own quantisation, or the standard ones of a plain checkpoint."""

from __future__ import annotations

from typing import Final

from coral_core.catalog.hf_fields import Fields, shown
from coral_core.catalog.models import standard_variants
from coral_core.domain.models import Variant

METHODS: Final = ("mxfp4", "fp8", "awq", "gptq")
PLAIN_VARIANTS: Final = ("bf16", "fp16", "fp8", "int4")
INTEGER_BITS: Final = (4, 8)


def variants_of(fields: Fields, *, has_experts: bool) -> tuple[dict[str, Variant], str]:
    """The variants by name, and the default: the checkpoint's own.

    A plain checkpoint may be served in any standard variant (quantised when it is loaded or before), one quantised
    by its makers as it is; MXFP4 (routed experts only, as GPT-OSS) in bf16 too. InputError for any other method.
    """
    standard = standard_variants()
    if fields.get("quantization_config") is None:
        default = "fp16" if _dtype(fields) == "float16" else "bf16"
        return {name: standard[name] for name in PLAIN_VARIANTS}, default
    quantization = fields.section("quantization_config")
    method = quantization.text("quant_method")
    if method == "mxfp4" and has_experts:
        return {name: standard[name] for name in ("mxfp4", "bf16")}, "mxfp4"
    if method == "mxfp4":
        raise quantization.fault("quant_method", "is mxfp4, which is known for the experts of an MoE model only")
    if method == "fp8":
        own = _fp8(quantization)
    elif method in {"awq", "gptq"}:
        own = _integer(quantization, method)
    else:
        raise quantization.fault(
            "quant_method", f"is {shown(method)}, which is not known", fix=f"known: {', '.join(METHODS)}"
        )
    return {own.name: own}, own.name


def _fp8(quantization: Fields) -> Variant:
    """8 bits, and one fp32 scale per block where the weights are scaled by blocks (else per tensor: nothing)."""
    block = quantization.array("weight_block_size")
    scale_bits = 0.0
    if block:
        sides = Fields(
            values={str(index): side for index, side in enumerate(block)},
            where=quantization.where,
            path=f"{quantization.path}weight_block_size.",
        )
        scale_bits = 32 / (sides.count("0") * sides.count("1"))
    return _uniform("fp8", 8 + scale_bits, "fp8")


def _integer(quantization: Fields, method: str) -> Variant:
    """Integers with an fp16 scale per group, and a zero of the same width where the groups are asymmetric."""
    bits = quantization.count("bits")
    if bits not in INTEGER_BITS:
        raise quantization.fault("bits", f"is {bits}", fix=f"known: {', '.join(map(str, INTEGER_BITS))}")
    # GPTQ's format stores zeros for symmetric groups too.
    zero_bits = bits if method == "gptq" or quantization.flag("zero_point", default=True) else 0
    # -1: one group per row, whose scale is lost among thousands of weights.
    per_row = quantization.get("group_size") == -1
    group_bits = 0.0 if per_row else (16 + zero_bits) / quantization.count("group_size")
    return _uniform(f"int{bits}", bits + group_bits, "fp16")


def _uniform(name: str, bits: float, compute_dtype: str) -> Variant:
    """All weights alike but embeddings and LM head, which such checkpoints keep in 16 bits, as the KV cache."""
    return Variant(
        name=name,
        weight_bits=bits,
        expert_bits=bits,
        embedding_bits=16,
        kv_bits=16,
        compute_dtype=compute_dtype,
        expert_compute_dtype=compute_dtype,
    )


def _dtype(fields: Fields) -> str:
    """`torch_dtype`, or `dtype` as newer files call it."""
    key = "dtype" if fields.get("torch_dtype") is None else "torch_dtype"
    return "bfloat16" if fields.get(key) is None else fields.text(key)
