"""`Randomness`: the random generators of one simulated rank, swapped in and out as ranks take turns.

torch, Python and NumPy have one global generator each. Simulated ranks are threads of one process, but each must draw
what a process of its own would. The engine saves the state of the rank that ran and restores that of the next.
"""

import os
import random
from copy import copy
from ctypes import string_at
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_MT19937_BYTES = 4 * 625
"""Size of the state of NumPy's generator: its words, and the position in them."""


class Randomness:
    """The state of torch's, Python's and NumPy's global generators, set aside while another rank runs."""

    def __init__(self) -> None:
        """Start from the present state."""
        # A copy: every rank has a generator object of its own, so that switching moves a reference and no state.
        self._bits: np.random.BitGenerator = copy(mtrand.get_bit_generator())
        self._spare = _spare()
        self._content = b""  # Of the generator at the last `restore`.
        self._torch = torch.get_rng_state()
        self._python = random.getstate()

    def save(self) -> None:
        """Save the state of the global generators."""
        self._bits = mtrand.get_bit_generator()
        # Reading the spare number is slow: only where something was drawn since `restore`.
        if self._spare is not None or _content(self._bits) != self._content:
            self._spare = _spare()
        self._torch = torch.get_rng_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Make the saved state that of the global generators."""
        mtrand.set_bit_generator(self._bits)
        if self._spare is not None:  # `set_bit_generator` discards it: it is kept outside the bit generator.
            state: Any = mtrand.get_state(legacy=False)
            mtrand.set_state(state | {"has_gauss": 1, "gauss": self._spare})
        self._content = _content(self._bits)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)


def _spare() -> float | None:
    """Return the normal number that NumPy has drawn already and will give next: it makes them in pairs. Slow."""
    state: Any = mtrand.get_state(legacy=False)
    return state["gauss"] if state["has_gauss"] else None


def _content(bits: np.random.BitGenerator) -> bytes:
    """Return bytes that change whenever something is drawn."""
    if not isinstance(bits, np.random.MT19937):
        return os.urandom(8)  # Unknown generator: taken to have changed.
    return string_at(bits.ctypes.state_address, _MT19937_BYTES)
