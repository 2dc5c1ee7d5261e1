"""Binomial-tree all-reduce and broadcast: few messages, each of the whole tensor (Thakur, Rabenseifner & Gropp 2005).

With 5 ranks the sum goes up to rank 0 in ⌈log₂ P⌉ = 3 rounds, and the broadcast comes down in as many:

```
reduce      round 1: 1 → 0, 3 → 2      round 2: 2 → 0      round 3: 4 → 0
broadcast   round 1: 0 → 4             round 2: 0 → 2      round 3: 0 → 1, 2 → 3
```
"""

import math

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import buffer_like
from tutti.transports.base import Operation, Transport


def tree(flat: Tensor, transport: Transport) -> Operation:
    """Sum `flat` over ranks, in place: towards rank 0 along a binomial tree, and back.

    All ranks end with rank 0's bits, because the result is broadcast.
    """
    rank, size = transport.rank, transport.size
    hop = 1
    while hop < size:
        # `hop` is the lowest bit set in this rank's number: it sends its sum to its parent, and is done.
        if rank % (2 * hop):
            yield transport.isend(flat, rank - hop)
            break
        if rank + hop < size:
            # In each round at most one child, in the order of hops: sums have the same bits in every run.
            received = buffer_like(flat)
            yield transport.irecv(received, rank + hop)
            flat += received
        hop *= 2
    yield from broadcast(flat, transport)


def broadcast(flat: Tensor, transport: Transport) -> Operation:
    """Overwrite `flat` on every rank with rank 0's, along a binomial tree."""
    rank, size = transport.rank, transport.size
    # The smallest power of two that is at least `size`; for one rank it is 1, and the loop ends at once.
    hop = 1 << (size - 1).bit_length()
    while hop := hop // 2:
        # Multiples of 2 × `hop` have the tensor by now; they send it to the odd multiples of `hop`.
        if rank % (2 * hop) == 0 and rank + hop < size:
            yield transport.isend(flat, rank + hop)
        elif rank % (2 * hop) == hop:
            yield transport.irecv(flat, rank - hop)


def tree_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """2 ⌈log₂ P⌉ (α + n β) seconds: up and down the tree, each round one message of all n bytes."""
    return 2 * broadcast_cost(num_ranks, num_bytes, link)


def broadcast_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """⌈log₂ P⌉ (α + n β) seconds: the longest path of the tree, one message of all n bytes after another."""
    return math.ceil(math.log2(num_ranks)) * link.seconds(num_bytes)
