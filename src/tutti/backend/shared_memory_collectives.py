"""Collectives between ranks of one host, in shared memory.

How it works
------------
A tensor goes through `SharedMemoryRounds` in pieces that fit into a rank's buffer. In each round every rank copies its
piece into its own buffer, publishes it, and reads what it needs from the buffers of the others. The module `rounds`
explains the synchronisation.

A small all-reduce is computed completely by every rank: one synchronisation. In a large one of more than two ranks,
each rank reduces its share of the piece into its own buffer and publishes that too: two synchronisations, less to
compute.

Reductions read the buffers in Gloo's order, so the results are Gloo's bits. `all_to_all` goes through messages: its
parts may have any lengths, which the ranks do not know of each other.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tutti.backend.collectives import BlockRange, Collectives, all_ranges, part_ranges
from tutti.backend.message_collectives import MessageCollectives
from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.collectives.steps import parts as even_parts
from tutti.transports.base import Operation
from tutti.transports.shared_memory.reduction import KERNELS, Kernel
from tutti.transports.shared_memory.rounds import SharedMemoryRounds
from tutti.transports.shared_memory.transport import SharedMemoryTransport

_BUFFER_BYTES = 4 * 2**20
"""Bytes of each rank that go through one round."""
_SHARED_WORK_BYTES = 64 * 2**10
"""Above this size ranks share the work of an all-reduce. Below, each does all of it, which saves a synchronisation."""

_NAMES = (
    "all-reduce", "reduce", "reduce-scatter", "reduce-scatter of parts", "all-gather", "broadcast", "gather", "scatter",
    "barrier",
)  # fmt: skip


class SharedMemoryCollectives(Collectives):
    """Collectives over the shared buffers of one channel."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        """Allocate the shared buffers. Collective."""
        self._rounds = SharedMemoryRounds(transport, _BUFFER_BYTES, _NAMES)
        self._by_message = MessageCollectives(transport.inner)
        self._rank, self._size = transport.rank, transport.size
        # The kernel can weigh its sources; plain sums have weights of one.
        self._ones = np.ones(self._size)
        self._orders = [np.array(gloo_order.reduction_order(block, self._size)) for block in range(self._size)]

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        if self._size > 2 and flat.nbytes > _SHARED_WORK_BYTES:
            return self._all_reduce_shared_work(flat, operator)
        return self._reduce_full("all-reduce", flat, operator, wanted=True)

    def _all_reduce_shared_work(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        """Reduce one share of each piece on each rank, and copy the other shares."""
        rounds, rank = self._rounds, self._rank
        blocks = gloo_order.blocks(flat.numel(), flat.itemsize, self._size)
        for start, piece in self._pieces(flat):
            yield rounds.await_writable()
            buffers = rounds.buffers(flat.dtype)
            buffers[rank][: len(piece)].copy_(piece)
            yield rounds.publish_input("all-reduce", flat.numel(), flat.dtype)
            shares = even_parts(len(piece), self._size)
            local_share = shares[rank]
            # Only this rank reads its share of any buffer, so it may overwrite that share of its own.
            local_ranges = _ranges(blocks, start + local_share.start, start + local_share.stop, start)
            self._reduce_buffers(buffers[rank], 0, operator, local_ranges)
            yield rounds.publish_result()
            # The result of share r lies in rank r's buffer.
            for buffer, share in zip(buffers, shares, strict=True):
                piece[share].copy_(buffer[share])
            rounds.finish()

    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        return self._reduce_full("reduce", flat, operator, wanted=self._rank == root)

    def _reduce_full(self, name: str, flat: Tensor, operator: ReduceOperator, wanted: bool) -> Operation:
        """Reduce all of `flat` on each rank on which it is `wanted`."""
        rounds = self._rounds
        blocks = gloo_order.blocks(flat.numel(), flat.itemsize, self._size)
        for start, piece in self._pieces(flat):
            yield rounds.await_writable()
            rounds.buffers(flat.dtype)[self._rank][: len(piece)].copy_(piece)
            yield rounds.publish_input(name, flat.numel(), flat.dtype)
            # Other ranks take part in the round, as their input is needed, and skip the work.
            if wanted:
                self._reduce_buffers(piece, 0, operator, _ranges(blocks, start, start + len(piece), start))
            rounds.finish()

    def reduce_scatter(self, output: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        numel = output.numel()
        parts = [flat[rank * numel : (rank + 1) * numel] for rank in range(self._size)]
        return self._reduce_part(
            "reduce-scatter", output, parts, operator, part_ranges(flat, numel, self._rank, self._size)
        )

    def reduce_parts(self, output: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        return self._reduce_part("reduce-scatter of parts", output, parts, operator, all_ranges(output, self._size))

    def _reduce_part(
        self, name: str, output: Tensor, parts: list[Tensor], operator: ReduceOperator, ranges: list[BlockRange]
    ) -> Operation:
        """Reduce each rank's part by itself, piece by piece through the buffers; `output` is this rank's part."""
        # A buffer holds a piece of every rank's part: elements from r × `width` on are for rank r.
        rounds, width = self._rounds, self._rounds.buffer_bytes // output.itemsize // self._size
        for start, piece in self._pieces(output, width):
            yield rounds.await_writable()
            buffer = rounds.buffers(output.dtype)[self._rank]
            for rank, part in enumerate(parts):
                buffer[rank * width :][: len(piece)].copy_(part[start : start + len(piece)])
            yield rounds.publish_input(name, output.numel(), output.dtype)
            offset = self._rank * width
            # The ranges of the part, clipped to this piece and moved to where it lies in the buffers.
            local_ranges = [
                (block, max(first, start) - start + offset, min(last, start + len(piece)) - start + offset)
                for block, first, last in ranges
                if first < start + len(piece) and last > start
            ]
            self._reduce_buffers(piece, offset, operator, local_ranges)
            rounds.finish()

    def all_gather(self, outputs: list[Tensor], flat: Tensor) -> Operation:
        return self._gather("all-gather", outputs, flat)

    def gather(self, outputs: list[Tensor] | None, flat: Tensor, root: int) -> Operation:
        return self._gather("gather", outputs, flat)

    def _gather(self, name: str, outputs: list[Tensor] | None, flat: Tensor) -> Operation:
        rounds = self._rounds
        for start, piece in self._pieces(flat):
            yield rounds.await_writable()
            buffers = rounds.buffers(flat.dtype)
            buffers[self._rank][: len(piece)].copy_(piece)
            yield rounds.publish_input(name, flat.numel(), flat.dtype)
            # Without `outputs` (ranks that are not the root of a gather) nothing is copied.
            for buffer, output in zip(buffers, outputs or [], strict=False):
                output[start : start + len(piece)].copy_(buffer[: len(piece)])
            rounds.finish()

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        rounds = self._rounds
        for _, piece in self._pieces(flat):
            yield rounds.await_writable()
            buffer = rounds.buffers(flat.dtype)[root]
            if self._rank == root:
                buffer[: len(piece)].copy_(piece)
            # All ranks publish, also those without data: that is how they wait for the root and compare lengths.
            yield rounds.publish_input("broadcast", flat.numel(), flat.dtype)
            if self._rank != root:
                piece.copy_(buffer[: len(piece)])
            rounds.finish()

    def scatter(self, output: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        # As in `_reduce_part`: elements from r × `width` on are for rank r.
        rounds, width = self._rounds, self._rounds.buffer_bytes // output.itemsize // self._size
        for start, piece in self._pieces(output, width):
            yield rounds.await_writable()
            buffer = rounds.buffers(output.dtype)[root]
            for rank, part in enumerate(parts or []):
                buffer[rank * width :][: len(piece)].copy_(part[start : start + len(piece)])
            yield rounds.publish_input("scatter", output.numel(), output.dtype)
            piece.copy_(buffer[self._rank * width :][: len(piece)])
            rounds.finish()

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Operation:
        return self._by_message.all_to_all(outputs, inputs)

    def barrier(self) -> Operation:
        yield self._rounds.await_writable()
        yield self._rounds.publish_input("barrier", 0, torch.uint8)
        self._rounds.finish()

    def _pieces(self, flat: Tensor, width: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Cut `flat` into pieces of at most `width` elements that fit into a round, with their starts.

        An empty tensor gives one empty piece: its ranks synchronise all the same.
        """
        # The whole buffer of a rank, unless the caller has to keep room for the parts of others.
        width = width or self._rounds.buffer_bytes // flat.itemsize
        if flat.numel() <= width:
            yield 0, flat
            return
        for start in range(0, flat.numel(), width):
            yield start, flat[start : start + width]

    def _reduce_buffers(self, output: Tensor, offset: int, operator: ReduceOperator, ranges: list[BlockRange]) -> None:
        """Reduce all ranks' buffers into `output`, which begins at element `offset` of them, in Gloo's order."""
        # A mean is summed here as well; the caller divides the sum. Other operators, and dtypes without a kernel, go
        # through torch below, an operation per rank.
        kernel = KERNELS.get(output.dtype) if operator.name in ("SUM", "AVG") else None
        if kernel is not None:
            self._sum_buffers(kernel, output, offset, ranges)
            return
        buffers = self._rounds.buffers(output.dtype)
        for block, start, stop in ranges:
            first, *others = self._orders[block].tolist()
            # A copy: the buffer is read by the other ranks until all of them have finished the round.
            result = buffers[first][start:stop].clone()
            for rank in others:
                operator.apply(buffers[rank][start:stop], result, result)
            output[start - offset : stop - offset].copy_(result)

    def _sum_buffers(self, kernel: Kernel, output: Tensor, offset: int, ranges: list[BlockRange]) -> None:
        """As `_reduce_buffers`, by a compiled kernel. It takes one order of sources per call."""
        # The kernel uses one index for sources and target: the target address is moved back by the offset.
        target = np.array([output.data_ptr() - offset * output.itemsize])
        addresses = self._rounds.addresses[self._rounds.number % 2]
        for block, start, stop in ranges:
            kernel(addresses[self._orders[block]], target, start, stop, self._ones, 1.0)


def _ranges(blocks: list[slice], start: int, stop: int, origin: int) -> list[BlockRange]:
    """The ranges of Gloo's blocks between two elements of a tensor, counted from `origin`."""
    return [
        (block, first - origin, last - origin) for block, first, last in gloo_order.split_by_block(blocks, start, stop)
    ]
