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
    # Up to this size data goes straight to all other ranks, in few latencies; above it, round a ring.
    direct = others * num_bytes <= DIRECT_BYTES
    if kind == "broadcast":
        return ceil(log2(placement.num_ranks)) * placement.link.seconds(num_bytes)
    if kind == "all_to_all":  # In rounds, one peer at a time: `num_bytes` is what a rank sends to all together.
        return others * placement.shared_link.seconds(num_bytes / placement.num_ranks)
    if kind == "reduce_scatter":
        # Directly, the parts of all other ranks come to a rank at once: one latency.
        return placement.shared_link.seconds(others * num_bytes) if direct else _ring_pass(num_bytes, placement)
    if direct:  # A small all-reduce also gathers all inputs, and each rank reduces them itself.
        return _doubling(num_bytes, placement.num_ranks, placement.shared_link)
    return (
        ring_cost(placement.num_ranks, num_bytes, placement.link)
        if kind == "all_reduce"
        else _ring_pass(num_bytes, placement)
    )


def _doubling(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a gather by doubling (Bruck 1997): in each round a rank sends all that it has so far."""
    seconds, num_gathered = 0.0, 1
    while num_gathered < num_ranks:
        num_new = min(num_gathered, num_ranks - num_gathered)  # The last round sends only what is missing.
        seconds += link.seconds(num_new * num_bytes)
        num_gathered += num_new
    return seconds


def _ring_pass(num_bytes: float, placement: Placement) -> float:
    """Return the seconds in which blocks of `num_bytes` bytes travel once round the ring.

    A ring all-reduce is two such passes, with one block for each rank.
    """
    # `ring_cost` takes the bytes of the whole tensor, of which a block is one part for each rank.
    return ring_cost(placement.num_ranks, placement.num_ranks * num_bytes, placement.link) / 2
