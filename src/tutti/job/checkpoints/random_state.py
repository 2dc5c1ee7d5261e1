"""States of the random number generators of this process: Python's, NumPy's, torch's, and those of its GPUs."""

import random
from array import array
from typing import Any

import numpy as np
import torch


class RandomStates:
    """The states of all generators at one moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)
        self._torch = torch.get_rng_state()
        # Only where CUDA is in use: to ask would start it.
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def values(self) -> dict[str, Any]:
        """Return the states in plain values and tensors."""
        version, numbers, gaussian = self._python
        name, keys, position, has_gaussian, cached = self._numpy
        return {
            # By way of an array: `torch.tensor` takes several times as long for so many numbers.
            "python": [version, torch.frombuffer(array("q", numbers), dtype=torch.int64), gaussian],
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gaussian, cached],
            "torch": self._torch,
            "cuda": self._cuda,
        }


def set_random_state(state: dict[str, Any]) -> None:
    """Set every generator to a state that `RandomStates.values` returned. GPUs that are not there are left out."""
    version, numbers, gaussian = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gaussian))
    name, keys, position, has_gaussian, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gaussian, cached))
    # Copied: torch reads a state from the start of its memory, even if it is a part of a larger tensor.
    torch.set_rng_state(state["torch"].clone())
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator.clone(), device)
