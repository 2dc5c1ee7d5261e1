"""Cost of the collectives that tensor parallelism runs, as `tutti.backend.message_collectives` implements them."""

from math import ceil, log2

from tutti.backend.message_collectives import DIRECT_BYTES
from tutti.cluster import Link
from tutti.collectives.ring import ring_cost
from tutti.cost import Placement
from tutti.plan.mesh.dry_run import TracedCollective


def collective_seconds(traced: TracedCollective, scale: float, placement: Placement) -> float:
    """Return the seconds of a traced collective, if its data is `scale` times as large, on such a placement."""
    kind, num_bytes = traced.kind, scale * traced.num_bytes
    others = placement.num_ranks - 1
    if not others or not num_bytes:
        return 0.0
    straight = others * num_bytes <= DIRECT_BYTES
    if kind == "broadcast":
        return ceil(log2(placement.num_ranks)) * placement.link.seconds(num_bytes)
    if kind == "all_to_all":
        return others * placement.shared_link.seconds(num_bytes / placement.num_ranks)
    if kind == "reduce_scatter":
        return placement.shared_link.seconds(others * num_bytes) if straight else _round(num_bytes, placement)
    if straight:
        return _doubling(num_bytes, placement.num_ranks, placement.shared_link)
    return (
        ring_cost(placement.num_ranks, num_bytes, placement.link)
        if kind == "all_reduce"
        else _round(num_bytes, placement)
    )


def _doubling(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of recursive doubling: in each round a rank sends all that it has so far."""
    seconds, have = 0.0, 1
    while have < num_ranks:
        more = min(have, num_ranks - have)
        seconds += link.seconds(more * num_bytes)
        have += more
    return seconds


def _round(num_bytes: float, placement: Placement) -> float:
    """Return the seconds of one round of a ring, with blocks of so many bytes."""
    return ring_cost(placement.num_ranks, placement.num_ranks * num_bytes, placement.link) / 2
