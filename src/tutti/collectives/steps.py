"""Building blocks of collectives: flat views, equal parts, exchanges, and folding to a power of two.

A collective is a generator (`Operation`) that yields each piece of work it waits for. Its caller decides how to
wait: `run` blocks, `Transport.start` continues in the background, and the simulator switches to another rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.simulation.sizes import SizeOnlyTensor
from tutti.transports.base import Operation, Transport

FlatCollective = Callable[[Tensor, Transport], Operation]
"""A collective that works in place on a contiguous tensor of one dimension in host memory."""


def run(operation: Operation) -> None:
    """Run an operation to its end in this thread."""
    for work in operation:
        work.wait()


def on_flat(collective: FlatCollective) -> FlatCollective:
    """Let a collective for flat host memory work on any tensor.

    A tensor on a GPU, or one that is not contiguous, is copied to host memory and back. A meta tensor, which has no
    values, becomes a `SizeOnlyTensor`: a dry run then sends messages of the right sizes.
    """

    def wrapped(tensor: Tensor, transport: Transport) -> Operation:
        # Collectives write in place, which autograd must not see: gradients are data here, not part of a graph.
        data = tensor.detach()
        if data.is_meta:
            return collective(SizeOnlyTensor.like(data), transport)  # type: ignore[arg-type]
        if data.is_cuda or not data.is_contiguous():
            return copied(data, transport)
        return collective(data.view(-1), transport)

    def copied(data: Tensor, transport: Transport) -> Operation:
        # Always a copy here, so that the caller's tensor is written only once, at the end.
        flat = (data.cpu() if data.is_cuda else data).contiguous().view(-1)
        yield from collective(flat, transport)
        data.copy_(flat.view(data.shape))

    return wrapped


def buffer_like(tensor: Tensor) -> Tensor:
    """Return an empty tensor to receive into, as large as `tensor`."""
    # A size-only tensor holds no values that could be overwritten.
    return tensor if tensor.__class__ is SizeOnlyTensor else torch.empty_like(tensor)


def parts(numel: int, num_parts: int) -> list[slice]:
    """Cut `numel` elements into `num_parts` slices of nearly equal length, the longer ones first."""
    # The first `longer` parts have one element more than the others.
    size, longer = divmod(numel, num_parts)
    ends = [size * (number + 1) + min(number + 1, longer) for number in range(num_parts)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def local_part(tensor: Tensor, transport: Transport) -> Tensor:
    """Return the part of a flat tensor that belongs to this rank in `reduce_scatter` and `all_gather`."""
    if tensor.dim() != 1:
        raise ConfigError(
            f"rank {transport.world_rank}: local_part needs one dimension, got {tuple(tensor.shape)}; use "
            "tensor.view(-1)."
        )
    return tensor[parts(tensor.numel(), transport.size)[transport.rank]]


class PowerOfTwoFold:
    """Reduces a world of any size to one of a power of two, for algorithms that need one.

    The inner ranks are the first 2^k, the largest power of two that fits. Each outer rank r has the inner partner
    r - 2^k. It sends its data there before the algorithm, and gets the result back after it. With 6 ranks, 4 and 5 are
    outer, and their partners are 0 and 1.
    """

    def __init__(self, transport: Transport) -> None:
        self.num_inner = 1 << (transport.size.bit_length() - 1)
        self.outer = transport.rank >= self.num_inner
        # Sets or clears the highest bit: with 6 ranks 4 ↔ 0 and 5 ↔ 1. Ranks 2 and 3 have no partner.
        partner = transport.rank ^ self.num_inner
        self.partner = partner if partner < transport.size else None

    def fold(self, flat: Tensor, transport: Transport) -> Operation:
        """Send the data to the inner partner, or add the outer partner's."""
        # An outer rank then sits out the algorithm itself, and waits in `unfold`.
        if self.outer:
            assert self.partner is not None
            yield transport.isend(flat, self.partner)
        elif self.partner is not None:
            received = buffer_like(flat)
            yield transport.irecv(received, self.partner)
            flat += received

    def unfold(self, flat: Tensor, transport: Transport) -> Operation:
        """Receive the result from the inner partner, or send it to the outer one."""
        if self.partner is not None:
            yield (transport.irecv if self.outer else transport.isend)(flat, self.partner)


def exchange(outgoing: Tensor, incoming: Tensor, partner: int, transport: Transport) -> Operation:
    """Send one tensor to `partner` and receive another from it, both at once.

    The receive is posted first, so that the partner's message has somewhere to go when it arrives.
    """
    receiving = transport.irecv(incoming, partner)
    sending = transport.isend(outgoing, partner)
    yield receiving
    yield sending
