"""States of the random number generators of this process: Python's, NumPy's, torch's, and those of its GPUs."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of every generator, in plain values and tensors."""
    version, numbers, gaussian = random.getstate()
    name, keys, position, has_gaussian, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gaussian],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gaussian, cached],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        # Only where CUDA is in use: to ask would start it.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set every generator to a state of `random_state`. GPUs that are not there are left out."""
    version, numbers, gaussian = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gaussian))
    name, keys, position, has_gaussian, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gaussian, cached))
    # Copied: torch reads a state from the start of its memory, even if it is a part of a larger tensor.
    torch.set_rng_state(state["torch"].clone())
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator.clone(), device)
