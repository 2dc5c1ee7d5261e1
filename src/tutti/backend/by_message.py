"""Collective operations made of messages: over sockets, MPI and in virtual time."""

import torch
from torch import Tensor

from tutti.backend.collectives import Collectives, Run
from tutti.backend.operators import Operator
from tutti.collectives import gloo_order
from tutti.collectives.doubling import recursive_doubling
from tutti.collectives.ring import in_chunks, pass_on
from tutti.collectives.tree import broadcast
from tutti.transports.base import Steps, Transport

_SMALL_BYTES = 32 * 2**10
"""What a rank sends to each other rank rather than round the ring: then messages count, and not bytes."""


class ByMessage(Collectives):
    """Small things go straight to everyone, so that they take one message's time; large ones go round a ring."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank, self._size = transport.rank, transport.size

    def all_reduce(self, flat: Tensor, operator: Operator) -> Steps:
        if flat.nbytes > _SMALL_BYTES:
            return gloo_order.ring(flat, self._transport, operator.combine)
        return self._all_reduce_small(flat, operator)

    def _all_reduce_small(self, flat: Tensor, operator: Operator) -> Steps:
        everyones = [torch.empty_like(flat) for _ in range(self._size)]
        yield from self._gather_straight(everyones, flat)
        cut = gloo_order.blocks(flat.numel(), flat.itemsize, self._size)
        fold(flat, everyones, operator, [(block, part.start, part.stop) for block, part in enumerate(cut)])

    def reduce(self, flat: Tensor, operator: Operator, root: int) -> Steps:
        yield from gloo_order.ring(flat, self._transport, operator.combine, scattered=True)
        parts = [flat[part] for part in gloo_order.blocks(flat.numel(), flat.itemsize, self._size)]
        yield from self.gather(parts if self._rank == root else None, parts[self._rank], root)

    def reduce_scatter(self, mine: Tensor, parts: list[Tensor], operator: Operator, runs: list[Run]) -> Steps:
        everyones = [torch.empty_like(mine) for _ in range(self._size)]
        yield from self.all_to_all(everyones, parts)
        fold(mine, everyones, operator, runs)

    def all_gather(self, everyones: list[Tensor], mine: Tensor) -> Steps:
        if mine.nbytes <= _SMALL_BYTES:
            yield from self._gather_straight(everyones, mine)
            return
        everyones[self._rank].copy_(mine)
        chunks = [in_chunks(each, mine.nbytes) for each in everyones]
        yield from pass_on(chunks, self._transport, self._rank, 0, self._size - 1)

    def _gather_straight(self, everyones: list[Tensor], mine: Tensor) -> Steps:
        yield from self.all_to_all(everyones, [mine] * self._size)

    def broadcast(self, flat: Tensor, root: int) -> Steps:
        return broadcast(flat, gloo_order.rooted(self._transport, root))

    def gather(self, everyones: list[Tensor] | None, mine: Tensor, root: int) -> Steps:
        if everyones is None:
            yield self._transport.isend(mine, root)
            return
        receiving = [self._transport.irecv(everyones[rank], rank) for rank in self._others()]
        if everyones[root] is not mine:
            everyones[root].copy_(mine)
        yield from receiving

    def scatter(self, mine: Tensor, parts: list[Tensor] | None, root: int) -> Steps:
        if parts is None:
            yield self._transport.irecv(mine, root)
            return
        sending = [self._transport.isend(parts[rank], rank) for rank in self._others()]
        mine.copy_(parts[root])
        yield from sending

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        receiving = [self._transport.irecv(received[rank], rank) for rank in self._others()]
        sending = [self._transport.isend(sent[rank], rank) for rank in self._others()]
        received[self._rank].copy_(sent[self._rank])
        yield from receiving
        yield from sending

    def barrier(self) -> Steps:
        return recursive_doubling(torch.zeros(1, dtype=torch.uint8), self._transport)

    def _others(self) -> list[int]:
        """All other ranks, the next one first: so that not all send to one at a time."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]


def fold(out: Tensor, everyones: list[Tensor], operator: Operator, runs: list[Run]) -> None:
    """Combine what all ranks have, in Gloo's order."""
    for block, start, stop in runs:
        first, *others = gloo_order.order(block, len(everyones))
        result = everyones[first][start:stop].clone()
        for rank in others:
            operator.make(everyones[rank][start:stop], result, result)
        out[start:stop].copy_(result)
