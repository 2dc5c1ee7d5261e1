"""What stages tell each other: activations forward, gradients back, and at the end the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.transports import Transport, Work
from tutti.transports.base import Steps

Shapes = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor that goes together."""


AT_ONCE_BYTES = 2**20
"""A message as small as this fits into the network's buffers: it needs nobody to move it along while ranks compute."""


class Wires:
    """Messages between the ranks along `pipe`, on their way while this rank computes."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.beneath = transport
        """For what is said between steps."""
        self.transport = transport.channel("wires")
        self._large = transport.channel("large wires")
        self._device = device
        self._sending: list[Work] = []

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> None:
        """Start sending; the tensors stay as they are until `flush`."""
        held = [it.detach().contiguous() for it in tensors]
        self._sending = [work for work in self._sending if not work.done()]
        if sum(it.nbytes for it in held) > AT_ONCE_BYTES:
            self._sending.append(self._large.beside(_sends(self._large, held, dst, tag)))
        else:
            self._sending += _sends(self.transport, held, dst, tag)

    def receive(self, shapes: Shapes, src: int, tag: int) -> "Arriving":
        """Start receiving."""
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) for shape, dtype in shapes]
        if sum(it.nbytes for it in tensors) > AT_ONCE_BYTES:
            return Arriving(tuple(tensors), [self._large.beside(_receives(self._large, tensors, src, tag))])
        return Arriving(tuple(tensors), list(_receives(self.transport, tensors, src, tag)))

    def flush(self) -> None:
        """Wait until all is sent."""
        for work in self._sending:
            work.wait()
        self._sending.clear()

    def from_last(self, value: Tensor | None, tag: int) -> Tensor:
        """A number that the last rank has, on all of them. Collective."""
        last = self.transport.size - 1
        if value is not None:
            for rank in range(last):
                self.send([value], rank, tag)
            return value
        (got,) = self.receive([((), "float64")], last, tag).wait()
        return got


class Arriving:
    """Tensors on their way here."""

    def __init__(self, tensors: tuple[Tensor, ...], works: list[Work]) -> None:
        self._tensors, self._works = tensors, works

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._works:
            work.wait()
        return self._tensors


def _sends(transport: Transport, tensors: list[Tensor], dst: int, tag: int) -> Steps:
    yield from [transport.isend(it, dst, tag + number) for number, it in enumerate(tensors)]


def _receives(transport: Transport, tensors: list[Tensor], src: int, tag: int) -> Steps:
    yield from [transport.irecv(it, src, tag + number) for number, it in enumerate(tensors)]
