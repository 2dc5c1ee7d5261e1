"""Cost of the collectives that tensor parallelism runs, as `tutti.backend.message_collectives` implements them."""

from math import ceil, log2

from tutti.backend.message_collectives import DIRECT_BYTES
from tutti.cluster import Link
from tutti.collectives.ring import ring_cost
from tutti.cost import Placement
from tutti.plan.mesh.dry_run import TracedCollective


def talking_s(said: TracedCollective, times: float, place: Placement) -> float:
    """Of something that is said, if it is so many times as long, by ranks in such a place."""
    kind, num_bytes = said.kind, times * said.num_bytes
    others = place.num_ranks - 1
    if not others or not num_bytes:
        return 0.0
    straight = others * num_bytes <= DIRECT_BYTES
    if kind == "broadcast":
        return ceil(log2(place.num_ranks)) * place.link.seconds(num_bytes)
    if kind == "all_to_all":
        return others * place.shared_link.seconds(num_bytes / place.num_ranks)
    if kind == "reduce_scatter":
        return place.shared_link.seconds(others * num_bytes) if straight else _round(num_bytes, place)
    if straight:
        return _doubling(num_bytes, place.num_ranks, place.shared_link)
    return ring_cost(place.num_ranks, num_bytes, place.link) if kind == "all_reduce" else _round(num_bytes, place)


def _doubling(num_bytes: float, num_ranks: int, link: Link) -> float:
    """What every rank has, each time twice as much."""
    seconds, have = 0.0, 1
    while have < num_ranks:
        more = min(have, num_ranks - have)
        seconds += link.seconds(more * num_bytes)
        have += more
    return seconds


def _round(num_bytes: float, place: Placement) -> float:
    """Once round a ring, with blocks of so many bytes."""
    return ring_cost(place.num_ranks, place.num_ranks * num_bytes, place.link) / 2
