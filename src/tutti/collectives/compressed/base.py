"""What all compressed sums have: steps to take, and a memory that can be saved and moved."""

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
    """One rank among those that sum: which it is, of how many, and where its tensors are."""

    rank: int
    size: int
    divisor: float = 1.0
    """By what the sum is divided: the number of ranks whose gradients are in it, for a mean."""
    device: torch.device = CPU
    seed: int = 0
    """Of what is drawn: another for every tensor."""


STAGE_BOUNDARY: Work = CompletedWork()
"""Yielded where steps have sent something and would only wait: others may be taken before they go on."""


class CompressedSum(ABC):
    """A codec at work on one flat tensor: every rank ends with the same bits, close to the sum over ranks, divided.

    What it remembers belongs to elements of the tensor, so that it can move with them when tensors are put together
    differently or ranks come and go: what matters is the sum over ranks, divided as the result is.
    """

    def __init__(self, codec: Codec, layout: TensorLayout, numel: int, context: ReductionContext) -> None:
        self.codec = codec
        self.layout = layout
        self.numel = numel
        self.context = context
        self.per_element: dict[str, Tensor] = {}
        """What is remembered of every element: residual and velocity, not divided."""

    num_boundaries: ClassVar[int] = 0
    """How often its steps pause, on every rank."""

    @abstractmethod
    def steps(self, values: Tensor, exact: Tensor, transport: Transport) -> Operation:
        """Replace flat `values` by about their sum over ranks, divided, and flat `exact` by precisely that.

        `values` are float32, or have sizes alone.
        """

    @abstractmethod
    def states(self) -> list[State]:
        """What is remembered beside `per_element`, of every tensor that is encoded by itself."""

    def save(self) -> dict[str, Any]:
        """What is remembered beside that, alike on all ranks: the number of steps, and factors as "what@place"."""
        state = self.states()[0]
        return {key: value for key, value in state.items() if key not in self.per_element and not key.endswith("seed")}

    def load(self, saved: dict[str, Any]) -> None:
        for state in self.states():
            state.update(saved)

    def _start(self, numel: int, seed: int, part: slice) -> State:
        """A fresh state for a part of the tensor, what belongs to elements being a view of the whole."""
        state = self.codec.start(numel, seed, torch.device("meta"))
        for key, value in state.items():
            if isinstance(value, Tensor) and self.context.device.type != "meta":
                if key not in self.per_element:
                    self.per_element[key] = torch.zeros(self.numel, dtype=torch.float32, device=self.context.device)
                state[key] = self.per_element[key][part]
        return state
