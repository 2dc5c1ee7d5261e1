"""Compilation of kernels by Numba: without the GIL, and cached on disk where a folder can be written to."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function in which sums may be reordered, which lets the compiler vectorise them.

    "reassoc" allows other orders, "nsz" ignores the sign of zero, and "contract" allows fused multiply-adds. NaN and
    infinity keep their meaning: full fast-math would let the compiler assume that there are none.
    """
    return _compiled(function, fastmath={"reassoc", "nsz", "contract"})


def compiled_in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function whose products and sums are made as written.

    Another order could overflow, and a fused multiply-add would make `add=True` differ from decoding and adding.
    """
    return _compiled(function, fastmath=False)


def _compiled(function: Callable[..., Any], fastmath: Any) -> Callable[..., Any]:
    """Compile `function`. With NumPy's error model, division by zero gives infinity instead of an exception."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # There is no folder to write the cache to.
        return njit(**options)(function)
