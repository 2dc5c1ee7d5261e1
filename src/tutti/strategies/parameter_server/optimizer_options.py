"""Numeric options of an optimiser (learning rate, momentum, betas) as one array, which workers push with gradients."""

from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

_OptionKey = tuple[int, str, int | None, type]
"""One number among the options: its group, its name, its position if the option is a tuple, and its type."""


class OptimizerOptions:
    """Reads an optimiser's numeric options, which schedulers change on workers, and writes them on servers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._keys: list[_OptionKey] = []
        for number, group in enumerate(optimizer.param_groups):
            # Sorted: workers and servers must agree on the order of the array.
            for name in sorted(group.keys() - {"params"}):
                value = group[name]
                if isinstance(value, tuple | list):
                    self._keys += [(number, name, position, type(item)) for position, item in enumerate(value)]
                # Bool too: its type is kept, because the array is float64. Texts and None are not sent.
                elif isinstance(value, int | float | Tensor):
                    self._keys.append((number, name, None, float if isinstance(value, Tensor) else type(value)))

    def __len__(self) -> int:
        return len(self._keys)

    def read(self) -> np.ndarray:
        """Return the present values, as float64."""
        groups = self._optimizer.param_groups
        values = [
            groups[number][name] if position is None else groups[number][name][position]
            for number, name, position, _ in self._keys
        ]
        return np.array(values, dtype=np.float64)

    def write(self, groups: list[dict[str, Any]], values: np.ndarray) -> None:
        """Set these values in the parameter groups of a copy of the optimiser."""
        for (number, name, position, kind), value in zip(self._keys, values.tolist(), strict=True):
            if number >= len(groups):
                continue
            if position is None:
                groups[number][name] = kind(value)
            else:
                old = groups[number][name]
                groups[number][name] = type(old)((*old[:position], kind(value), *old[position + 1 :]))
