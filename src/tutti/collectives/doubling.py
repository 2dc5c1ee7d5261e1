"""Recursive doubling: the fewest rounds, each of the whole tensor."""

import math

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import Fold, exchange, room_like
from tutti.transports.base import Operation, Transport


def recursive_doubling(flat: Tensor, transport: Transport) -> Operation:
    """Sum over ranks, in place: exchange with a partner at distance 1, 2, 4, ... (Thakur, Rabenseifner & Gropp 2005).

    Both partners add the same two numbers, so all ranks hold the same bits after every round.
    """
    fold = Fold(transport)
    yield from fold.fold(flat, transport)
    if not fold.outer:
        theirs = room_like(flat)
        distance = 1
        while distance < fold.num_inner:
            yield from exchange(flat, theirs, transport.rank ^ distance, transport)
            flat += theirs
            distance *= 2
    yield from fold.unfold(flat, transport)


def recursive_doubling_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """⌊log₂ P⌋ (α + n β), and 2 (α + n β) more if P is not a power of two."""
    rounds = math.floor(math.log2(num_ranks))
    return (rounds + 2 * (num_ranks != 1 << rounds)) * link.seconds(num_bytes)
