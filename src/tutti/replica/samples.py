"""How many samples this rank contributed to a step: the weight of its gradient in the mean."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn


class SampleCounts:
    """Between `shard` and the replicas of a world: how large the last batch was, and whether models train."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_samples = 0
        self.models: WeakSet[nn.Module] = WeakSet()
        self.num_training_ranks: int | None = None
        """How many ranks train, where that is not all of them."""

    def record_batch(self, num_samples: int) -> None:
        """Note a batch handed out. Under no_grad it is for evaluation, and nobody's contribution."""
        if torch.is_grad_enabled():
            self.num_batches += 1
            self.num_samples = num_samples

    @property
    def in_training(self) -> bool:
        """Whether what is drawn now is likely to be trained on."""
        return torch.is_grad_enabled() and any(model.training for model in self.models)


class Contribution:
    """Samples seen by one replica since its last exchange.

    In this order: what the user said; the batch drawn from `shard`, if just one was drawn for this
    backward; the first dimension of the first tensor given to the model. `forward` runs inside
    compiled graphs, so it only notes a number and looks at nothing that changes.
    """

    def __init__(self, sample_counts: SampleCounts) -> None:
        self._sample_counts = sample_counts
        self._seen = sample_counts.num_batches
        self._rows: int | None = None
        self._said: float | None = None
        self._counted: float | None = None
        self._counted_draw = False
        self._last = 1.0

    def add(self, num_samples: float) -> None:
        self._said = (self._said or 0.0) + num_samples

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a forward pass of the model."""
        self._rows = num_rows(args or kwargs)

    def backward(self) -> None:
        """Count what went forward for the backward pass that has begun. Calling it again adds nothing."""
        num_drawn = self._sample_counts.num_batches - self._seen
        if num_drawn == 1:
            self._counted = (self._counted or 0.0) + self._sample_counts.num_samples
            self._counted_draw = True
        elif self._rows is not None and not (num_drawn == 0 and self._counted_draw):  # Not a part of a drawn batch.
            self._counted = (self._counted or 0.0) + self._rows
        self._seen, self._rows = self._sample_counts.num_batches, None

    def take(self) -> float:
        """The weight of what is exchanged now. Where nothing new was counted, the last one still holds."""
        self.backward()
        weight = self._last if self._counted is None else self._counted
        weight = weight if self._said is None else self._said
        self._said, self._counted, self._counted_draw, self._last = None, None, False, weight
        return weight


def num_rows(value: Any) -> int:
    """The first dimension of the first tensor in a nest of containers; 1 where there is none."""
    tensor = _first_tensor(value)
    return len(tensor) if tensor is not None and tensor.dim() else 1


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    for item in value:
        if (found := _first_tensor(item)) is not None:
            return found
    return None
