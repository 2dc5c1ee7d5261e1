"""Binomial trees: few messages, each of the whole tensor."""

import math

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import room_like
from tutti.transports.base import Operation, Transport


def tree(flat: Tensor, transport: Transport) -> Operation:
    """Sum over ranks, in place: towards rank 0 along a binomial tree, and back (Thakur, Rabenseifner & Gropp 2005)."""
    rank, size = transport.rank, transport.size
    hop = 1
    while hop < size:
        if rank % (2 * hop):
            yield transport.isend(flat, rank - hop)
            break
        if rank + hop < size:
            theirs = room_like(flat)
            yield transport.irecv(theirs, rank + hop)
            flat += theirs
        hop *= 2
    yield from broadcast(flat, transport)


def broadcast(flat: Tensor, transport: Transport) -> Operation:
    """Overwrite `flat` on every rank with rank 0's, along a binomial tree."""
    rank, size = transport.rank, transport.size
    hop = 1 << (size - 1).bit_length()
    while hop := hop // 2:
        if rank % (2 * hop) == 0 and rank + hop < size:
            yield transport.isend(flat, rank + hop)
        elif rank % (2 * hop) == hop:
            yield transport.irecv(flat, rank - hop)


def tree_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """2 ⌈log₂ P⌉ (α + n β)."""
    return 2 * broadcast_cost(num_ranks, num_bytes, link)


def broadcast_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """⌈log₂ P⌉ (α + n β)."""
    return math.ceil(math.log2(num_ranks)) * link.seconds(num_bytes)
