"""Random numbers of simulated ranks: each has its own, as processes do."""

import os
import random
from copy import copy
from ctypes import string_at
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_MT19937_BYTES = 4 * 625
"""Its words, and how many of them were used."""


class Randomness:
    """The state of torch's, Python's and NumPy's global generators, set aside while another rank runs."""

    def __init__(self) -> None:
        """Start from the state there is now."""
        self._bits: np.random.BitGenerator = copy(mtrand.get_bit_generator())
        self._spare = _spare()
        self._content = b""
        self._torch = torch.get_rng_state()
        self._python = random.getstate()

    def save(self) -> None:
        """Set aside what is in use."""
        self._bits = mtrand.get_bit_generator()
        if self._spare is not None or _content(self._bits) != self._content:
            self._spare = _spare()
        self._torch = torch.get_rng_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Use what was set aside."""
        mtrand.set_bit_generator(self._bits)
        if self._spare is not None:
            state: Any = mtrand.get_state(legacy=False)
            mtrand.set_state(state | {"has_gauss": 1, "gauss": self._spare})
        self._content = _content(self._bits)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)


def _spare() -> float | None:
    """The normal number that NumPy has drawn already and will give next: it makes them in pairs. Takes a while."""
    state: Any = mtrand.get_state(legacy=False)
    return state["gauss"] if state["has_gauss"] else None


def _content(bits: np.random.BitGenerator) -> bytes:
    """What tells whether anything was drawn."""
    if not isinstance(bits, np.random.MT19937):
        return os.urandom(8)  # Not known: as if something was.
    return string_at(bits.ctypes.state_address, _MT19937_BYTES)
