"""Butterfly all-reduce: as few bytes as the ring and as few rounds as the tree, for powers of two (Rabenseifner 2004).

Recursive halving reduces: in each round a rank sends one half of what it is summing to a partner, and keeps the other
half, to which it adds the partner's. Recursive doubling gathers: the same rounds backwards put the finished parts
together. With 4 ranks and parts a to d, an upper-case letter being a finished sum:

```
            rank 0       rank 1       rank 2       rank 3
start       a b c d      a b c d      a b c d      a b c d
halve, 2    a b          a b          c d          c d         partners 0 ↔ 2, 1 ↔ 3
halve, 1    A            B            C            D           partners 0 ↔ 1, 2 ↔ 3
double, 1   A B          A B          C D          C D         partners 0 ↔ 1, 2 ↔ 3
double, 2   A B C D      A B C D      A B C D      A B C D     partners 0 ↔ 2, 1 ↔ 3
```

A number of ranks that is no power of two is folded first (`PowerOfTwoFold`). Each part is summed on one rank, so all
ranks end with the same bits.
"""

import math

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import PowerOfTwoFold, buffer_like, exchange
from tutti.transports.base import Operation, Transport


def butterfly(flat: Tensor, transport: Transport) -> Operation:
    """Sum `flat` over ranks, in place, by recursive halving and then recursive doubling."""
    fold = PowerOfTwoFold(transport)
    yield from fold.fold(flat, transport)
    if not fold.outer:
        yield from _halve_and_double(flat, transport, fold.num_inner)
    yield from fold.unfold(flat, transport)


def butterfly_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """2 log₂ P α + 2 (P-1)/P n β seconds: messages of n/2, n/4, ... bytes, which add up to (P-1)/P n, twice.

    If P is not a power of two, it is the cost for the next smaller one, and 2 (α + n β) for folding and unfolding.
    """
    rounds = math.floor(math.log2(num_ranks))
    inner = 1 << rounds
    cost = 2 * (rounds * link.latency_s + (inner - 1) / inner * num_bytes * link.seconds_per_byte)
    return cost + (2 * link.seconds(num_bytes) if inner != num_ranks else 0.0)


def _halve_and_double(flat: Tensor, transport: Transport, num_ranks: int) -> Operation:
    """Make all rounds among `num_ranks` ranks, a power of two."""
    rounds = []
    start, stop, distance = 0, flat.numel(), num_ranks
    while distance := distance // 2:
        # All partners cut alike, because they have cut the same ranges so far: no lengths are exchanged.
        middle = (start + stop) // 2
        lower, upper = flat[start:middle], flat[middle:stop]
        # Of two partners, the one with this bit set keeps the upper half.
        upwards = bool(transport.rank & distance)
        kept, sent = (upper, lower) if upwards else (lower, upper)
        received = buffer_like(kept)
        yield from exchange(sent, received, transport.rank ^ distance, transport)
        # In place in `flat`: `kept` is a view of it.
        kept += received
        rounds.append((kept, sent, transport.rank ^ distance))
        start, stop = (middle, stop) if upwards else (start, middle)
    # Backwards: `kept` is finished by then, and the partner has finished `sent`.
    for kept, sent, partner in reversed(rounds):
        yield from exchange(kept, sent, partner, transport)
