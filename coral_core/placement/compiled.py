"""Ahead-of-call compilation with numba: once per machine, cached on disk, loaded by every other process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(signature: str) -> Callable[[Function], Function]:
    """Compile a function for fixed types when it is defined.

    numba caches beside the file, or in the user's cache folder where that cannot be written, and replaces its files
    atomically, so processes may start at once. Where neither can be written, each process compiles for itself.
    """
    compile_: Any = numba.njit

    def decorate(function: Function) -> Function:
        try:
            kernel: Function = compile_(signature, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            kernel = compile_(signature, nogil=True, error_model="numpy")(function)
        return kernel

    return decorate
