"""How many samples this rank contributed to a step: the weight of its gradient in the mean."""

from typing import Any

import torch
from torch import Tensor, nn


class Draws:
    """Between `shard` and the replicas of a world: how large the last batch was, and whether models train."""

    def __init__(self) -> None:
        self.number = 0
        self.num_samples = 0
        self.models: list[nn.Module] = []

    @property
    def in_training(self) -> bool:
        """Whether what is drawn now is likely to be trained on."""
        return torch.is_grad_enabled() and any(model.training for model in self.models)

    def drew(self, num_samples: int) -> None:
        self.number += 1
        self.num_samples = num_samples


class Contribution:
    """Samples seen by one replica since its last exchange.

    In this order: what the user said, the batches drawn from `shard`, the first dimension of the
    first tensor given to the model. Each drawn batch counts once, however often it goes forward,
    and only if it goes forward in training: batches for validation do not count.
    """

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._seen = draws.number
        self._said: float | None = None
        self._counted: float | None = None
        self._last = 1.0

    def say(self, num_samples: float) -> None:
        self._said = (self._said or 0.0) + num_samples

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward pass of the model."""
        if self._draws.number != self._seen:
            self._seen = self._draws.number
            self._counted = (self._counted or 0.0) + self._draws.num_samples
        elif self._draws.number == 0:
            self._counted = (self._counted or 0.0) + num_rows(args or kwargs)

    def take(self) -> float:
        """The weight of what is exchanged now. Where nothing new was counted, the last one still holds."""
        weight = next((it for it in (self._said, self._counted) if it is not None), self._last)
        self._said, self._counted, self._last = None, None, weight
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
