"""Collective operations between hosts on which ranks share memory: what only copies crosses the network once a host."""

import torch
from torch import Tensor

from tutti.backend.collectives import Collectives, fold, whole_runs
from tutti.backend.message_collectives import MessageCollectives
from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.collectives.ring import pass_blocks_around, split_into_chunks
from tutti.transports import HostsTransport, SocketTransport
from tutti.transports.base import Operation
from tutti.transports.capabilities import SharesAll


class TwoLevelCollectives(MessageCollectives):
    """Sums go round a ring of all ranks, whose order is Gloo's; results are handed out host by host."""

    def __init__(self, transport: HostsTransport) -> None:
        """Open the memory of this host. Collective."""
        super().__init__(transport.inner)
        self._within, self._across = transport.within, transport.across
        self._in_memory: Collectives = MessageCollectives(self._within)
        if isinstance(self._within, SharesAll):
            from tutti.backend.shared_memory_collectives import SharedMemoryCollectives  # Costs a compiler's import.

            self._in_memory = SharedMemoryCollectives(self._within)  # type: ignore[arg-type]
        names = sorted(set(transport.hosts), key=transport.hosts.index)
        self._hosts = [[rank for rank, host in enumerate(transport.hosts) if host == name] for name in names]
        """The ranks of each, the first of which leads; in the order of those."""
        self._here = names.index(transport.hosts[transport.rank])

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        return self._told(self._all_reduce(flat, operator))

    def all_gather(self, everyones: list[Tensor], mine: Tensor) -> Operation:
        return self._told(self._all_gather(everyones, mine))

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        return self._told(self._broadcast(flat, root))

    def barrier(self) -> Operation:
        return self._told(self._barrier())

    def _all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        if self._straight(flat):
            everyones = [torch.empty_like(flat) for _ in range(self._size)]
            yield from self._all_gather(everyones, flat)
            fold(flat, everyones, operator, whole_runs(flat, self._size))
            return
        yield from gloo_order.ring(flat, self._transport, operator.combine, scattered=True)
        blocks = [flat[part] for part in gloo_order.blocks(flat.numel(), flat.itemsize, self._size)]
        yield from self._all_gather(blocks, blocks[self._rank])

    def _all_gather(self, everyones: list[Tensor], mine: Tensor) -> Operation:
        """What ranks have may differ in length, as long as all know it."""
        width = max(each.numel() for each in everyones)
        room = mine.new_empty((self._size, width))  # Ranks of a host side by side.
        places = {rank: place for place, rank in enumerate(rank for host in self._hosts for rank in host)}
        padded = room[places[self._rank]]
        padded[: mine.numel()] = mine
        here = self._hosts[self._here]
        yield from self._in_memory.all_gather([room[places[rank]] for rank in here], padded.clone())
        first, last = places[here[0]], places[here[-1]] + 1
        if self._across is not None:
            rows = [room[places[host[0]] : places[host[-1]] + 1].view(-1) for host in self._hosts]
            longest = max(row.nbytes for row in rows)
            chunks = [split_into_chunks(row, longest) for row in rows]
            yield from pass_blocks_around(chunks, self._across, self._here, 0, len(rows) - 1)
        for others in (room[:first], room[last:]):
            if len(others):
                yield from self._in_memory.broadcast(others.view(-1), 0)
        for rank, each in enumerate(everyones):
            each.copy_(room[places[rank]][: each.numel()])

    def _broadcast(self, flat: Tensor, root: int) -> Operation:
        source = next(number for number, host in enumerate(self._hosts) if root in host)
        if self._here == source:
            yield from self._in_memory.broadcast(flat, self._hosts[source].index(root))
        if self._across is not None:
            yield from MessageCollectives(self._across).broadcast(flat, source)
        if self._here != source:
            yield from self._in_memory.broadcast(flat, 0)

    def _barrier(self) -> Operation:
        yield from self._in_memory.barrier()
        if self._across is not None:
            yield from MessageCollectives(self._across).barrier()
        yield from self._in_memory.barrier()

    def _told(self, steps: Operation) -> Operation:
        """Steps for which others wait in other conversations too: all are told if this rank cannot go on."""
        try:
            yield from steps
        except Exception:
            if isinstance(self._within, SharesAll):
                self._within.abort()
            if isinstance(self._across, SocketTransport):
                self._across.channel_membership.abort()
            raise
