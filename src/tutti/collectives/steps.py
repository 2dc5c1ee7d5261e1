"""What every collective is made of: steps over a flat view, cut into parts."""

from collections.abc import Callable

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.simulation.sizes import SizeOnlyTensor
from tutti.transports.base import Operation, Transport

FlatSteps = Callable[[Tensor, Transport], Operation]


def run(steps: Operation) -> None:
    """Take all steps here and now."""
    for work in steps:
        work.wait()


def on_flat(steps: FlatSteps) -> FlatSteps:
    """Let steps that know only flat host memory work on any tensor."""

    def wrapped(tensor: Tensor, transport: Transport) -> Operation:
        data = tensor.detach()
        if data.is_meta:
            return steps(SizeOnlyTensor.like(data), transport)  # type: ignore[arg-type]
        if data.is_cuda or not data.is_contiguous():
            return moved(data, transport)
        return steps(data.view(-1), transport)

    def moved(data: Tensor, transport: Transport) -> Operation:
        flat = (data.cpu() if data.is_cuda else data).contiguous().view(-1)
        yield from steps(flat, transport)
        data.copy_(flat.view(data.shape))

    return wrapped


def room_like(tensor: Tensor) -> Tensor:
    """Somewhere to receive what is as large as `tensor`."""
    return tensor if tensor.__class__ is SizeOnlyTensor else torch.empty_like(tensor)


def parts(numel: int, num_parts: int) -> list[slice]:
    """`numel` elements in `num_parts` runs of nearly equal length, the longer ones first."""
    size, longer = divmod(numel, num_parts)
    ends = [size * (number + 1) + min(number + 1, longer) for number in range(num_parts)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def local_part(tensor: Tensor, transport: Transport) -> Tensor:
    """The part of a flat tensor that is this rank's in `reduce_scatter` and `all_gather`."""
    if tensor.dim() != 1:
        raise ConfigError(
            f"rank {transport.rank}: local_part needs one dimension, got {tuple(tensor.shape)}; use tensor.view(-1)."
        )
    return tensor[parts(tensor.numel(), transport.size)[transport.rank]]


class Fold:
    """A world of any size as one of a power of two: each rank beyond it lends its data to a rank within."""

    def __init__(self, transport: Transport) -> None:
        self.num_inner = 1 << (transport.size.bit_length() - 1)
        self.outer = transport.rank >= self.num_inner
        partner = transport.rank ^ self.num_inner
        self.partner = partner if partner < transport.size else None

    def fold(self, flat: Tensor, transport: Transport) -> Operation:
        """Give the data to the partner within, or add the partner's."""
        if self.outer:
            assert self.partner is not None
            yield transport.isend(flat, self.partner)
        elif self.partner is not None:
            theirs = room_like(flat)
            yield transport.irecv(theirs, self.partner)
            flat += theirs

    def unfold(self, flat: Tensor, transport: Transport) -> Operation:
        """Get the result back from the partner within, or give it."""
        if self.partner is not None:
            yield (transport.irecv if self.outer else transport.isend)(flat, self.partner)


def exchange(mine: Tensor, theirs: Tensor, partner: int, transport: Transport) -> Operation:
    """Send one and receive the other, both at once."""
    receiving = transport.irecv(theirs, partner)
    sending = transport.isend(mine, partner)
    yield receiving
    yield sending
