"""How loops are compiled: without the GIL, and kept on disk where there is one to write to."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums in any order; NaN and infinity are what they are."""
    return _compiled(function, fastmath={"reassoc", "nsz", "contract"})


def compiled_in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Each product and sum as written: another order could overflow, and adding would not add what is said."""
    return _compiled(function, fastmath=False)


def _compiled(function: Callable[..., Any], fastmath: Any) -> Callable[..., Any]:
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # No folder that could be written to.
        return njit(**options)(function)
