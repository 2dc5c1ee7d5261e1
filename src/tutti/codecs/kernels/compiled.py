"""How loops are compiled: without the GIL, kept on disk, sums in any order, NaN and infinity as they are."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})(function)
