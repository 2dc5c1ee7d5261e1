"""How loops are compiled: without the GIL, kept on disk, sums in any order, NaN and infinity as they are."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})(function)


def compiled_in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Each product and sum as written: another order could overflow, and adding would not add what is said."""
    return njit(nogil=True, cache=True, error_model="numpy")(function)
