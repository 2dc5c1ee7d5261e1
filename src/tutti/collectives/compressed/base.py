"""`CompressedSum`, the interface of sums over ranks of compressed tensors, and the context of one rank.

How it works:

- A sum belongs to one flat tensor (a bucket) for as long as the bucket exists. It keeps the codec's state between
  steps.
- `steps` is a generator, run in the background. It yields the work it waits for, and `STAGE_BOUNDARY` where it has sent
  something and would now only wait. A caller with several buckets starts the next one there, so that links stay busy.
- Every rank yields the same number of boundaries (`num_boundaries`), also ranks that take no part in the sum.
  Operations of several buckets therefore interleave in the same order on every rank, which the matching of messages
  relies on.
- State per element (residual, velocity) lies in `per_element`, one tensor each for the whole bucket. It can be moved to
  other buckets when gradients are grouped anew, and to other ranks when ranks come or go.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tutti.codecs.base import CPU, Codec, State, TensorLayout
from tutti.transports import Transport
from tutti.transports.base import CompletedWork, Operation, Work


@dataclass(frozen=True)
class ReductionContext:
    """What one rank needs to know to take part in compressed sums."""

    rank: int
    """Number of this rank among those that encode."""
    size: int
    """Number of ranks that encode: all ranks, or one per host."""
    divisor: float = 1.0
    """Divisor of the sum. For a mean it is the number of ranks whose gradients are in it."""
    device: torch.device = CPU
    """Device of the tensors. On "meta" there are sizes and no values."""
    seed: int = 0
    """Seed of the codec's random numbers, different for every tensor."""


STAGE_BOUNDARY: Work = CompletedWork()
"""Yielded where an operation has sent something and would only wait: other operations may run first."""


class CompressedSum(ABC):
    """Sums one flat tensor over ranks with a codec. Every rank ends with the same bits, near the exact sum, divided.

    What the codec remembers of elements is only meaningful summed over ranks: it is what the mean is still owed. It can
    therefore be moved between buckets and between ranks as long as that sum stays the same.
    """

    def __init__(self, codec: Codec, layout: TensorLayout, numel: int, context: ReductionContext) -> None:
        """Prepare sums of a flat tensor of `numel` elements in which parameters lie as `layout` says."""
        self.codec = codec
        self.layout = layout
        self.numel = numel
        self.context = context
        self.per_element: dict[str, Tensor] = {}
        """State of every element by name, such as the residual and the velocity. It is not divided."""

    num_boundaries: ClassVar[int] = 0
    """How many stage boundaries its operation yields, on every rank."""

    @abstractmethod
    def steps(self, values: Tensor, exact: Tensor, transport: Transport) -> Operation:
        """Replace `values` by their approximate sum over ranks, divided, and `exact` by their exact one. Collective.

        Args:
            values: the flat tensor to compress, in float32, or a meta tensor in dry runs.
            exact: flat values that travel in the same messages and are not compressed, such as gradients of biases.
        """

    @abstractmethod
    def states(self) -> list[State]:
        """Return the codec states, one for every part of the tensor that is encoded separately."""

    def save(self) -> dict[str, Any]:
        """Return the state beside `per_element` that is equal on all ranks.

        These are counters by name, and tensors of one parameter by "name@start", where it starts in the flat tensor.
        """
        # Seeds differ between ranks and parts, so they are not saved; the rest is the same in all parts.
        state = self.states()[0]
        return {key: value for key, value in state.items() if key not in self.per_element and not key.endswith("seed")}

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from what `save` returned."""
        for state in self.states():
            state.update(saved)

    def _start(self, numel: int, seed: int, part: slice) -> State:
        """Return a fresh codec state for a part of the tensor. Its tensors per element are views of `per_element`."""
        # On "meta", only to learn which tensors there are: their memory is a slice of `per_element`.
        state = self.codec.start(numel, seed, torch.device("meta"))
        for key, value in state.items():
            # One tensor for the whole bucket, of which parts are views: so state can be moved when buckets are cut
            # anew.
            if isinstance(value, Tensor) and self.context.device.type != "meta":
                if key not in self.per_element:
                    self.per_element[key] = torch.zeros(self.numel, dtype=torch.float32, device=self.context.device)
                state[key] = self.per_element[key][part]
        return state
