"""Collectives made of messages: over sockets, MPI and in virtual time.

Small tensors take the fewest messages, because latency dominates. Large ones go round a ring, in which every link is in
use all the time.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from tutti.backend.collectives import Collectives, all_ranges, part_ranges, reduce_in_gloo_order
from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.collectives.doubling import recursive_doubling
from tutti.collectives.ring import pass_blocks_around, split_into_chunks
from tutti.collectives.tree import broadcast
from tutti.transports.base import Operation, Transport, Work

DIRECT_BYTES = 32 * 2**10
"""Bytes that may come to a rank from all others at once. More would overrun the buffers of its link."""


class MessageCollectives(Collectives):
    """Collectives over `isend` and `irecv` of any transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank, self._size = transport.rank, transport.size

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        if not self._is_direct(flat):
            return gloo_order.ring(flat, self._transport, operator.accumulate)
        return self._all_reduce_small(flat, operator)

    def _all_reduce_small(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        inputs = yield from self._gather_bruck(flat)
        reduce_in_gloo_order(flat, inputs, operator, all_ranges(flat, self._size))

    def _gather_bruck(self, flat: Tensor) -> Generator[Work, None, list[Tensor]]:
        """Gather every rank's tensor in about log2(size) messages, each twice as long as the last (Bruck 1997)."""
        size, numel, rank = self._size, flat.numel(), self._rank
        gathered = flat.new_empty(size * numel)
        gathered[:numel] = flat
        # Piece i of `gathered` is the tensor of rank `rank` + i. The first `num_gathered` pieces are there.
        num_gathered = 1
        while num_gathered < size:
            num_new = min(num_gathered, size - num_gathered)
            new = gathered[num_gathered * numel : (num_gathered + num_new) * numel]
            receiving = self._transport.irecv(new, (rank + num_gathered) % size)
            # That rank has the pieces up to this rank, and lacks those that begin with it.
            yield self._transport.isend(gathered[: num_new * numel], (rank - num_gathered) % size)
            yield receiving
            num_gathered += num_new
        # Back to the order of ranks.
        return [gathered[(other - rank) % size * numel :][:numel] for other in range(size)]

    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        yield from gloo_order.ring(flat, self._transport, operator.accumulate, scattered=True)
        parts = [flat[part] for part in gloo_order.blocks(flat.numel(), flat.itemsize, self._size)]
        # After the ring each rank holds the result of its own block only. The root collects the blocks in place.
        yield from self.gather(parts if self._rank == root else None, parts[self._rank], root)

    def reduce_scatter(self, output: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        if self._is_direct(output):
            inputs = [torch.empty_like(output) for _ in range(self._size)]
            yield from self._exchange(inputs, _parts(flat, output.numel(), self._size))
            reduce_in_gloo_order(output, inputs, operator, part_ranges(flat, output.numel(), self._rank, self._size))
            return
        # The ring overwrites its tensor, and this one is the caller's input.
        flat = flat.clone()
        yield from gloo_order.ring(flat, self._transport, operator.accumulate, scattered=True)
        yield from self._shift_to_parts(output, flat)

    def _shift_to_parts(self, output: Tensor, flat: Tensor) -> Operation:
        """Move results from Gloo's blocks to equal parts.

        Blocks are rounded up, so a block holds some elements of the parts of other ranks, which are sent to them.
        """
        blocks, numel, rank = gloo_order.blocks(flat.numel(), flat.itemsize, self._size), output.numel(), self._rank
        works = []
        for other in range(self._size):
            # What of this rank's part the other rank has reduced.
            for _, start, stop in gloo_order.split_by_block([blocks[other]], rank * numel, (rank + 1) * numel):
                target = output[start - rank * numel : stop - rank * numel]
                if other == rank:
                    target.copy_(flat[start:stop])
                else:
                    works.append(self._transport.irecv(target, other))
            if other != rank:
                # What of the other rank's part this rank has reduced.
                for _, start, stop in gloo_order.split_by_block([blocks[rank]], other * numel, (other + 1) * numel):
                    works.append(self._transport.isend(flat[start:stop], other))
        yield from works

    def reduce_parts(self, output: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        if self._is_direct(output):
            inputs = [torch.empty_like(output) for _ in range(self._size)]
            yield from self._exchange(inputs, parts)
            reduce_in_gloo_order(output, inputs, operator, all_ranges(output, self._size))
            return
        # Each part is a tensor of its own, cut into Gloo's blocks by itself.
        for root, part in enumerate(parts):
            flat = part.clone()
            yield from self.reduce(flat, operator, root)
            if root == self._rank:
                output.copy_(flat)

    def all_gather(self, outputs: list[Tensor], flat: Tensor) -> Operation:
        if self._is_direct(flat):
            for output, data in zip(outputs, (yield from self._gather_bruck(flat)), strict=True):
                output.copy_(data)
            return
        outputs[self._rank].copy_(flat)
        # Long tensors go round the ring in chunks, so that a rank passes on the first while the next still arrives.
        chunks = [split_into_chunks(output, flat.nbytes) for output in outputs]
        yield from pass_blocks_around(chunks, self._transport, self._rank, 0, self._size - 1)

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        return broadcast(flat, gloo_order.renumbered_from(self._transport, root))

    def gather(self, outputs: list[Tensor] | None, flat: Tensor, root: int) -> Operation:
        if outputs is None:
            yield self._transport.isend(flat, root)
            return
        receiving = [self._transport.irecv(outputs[rank], rank) for rank in self._others()]
        # `reduce` gathers in place: the root's block is already there.
        if outputs[root] is not flat:
            outputs[root].copy_(flat)
        yield from receiving

    def scatter(self, output: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        if parts is None:
            yield self._transport.irecv(output, root)
            return
        # All sends at once: the root's link is the narrow place, whatever the order.
        sending = [self._transport.isend(parts[rank], rank) for rank in self._others()]
        output.copy_(parts[root])
        yield from sending

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Operation:
        """Exchange in rounds. In each, a rank sends to one rank and receives from one: no link carries two messages."""
        outputs[self._rank].copy_(inputs[self._rank])
        for distance in range(1, self._size):
            dst, src = (self._rank + distance) % self._size, (self._rank - distance) % self._size
            # Posted before the send, so that the message of `src` has somewhere to go when it arrives.
            receiving = self._transport.irecv(outputs[src], src)
            yield self._transport.isend(inputs[dst], dst)
            yield receiving

    def barrier(self) -> Operation:
        # The value does not matter: no rank has the sum before all ranks have sent.
        yield from recursive_doubling(torch.zeros(1, dtype=torch.uint8), self._transport)

    def _is_direct(self, flat: Tensor) -> bool:
        """Whether `flat` is small enough for every rank to send it to every other at once."""
        return (self._size - 1) * flat.nbytes <= DIRECT_BYTES

    def _exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> Operation:
        """Send to and receive from all ranks at once."""
        receiving = [self._transport.irecv(outputs[rank], rank) for rank in self._others()]
        sending = [self._transport.isend(inputs[rank], rank) for rank in self._others()]
        outputs[self._rank].copy_(inputs[self._rank])
        yield from receiving
        yield from sending

    def _others(self) -> list[int]:
        """All other ranks, the next one first, so that not all ranks send to the same one at a time."""
        return [(self._rank + distance) % self._size for distance in range(1, self._size)]


def _parts(flat: Tensor, numel: int, size: int) -> list[Tensor]:
    """Cut `flat` into parts of `numel` elements, one for each rank."""
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(size)]
