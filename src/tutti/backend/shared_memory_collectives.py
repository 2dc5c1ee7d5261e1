"""Collective operations between ranks of one host, in memory that all of them see."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tutti.backend.collectives import Collectives, Run, own_runs, whole_runs
from tutti.backend.message_collectives import MessageCollectives
from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.collectives.steps import parts as even_parts
from tutti.transports.base import Operation
from tutti.transports.shared_memory.reduction import KERNELS, Kernel
from tutti.transports.shared_memory.rounds import SharedMemoryRounds
from tutti.transports.shared_memory.transport import SharedMemoryTransport

_ROOM_BYTES = 4 * 2**20
_SHARED_BYTES = 64 * 2**10
"""From here on ranks share the work of a sum; below, each makes all of it, which saves a meeting."""

_NAMES = (
    "all-reduce", "reduce", "reduce-scatter", "reduce-scatter of parts", "all-gather", "broadcast", "gather", "scatter",
    "barrier",
)  # fmt: skip


class SharedMemoryCollectives(Collectives):
    """Every rank copies what it has to where all can read it, and what it needs from there."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        """Open the memory. Collective."""
        self._rounds = SharedMemoryRounds(transport, _ROOM_BYTES, _NAMES)
        self._by_message = MessageCollectives(transport.inner)
        self._rank, self._size = transport.rank, transport.size
        self._ones = np.ones(self._size)
        self._orders = [np.array(gloo_order.reduction_order(block, self._size)) for block in range(self._size)]

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        if self._size > 2 and flat.nbytes > _SHARED_BYTES:
            return self._all_reduce_shared(flat, operator)
        return self._reduce_whole("all-reduce", flat, operator, here=True)

    def _all_reduce_shared(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        rounds, rank = self._rounds, self._rank
        cut = gloo_order.blocks(flat.numel(), flat.itemsize, self._size)
        for start, piece in self._pieces(flat):
            yield rounds.await_writable()
            buffers = rounds.buffers(flat.dtype)
            buffers[rank][: len(piece)].copy_(piece)
            yield rounds.publish_input("all-reduce", flat.numel(), flat.dtype)
            shares = even_parts(len(piece), self._size)
            mine = shares[rank]
            self._fold(buffers[rank], 0, operator, _runs(cut, start + mine.start, start + mine.stop, start))
            yield rounds.publish_result()
            for buffer, share in zip(buffers, shares, strict=True):
                piece[share].copy_(buffer[share])
            rounds.finish()

    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        return self._reduce_whole("reduce", flat, operator, here=self._rank == root)

    def _reduce_whole(self, name: str, flat: Tensor, operator: ReduceOperator, here: bool) -> Operation:
        rounds = self._rounds
        cut = gloo_order.blocks(flat.numel(), flat.itemsize, self._size)
        for start, piece in self._pieces(flat):
            yield rounds.await_writable()
            rounds.buffers(flat.dtype)[self._rank][: len(piece)].copy_(piece)
            yield rounds.publish_input(name, flat.numel(), flat.dtype)
            if here:
                self._fold(piece, 0, operator, _runs(cut, start, start + len(piece), start))
            rounds.finish()

    def reduce_scatter(self, mine: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        numel = mine.numel()
        parts = [flat[rank * numel : (rank + 1) * numel] for rank in range(self._size)]
        return self._reduce_own("reduce-scatter", mine, parts, operator, own_runs(flat, numel, self._rank, self._size))

    def reduce_parts(self, mine: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        return self._reduce_own("reduce-scatter of parts", mine, parts, operator, whole_runs(mine, self._size))

    def _reduce_own(
        self, name: str, mine: Tensor, parts: list[Tensor], operator: ReduceOperator, runs: list[Run]
    ) -> Operation:
        rounds, width = self._rounds, self._rounds.buffer_bytes // mine.itemsize // self._size
        for start, piece in self._pieces(mine, width):
            yield rounds.await_writable()
            buffer = rounds.buffers(mine.dtype)[self._rank]
            for rank, part in enumerate(parts):
                buffer[rank * width :][: len(piece)].copy_(part[start : start + len(piece)])
            yield rounds.publish_input(name, mine.numel(), mine.dtype)
            at = self._rank * width
            here = [
                (block, max(first, start) - start + at, min(last, start + len(piece)) - start + at)
                for block, first, last in runs
                if first < start + len(piece) and last > start
            ]
            self._fold(piece, at, operator, here)
            rounds.finish()

    def all_gather(self, everyones: list[Tensor], mine: Tensor) -> Operation:
        return self._gather("all-gather", everyones, mine)

    def gather(self, everyones: list[Tensor] | None, mine: Tensor, root: int) -> Operation:
        return self._gather("gather", everyones, mine)

    def _gather(self, name: str, everyones: list[Tensor] | None, mine: Tensor) -> Operation:
        rounds = self._rounds
        for start, piece in self._pieces(mine):
            yield rounds.await_writable()
            buffers = rounds.buffers(mine.dtype)
            buffers[self._rank][: len(piece)].copy_(piece)
            yield rounds.publish_input(name, mine.numel(), mine.dtype)
            for buffer, out in zip(buffers, everyones or [], strict=False):
                out[start : start + len(piece)].copy_(buffer[: len(piece)])
            rounds.finish()

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        rounds = self._rounds
        for _, piece in self._pieces(flat):
            yield rounds.await_writable()
            buffer = rounds.buffers(flat.dtype)[root]
            if self._rank == root:
                buffer[: len(piece)].copy_(piece)
            yield rounds.publish_input("broadcast", flat.numel(), flat.dtype)
            if self._rank != root:
                piece.copy_(buffer[: len(piece)])
            rounds.finish()

    def scatter(self, mine: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        rounds, width = self._rounds, self._rounds.buffer_bytes // mine.itemsize // self._size
        for start, piece in self._pieces(mine, width):
            yield rounds.await_writable()
            buffer = rounds.buffers(mine.dtype)[root]
            for rank, part in enumerate(parts or []):
                buffer[rank * width :][: len(piece)].copy_(part[start : start + len(piece)])
            yield rounds.publish_input("scatter", mine.numel(), mine.dtype)
            piece.copy_(buffer[self._rank * width :][: len(piece)])
            rounds.finish()

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Operation:
        return self._by_message.all_to_all(received, sent)

    def barrier(self) -> Operation:
        yield self._rounds.await_writable()
        yield self._rounds.publish_input("barrier", 0, torch.uint8)
        self._rounds.finish()

    def _pieces(self, flat: Tensor, width: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """What fits into a round, at most `width` elements, one after the other; an empty one if there is nothing."""
        width = width or self._rounds.buffer_bytes // flat.itemsize
        if flat.numel() <= width:
            yield 0, flat
            return
        for start in range(0, flat.numel(), width):
            yield start, flat[start : start + width]

    def _fold(self, out: Tensor, at: int, operator: ReduceOperator, runs: list[Run]) -> None:
        """Combine what all have in their buffers, in Gloo's order; `out` begins at element `at` of the buffers."""
        kernel = KERNELS.get(out.dtype) if operator.name in ("SUM", "AVG") else None
        if kernel is not None:
            self._add(kernel, out, at, runs)
            return
        buffers = self._rounds.buffers(out.dtype)
        for block, start, stop in runs:
            first, *others = self._orders[block].tolist()
            result = buffers[first][start:stop].clone()
            for rank in others:
                operator.make(buffers[rank][start:stop], result, result)
            out[start - at : stop - at].copy_(result)

    def _add(self, kernel: Kernel, out: Tensor, at: int, runs: list[Run]) -> None:
        target = np.array([out.data_ptr() - at * out.itemsize])
        addresses = self._rounds.addresses[self._rounds.number % 2]
        for block, start, stop in runs:
            kernel(addresses[self._orders[block]], target, start, stop, self._ones, 1.0)


def _runs(cut: list[slice], start: int, stop: int, origin: int) -> list[Run]:
    """Runs of one block each between two elements of a tensor, counted from `origin`."""
    return [
        (block, first - origin, last - origin) for block, first, last in gloo_order.split_by_block(cut, start, stop)
    ]
