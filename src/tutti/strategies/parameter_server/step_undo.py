"""`StepUndo`: what the values and the optimiser's state of one shard were before its last step."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


class StepUndo:
    """Copies, in memory that is used again for every step."""

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._tensors: dict[tuple[int, str], Tensor] = {}
        """Of the state, by segment and name."""
        self._others: list[dict[str, Any]] = []
        """What else the state has, by segment."""
        self._keys: list[list[str]] = []
        """The names of the tensors in the state of each segment, as they were."""

    @torch.no_grad()
    def keep(self, values: Tensor, states: Sequence[dict[str, Any]]) -> None:
        """Copy what a step is about to change."""
        if self._values is None:
            self._values = torch.empty_like(values)
        targets, sources = [self._values], [values]
        self._keys = [[key for key, value in state.items() if isinstance(value, Tensor)] for state in states]
        self._others = [
            deepcopy({key: value for key, value in state.items() if not isinstance(value, Tensor)}) for state in states
        ]
        for number, keys in enumerate(self._keys):
            for key in keys:
                value, kept = states[number][key], self._tensors.get((number, key))
                if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                    kept = self._tensors[number, key] = torch.empty_like(value)
                targets.append(kept)
                sources.append(value)
        # One call for all: there may be many small ones.
        torch._foreach_copy_(targets, sources)

    def copies(self) -> tuple[Tensor, list[dict[str, Any]]]:
        """Return copies of the values, and of the state of each segment."""
        assert self._values is not None
        states = [
            {**others, **{key: self._tensors[number, key].clone() for key in keys}}
            for number, (others, keys) in enumerate(zip(self._others, self._keys, strict=True))
        ]
        return self._values.clone(), states
