"""The optimiser's state at the end of a block: averaged over ranks, or reset."""

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
    """Clear the optimiser's state, as if it had not stepped yet."""
    optimizer.state.clear()


class OptimizerStateMean:
    """Averages the element-wise state of optimisers (momentum, second moments) over ranks.

    Ranks average only if all of them keep state of the same names and shapes; the digest that `pack` returns says so.
    Values travel in float64, so that one flat tensor holds states of every dtype without loss.
    """

    def __init__(self, replica: Replica, mean: CollectiveMean) -> None:
        self._replica = replica
        self._mean = mean
        self._tensors: list[Tensor] = []
        self._flat = torch.empty(0, device="cpu")

    def pack(self) -> int:
        """Copy the current state into the memory that travels; return a checksum of its names and shapes."""
        named = list(self._elementwise_state())
        self._tensors = [tensor for _, tensor in named]
        # `cat` needs at least one tensor, also while the optimiser has no state yet.
        self._flat = torch.cat(
            [tensor.reshape(-1).double() for tensor in self._tensors]
            or [torch.empty(0, dtype=torch.float64, device="cpu")]
        )
        # Ranks compare the checksums in their status: lazily made state may exist on some ranks and not on others.
        return crc32(json.dumps([(name, list(tensor.shape)) for name, tensor in named]).encode())

    def steps(self, weights: Tensor) -> Operation:
        """Average what `pack` copied, weighted by the samples of each rank."""
        yield from self._mean.of_flat(self._flat, weights)

    def unpack(self) -> None:
        """Overwrite the optimiser's state with the mean."""
        parts = self._flat.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _elementwise_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of every state that has an element per parameter element."""
        for slot in self._replica.slots:
            # In the same order on all ranks: by slot, then by name.
            for key, value in sorted(self._replica.optimizer.state.get(slot.tensor, {}).items()):
                if isinstance(value, Tensor) and value.is_floating_point() and _is_elementwise(value, slot.tensor):
                    yield f"{slot.name}.{key}", value


def _is_elementwise(value: Tensor, parameter: Tensor) -> bool:
    """Whether the state has an element per parameter element; a step counter, which is on the CPU, has not."""
    return value.shape == parameter.shape and value.device == parameter.device
