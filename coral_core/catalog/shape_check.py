"""What every model shape must satisfy, whoever wrote it down."""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from typing import Any, Final

from coral_core.domain.models import ModelShape
from coral_core.errors import InputError

# A name is a file name, a key in YAML and a part of object keys.
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

# Beyond any model there is; a figure above it is a slip of the keyboard or of the unit.
LARGEST: Final = {"layers": 10_000, "experts": 100_000, "published_params": 10**15}
LARGEST_OTHER: Final = 1_000_000_000

MAY_BE_ZERO: Final = frozenset({"shared_experts", "dense_layers"})
COMPUTE_DTYPES: Final = frozenset({"fp32", "fp16", "bf16", "fp8", "int8"})


def checked_shape(shape: ModelShape, *, where: str) -> ModelShape:
    """`shape` itself; InputError that names the field when a value is impossible or two contradict each other."""
    if not NAME.fullmatch(shape.name):
        raise InputError(
            f"name {shape.name!r} is not a lower-case name", where=where, fix="use letters a-z, digits and . _ - only"
        )
    _check_numbers(dataclasses.asdict(shape), "", where)
    for broken, text in _contradictions(shape):
        if broken:
            raise InputError(text, where=where)
    return shape


def _check_numbers(fields: dict[str, Any], path: str, where: str) -> None:
    """Every number is finite, above zero (see MAY_BE_ZERO) and not beyond reason."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _check_numbers(value, f"{path}{key}.", where)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            least = 0 if key in MAY_BE_ZERO else math.ulp(0.0)
            most = LARGEST.get(key, LARGEST_OTHER)
            if not least <= value <= most:
                lower = "at least 0" if key in MAY_BE_ZERO else "above 0"
                raise InputError(
                    f"{path}{key} is {reprlib.repr(value)}, must be {lower} and at most {most}", where=where
                )


def _contradictions(shape: ModelShape) -> list[tuple[bool, str]]:
    moe, window, variants = shape.moe, shape.sliding_window, shape.variants
    found = [
        (
            shape.mla is None and shape.heads % shape.kv_heads != 0,
            f"heads {shape.heads} is no multiple of kv_heads {shape.kv_heads}",
        ),
        (
            shape.default_variant not in variants,
            f"default_variant {shape.default_variant!r} is not among variants {', '.join(variants) or '(none)'}",
        ),
    ]
    for key, variant in variants.items():
        unknown = sorted({variant.compute_dtype, variant.expert_compute_dtype} - COMPUTE_DTYPES)
        found += [
            (key != variant.name, f"variants.{key} carries the name {variant.name!r}"),
            (
                bool(unknown),
                f"variants.{key} computes in {', '.join(unknown)}; known: {', '.join(sorted(COMPUTE_DTYPES))}",
            ),
        ]
    if moe is not None:
        found += [
            (moe.top_k > moe.experts, f"moe.top_k {moe.top_k} is more than moe.experts {moe.experts}"),
            (
                moe.dense_layers >= shape.layers,
                f"moe.dense_layers {moe.dense_layers} leaves none of the {shape.layers} layers to the experts",
            ),
        ]
    if window is not None:
        found.append(
            (
                window.layers > shape.layers,
                f"sliding_window.layers {window.layers} is more than the model's {shape.layers}",
            )
        )
    return found
