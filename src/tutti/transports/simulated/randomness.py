"""Random numbers of simulated ranks: each has its own, as processes do."""

import random
from copy import copy

import numpy as np
import torch
from numpy.random import mtrand


class Randomness:
    """The state of torch's, Python's and NumPy's global generators, set aside while another rank runs."""

    def __init__(self) -> None:
        """Start from the state there is now."""
        self._bits: np.random.BitGenerator = copy(mtrand.get_bit_generator())
        self._torch = torch.get_rng_state()
        self._python = random.getstate()

    def keep(self) -> None:
        """Set aside what is in use."""
        self._bits = mtrand.get_bit_generator()
        self._torch = torch.get_rng_state()
        self._python = random.getstate()

    def bring_back(self) -> None:
        """Use what was set aside."""
        mtrand.set_bit_generator(self._bits)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
