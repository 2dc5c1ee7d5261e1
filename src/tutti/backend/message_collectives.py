"""Collective operations made of messages: over sockets, MPI and in virtual time."""

from collections.abc import Generator

import torch
from torch import Tensor

from tutti.backend.collectives import Collectives, fold, own_runs, whole_runs
from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.collectives.doubling import recursive_doubling
from tutti.collectives.ring import pass_blocks_around, split_into_chunks
from tutti.collectives.tree import broadcast
from tutti.transports.base import Operation, Transport, Work

STRAIGHT_BYTES = 32 * 2**10
"""What may come to a rank from all others at once: more would overrun the buffers of its link."""


class MessageCollectives(Collectives):
    """Small things take as few messages as can be; large ones go round a ring, whose links are all in use."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank, self._size = transport.rank, transport.size

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        if not self._straight(flat):
            return gloo_order.ring(flat, self._transport, operator.combine)
        return self._all_reduce_small(flat, operator)

    def _all_reduce_small(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        everyones = yield from self._gather_quickly(flat)
        fold(flat, everyones, operator, whole_runs(flat, self._size))

    def _gather_quickly(self, mine: Tensor) -> Generator[Work, None, list[Tensor]]:
        """What every rank has, in as few messages as can be: each time twice as much (Bruck 1997)."""
        size, numel, rank = self._size, mine.numel(), self._rank
        room = mine.new_empty(size * numel)
        room[:numel] = mine
        have = 1
        while have < size:
            more = min(have, size - have)
            coming = self._transport.irecv(room[have * numel : (have + more) * numel], (rank + have) % size)
            yield self._transport.isend(room[: more * numel], (rank - have) % size)
            yield coming
            have += more
        return [room[(other - rank) % size * numel :][:numel] for other in range(size)]

    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        yield from gloo_order.ring(flat, self._transport, operator.combine, scattered=True)
        parts = [flat[part] for part in gloo_order.blocks(flat.numel(), flat.itemsize, self._size)]
        yield from self.gather(parts if self._rank == root else None, parts[self._rank], root)

    def reduce_scatter(self, mine: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        if self._straight(mine):
            everyones = [torch.empty_like(mine) for _ in range(self._size)]
            yield from self._exchange(everyones, _parts(flat, mine.numel(), self._size))
            fold(mine, everyones, operator, own_runs(flat, mine.numel(), self._rank, self._size))
            return
        flat = flat.clone()
        yield from gloo_order.ring(flat, self._transport, operator.combine, scattered=True)
        yield from self._shift(mine, flat)

    def _shift(self, mine: Tensor, flat: Tensor) -> Operation:
        """Gloo's blocks are a little longer than what each rank is to have: hand on what is another's."""
        blocks, numel, rank = gloo_order.blocks(flat.numel(), flat.itemsize, self._size), mine.numel(), self._rank
        works = []
        for other in range(self._size):
            for _, start, stop in gloo_order.split_by_block([blocks[other]], rank * numel, (rank + 1) * numel):
                place = mine[start - rank * numel : stop - rank * numel]
                if other == rank:
                    place.copy_(flat[start:stop])
                else:
                    works.append(self._transport.irecv(place, other))
            if other != rank:
                for _, start, stop in gloo_order.split_by_block([blocks[rank]], other * numel, (other + 1) * numel):
                    works.append(self._transport.isend(flat[start:stop], other))
        yield from works

    def reduce_parts(self, mine: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        if self._straight(mine):
            everyones = [torch.empty_like(mine) for _ in range(self._size)]
            yield from self._exchange(everyones, parts)
            fold(mine, everyones, operator, whole_runs(mine, self._size))
            return
        for root, part in enumerate(parts):
            flat = part.clone()
            yield from self.reduce(flat, operator, root)
            if root == self._rank:
                mine.copy_(flat)

    def all_gather(self, everyones: list[Tensor], mine: Tensor) -> Operation:
        if self._straight(mine):
            for room, data in zip(everyones, (yield from self._gather_quickly(mine)), strict=True):
                room.copy_(data)
            return
        everyones[self._rank].copy_(mine)
        chunks = [split_into_chunks(each, mine.nbytes) for each in everyones]
        yield from pass_blocks_around(chunks, self._transport, self._rank, 0, self._size - 1)

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        return broadcast(flat, gloo_order.renumbered_from(self._transport, root))

    def gather(self, everyones: list[Tensor] | None, mine: Tensor, root: int) -> Operation:
        if everyones is None:
            yield self._transport.isend(mine, root)
            return
        receiving = [self._transport.irecv(everyones[rank], rank) for rank in self._others()]
        if everyones[root] is not mine:
            everyones[root].copy_(mine)
        yield from receiving

    def scatter(self, mine: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        if parts is None:
            yield self._transport.irecv(mine, root)
            return
        sending = [self._transport.isend(parts[rank], rank) for rank in self._others()]
        mine.copy_(parts[root])
        yield from sending

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Operation:
        """In every round each rank sends to one and receives from one: no link carries two messages at a time."""
        received[self._rank].copy_(sent[self._rank])
        for step in range(1, self._size):
            to, from_ = (self._rank + step) % self._size, (self._rank - step) % self._size
            receiving = self._transport.irecv(received[from_], from_)
            yield self._transport.isend(sent[to], to)
            yield receiving

    def barrier(self) -> Operation:
        return recursive_doubling(torch.zeros(1, dtype=torch.uint8), self._transport)

    def _straight(self, mine: Tensor) -> bool:
        """Whether what each rank sends to each is best sent at once."""
        return (self._size - 1) * mine.nbytes <= STRAIGHT_BYTES

    def _exchange(self, received: list[Tensor], sent: list[Tensor]) -> Operation:
        """Everything to everyone at once."""
        receiving = [self._transport.irecv(received[rank], rank) for rank in self._others()]
        sending = [self._transport.isend(sent[rank], rank) for rank in self._others()]
        received[self._rank].copy_(sent[self._rank])
        yield from receiving
        yield from sending

    def _others(self) -> list[int]:
        """All other ranks, the next one first: so that not all send to one at a time."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]


def _parts(flat: Tensor, numel: int, size: int) -> list[Tensor]:
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(size)]
