"""Quantities carry their unit in their name, in every field of every record."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

QUANTITIES = {
    *("latency", "duration", "time", "delay", "interval", "timeout", "period", "elapsed", "deadline", "age", "ttft"),
    *("price", "cost", "budget", "rate", "bandwidth", "memory", "throughput", "demand", "shortfall", "gap", "share"),
}
"""Words whose size means nothing without a unit."""

UNIT = re.compile(r"(?:^|_)(?:s|h|us|ms|tokens|requests|bytes|gib|bits|flops|usd|frac)$")
"""The last word of a name that states its unit; `x_per_s` and `x_usd_per_h` end in one too."""

PURE = {
    *("throughput", "rate", "nic_rate", "memory_rate"),  # tokens/s or requests/s, as the phase says
    *("shortfall", "shortfall_bound"),  # the weighted sum of missing fractions that is minimised first
    "relative_cost",  # the paper's unit: one L4 GPU
    "price_factor",  # a pure number: how many times its price something counts
}

NUMBER = re.compile(r"\b(?:int|float|float64|int64|Floats)\b")


def number_fields(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Annotated fields of classes that hold numbers or arrays of them."""
    for node in ast.walk(tree):
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            match item:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    text = ast.unparse(annotation)
                    if NUMBER.search(text) and "Callable" not in text:
                        yield item.lineno, name


def test_quantities_name_their_unit():
    found = 0
    strays = []
    for package in ("coral_core", "artifacts", "tasks", "flows"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for line, name in number_fields(ast.parse(path.read_text(encoding="utf-8"))):
                found += bool(UNIT.search(name))
                if QUANTITIES & set(name.split("_")) and not UNIT.search(name) and name not in PURE:
                    strays.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert found > 50, "the scan sees too little to mean anything"
    assert not strays, "\n".join(strays)
