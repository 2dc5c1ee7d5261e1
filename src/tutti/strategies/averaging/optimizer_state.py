"""What the optimiser of each rank remembers, when a block ends: momentum, say."""

import json
from binascii import crc32
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.replica import Replica
from tutti.strategies.means import CollectiveMean
from tutti.transports.base import Operation


def reset(optimizer: Optimizer) -> None:
    """Have it begin anew."""
    optimizer.state.clear()


class StateMean:
    """Averages what optimisers remember of each element, where all of them remember the same things."""

    def __init__(self, replica: Replica, mean: CollectiveMean) -> None:
        self._replica = replica
        self._mean = mean
        self._tensors: list[Tensor] = []
        self._flat = torch.empty(0, device="cpu")

    def pack(self) -> int:
        """Let what is remembered now travel; a digest of what that is."""
        found = list(self._found())
        self._tensors = [tensor for _, tensor in found]
        self._flat = torch.cat([tensor.reshape(-1).double() for tensor in self._tensors] or [self._flat.double()])
        return crc32(json.dumps([(name, list(tensor.shape)) for name, tensor in found]).encode())

    def steps(self, weights: Tensor) -> Operation:
        yield from self._mean.of_flat(self._flat, weights)

    def unpack(self) -> None:
        """Remember the mean."""
        parts = self._flat.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        for slot in self._replica.slots:
            for key, value in sorted(self._replica.optimizer.state.get(slot.tensor, {}).items()):
                if isinstance(value, Tensor) and value.is_floating_point() and _of_elements(value, slot.tensor):
                    yield f"{slot.name}.{key}", value


def _of_elements(value: Tensor, parameter: Tensor) -> bool:
    """Whether it is remembered of each element; the number of steps, which is on the CPU, is not."""
    return value.shape == parameter.shape and value.device == parameter.device
