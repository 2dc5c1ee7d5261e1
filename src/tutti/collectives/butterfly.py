"""The butterfly: as few bytes as the ring and as few rounds as the tree, where P is a power of two."""

import math

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import Fold, exchange, room_like
from tutti.transports.base import Operation, Transport


def butterfly(flat: Tensor, transport: Transport) -> Operation:
    """Sum over ranks, in place: recursive halving, then recursive doubling (Rabenseifner 2004).

    Each round halves the part that a rank is adding up, until every rank has one part of the sum; the same rounds
    backwards put the parts together again.
    """
    fold = Fold(transport)
    yield from fold.fold(flat, transport)
    if not fold.outer:
        yield from _halve_and_double(flat, transport, fold.num_inner)
    yield from fold.unfold(flat, transport)


def butterfly_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """2 log₂ P α + 2 (P-1)/P n β; if P is not a power of two, that of the next smaller one and 2 (α + n β)."""
    rounds = math.floor(math.log2(num_ranks))
    inner = 1 << rounds
    cost = 2 * (rounds * link.latency_s + (inner - 1) / inner * num_bytes * link.seconds_per_byte)
    return cost + (2 * link.seconds(num_bytes) if inner != num_ranks else 0.0)


def _halve_and_double(flat: Tensor, transport: Transport, num_ranks: int) -> Operation:
    halves = []
    start, stop, distance = 0, flat.numel(), num_ranks
    while distance := distance // 2:
        middle = (start + stop) // 2
        lower, upper = flat[start:middle], flat[middle:stop]
        upwards = bool(transport.rank & distance)
        keep, give = (upper, lower) if upwards else (lower, upper)
        theirs = room_like(keep)
        yield from exchange(give, theirs, transport.rank ^ distance, transport)
        keep += theirs
        halves.append((keep, give, transport.rank ^ distance))
        start, stop = (middle, stop) if upwards else (start, middle)
    for keep, give, partner in reversed(halves):
        yield from exchange(keep, give, partner, transport)
