"""Collectives between hosts with several ranks each: copied data crosses the network once per host.

How it works
------------
Reductions go round a ring of all ranks, as their order of summing is Gloo's. Copies use both levels: a tensor is
gathered or spread in the shared memory of a host, and only the first rank of each host exchanges it with the other
hosts.

Ranks of one host wait for their leader in one channel while the leader waits for other hosts in another. So a rank that
fails aborts both (`_aborting`); otherwise peers in the other channel would wait for it until their timeout.
"""

import torch
from torch import Tensor

from tutti.backend.collectives import Collectives, all_ranges, reduce_in_gloo_order
from tutti.backend.message_collectives import MessageCollectives
from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.collectives.ring import pass_blocks_around, split_into_chunks
from tutti.transports import HostsTransport, SocketTransport
from tutti.transports.base import Operation
from tutti.transports.capabilities import SharesAll


class TwoLevelCollectives(MessageCollectives):
    """Collectives over a `HostsTransport`. Those that are not overridden use messages between all ranks."""

    def __init__(self, transport: HostsTransport) -> None:
        """Allocate the shared buffers of this host. Collective."""
        super().__init__(transport.inner)
        self._within, self._across = transport.within, transport.across
        self._local: Collectives = MessageCollectives(self._within)
        if isinstance(self._within, SharesAll):
            from tutti.backend.shared_memory_collectives import SharedMemoryCollectives  # It imports a compiler: slow.

            self._local = SharedMemoryCollectives(self._within)  # type: ignore[arg-type]
        names = sorted(set(transport.hosts), key=transport.hosts.index)
        self._hosts = [[rank for rank, host in enumerate(transport.hosts) if host == name] for name in names]
        """The ranks of each host, in the order of their first ranks, which are the leaders."""
        self._host = names.index(transport.hosts[transport.rank])

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        return self._aborting(self._all_reduce(flat, operator))

    def all_gather(self, outputs: list[Tensor], flat: Tensor) -> Operation:
        return self._aborting(self._all_gather(outputs, flat))

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        return self._aborting(self._broadcast(flat, root))

    def barrier(self) -> Operation:
        return self._aborting(self._barrier())

    def _all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        # Short tensors: latency counts, so every rank gets all of them and adds them up itself.
        if self._is_direct(flat):
            inputs = [torch.empty_like(flat) for _ in range(self._size)]
            yield from self._all_gather(inputs, flat)
            reduce_in_gloo_order(flat, inputs, operator, all_ranges(flat, self._size))
            return
        # Long ones: each rank reduces one block in the ring, and only then the blocks are gathered on two levels.
        yield from gloo_order.ring(flat, self._transport, operator.accumulate, scattered=True)
        blocks = [flat[part] for part in gloo_order.blocks(flat.numel(), flat.itemsize, self._size)]
        yield from self._all_gather(blocks, blocks[self._rank])

    def _all_gather(self, outputs: list[Tensor], flat: Tensor) -> Operation:
        """As `all_gather`, but tensors may differ in length, as long as all ranks know the lengths."""
        width = max(output.numel() for output in outputs)
        rows = flat.new_empty((self._size, width))  # One row per rank, those of a host next to each other.
        row_of = {rank: row for row, rank in enumerate(rank for host in self._hosts for rank in host)}
        padded = rows[row_of[self._rank]]
        padded[: flat.numel()] = flat
        local_ranks = self._hosts[self._host]
        # 1. Within the host. A copy is given, because this row is among the outputs too.
        yield from self._local.all_gather([rows[row_of[rank]] for rank in local_ranks], padded.clone())
        first, last = row_of[local_ranks[0]], row_of[local_ranks[-1]] + 1
        if self._across is not None:
            # 2. Between leaders: the rows of a host are adjacent, and travel as one block round the ring of hosts.
            per_host = [rows[row_of[host[0]] : row_of[host[-1]] + 1].view(-1) for host in self._hosts]
            longest = max(part.nbytes for part in per_host)
            chunks = [split_into_chunks(part, longest) for part in per_host]
            yield from pass_blocks_around(chunks, self._across, self._host, 0, len(per_host) - 1)
        # 3. From the leader to its host: the rows of other hosts, which lie before and after the host's own.
        for others in (rows[:first], rows[last:]):
            if len(others):
                yield from self._local.broadcast(others.view(-1), 0)
        for rank, output in enumerate(outputs):
            output.copy_(rows[row_of[rank]][: output.numel()])

    def _broadcast(self, flat: Tensor, root: int) -> Operation:
        source_host = next(number for number, host in enumerate(self._hosts) if root in host)
        # The leader of the root's host gets the tensor first: it may not be the root.
        if self._host == source_host:
            yield from self._local.broadcast(flat, self._hosts[source_host].index(root))
        if self._across is not None:
            yield from MessageCollectives(self._across).broadcast(flat, source_host)
        if self._host != source_host:
            yield from self._local.broadcast(flat, 0)

    def _barrier(self) -> Operation:
        # All ranks of this host are here, then all hosts, and then the leader releases its host.
        yield from self._local.barrier()
        if self._across is not None:
            yield from MessageCollectives(self._across).barrier()
        yield from self._local.barrier()

    def _aborting(self, operation: Operation) -> Operation:
        """Run `operation`; if it fails, abort both channels, as ranks wait for this one in either."""
        try:
            yield from operation
        except Exception:
            if isinstance(self._within, SharesAll):
                self._within.abort()
            if isinstance(self._across, SocketTransport):
                self._across.channel_membership.abort()
            raise
