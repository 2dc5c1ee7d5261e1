"""The cost of one sum over all ranks: an all-reduce of one bucket, exact or compressed."""

from math import ceil, log2
from typing import NamedTuple, cast

from tutti.cluster import Link
from tutti.codecs import Codec, LinearCodec
from tutti.codecs.packet import HEADER
from tutti.collectives import ALGORITHMS, butterfly, recursive_doubling, ring
from tutti.collectives.compressed import GatheredSum, LinearSum, compressed_sum_for
from tutti.collectives.compressed.messages import aligned
from tutti.collectives.hierarchical import TYPICAL_LINK
from tutti.cost.bucket_loads import BucketLoad
from tutti.cost.encoding import coding_seconds
from tutti.cost.placement import Placement

_CHOICES = ("native", "ring", "tree", "butterfly", "recursive_doubling")
"""The algorithms that "cheapest" chooses from."""

_ACROSS = (ring, butterfly, recursive_doubling)
"""The algorithms that the leaders of hosts choose from."""

_LENGTH_BYTES = 8
"""Bytes of the message with the length of a sparse packet, sent before it."""


class SumCost(NamedTuple):
    """The cost, for one rank, of summing one bucket over all ranks."""

    num_bytes: float
    """Bytes that the rank sends."""
    wire_s: float
    """Seconds during which the link is in use."""
    latency_s: float = 0.0
    """Further seconds of waiting, during which another bucket may use the link."""
    coding_s: float = 0.0
    """Seconds of encoding and decoding."""


def all_reduce_cost(algorithm: str, num_bytes: float, placement: Placement) -> SumCost:
    """Return the cost of an all-reduce of `num_bytes` bytes by the named algorithm."""
    if algorithm == "cheapest":
        return min((all_reduce_cost(name, num_bytes, placement) for name in _CHOICES), key=lambda cost: cost.wire_s)
    if algorithm in ("native", "hierarchical") and placement.two_levels:
        # Three sums in sequence: in each host's memory, between the hosts' leaders, and back in memory.
        across = _cheapest(placement.num_hosts, num_bytes, placement.link)
        return across._replace(wire_s=across.wire_s + 2 * _in_memory(num_bytes, placement))
    if algorithm in ("native", "hierarchical") and placement.num_hosts == 1:
        return SumCost(num_bytes, _in_memory(num_bytes, placement))
    if algorithm in ("native", "hierarchical"):
        return _cheapest(placement.num_ranks, num_bytes, placement.link)
    if algorithm == "tree":
        return SumCost(_sent(algorithm, num_bytes, placement.num_ranks), _tree_s(num_bytes, placement))
    # In a ring no two ranks of a host, or below a switch, send over the same link.
    link = placement.link if algorithm in ("ring", "ring_blocking") else placement.shared_link
    return SumCost(
        _sent(algorithm, num_bytes, placement.num_ranks),
        ALGORITHMS[algorithm].cost(placement.num_ranks, num_bytes, link),
    )


def compressed_sum_cost(load: BucketLoad, codec: Codec, placement: Placement) -> SumCost:
    """Return the cost of summing a bucket by the method for this codec's packets.

    A bucket with nothing to compress is summed exactly, by the cheapest algorithm.
    """
    if not load.numel:
        return all_reduce_cost("cheapest", load.num_bytes, placement)
    cost = _compressed(load, codec, placement.num_hosts if placement.two_levels else placement.num_ranks, placement)
    return (
        cost._replace(wire_s=cost.wire_s + 2 * _in_memory(load.num_bytes, placement)) if placement.two_levels else cost
    )


def _compressed(load: BucketLoad, codec: Codec, num_ranks: int, placement: Placement) -> SumCost:
    """Return the cost of a compressed sum over `num_ranks` ranks, or leaders of hosts."""
    method, others = compressed_sum_for(codec), num_ranks - 1
    # Between hosts only the leaders send, so no ranks of a host share its link.
    link = placement.link if placement.two_levels else placement.shared_link
    if method is LinearSum:
        return _in_rounds(load, codec, num_ranks, link)
    packet = codec.packet_bytes(load.numel, load.groups)
    if method is GatheredSum:  # Every rank sends its packet to every other.
        # Sparse packets differ in length, so each is preceded by its length.
        num_bytes: float = others * (_LENGTH_BYTES + aligned(load.exact_bytes) + packet)
        times, coding_s = 1, coding_seconds(codec.speed, load.numel, 1, num_ranks)
    else:  # Parts go to their owners, and the sums of parts come back.
        # Each part has a header of its own; everything else is divided by the number of ranks.
        num_bytes = 2 * others * (HEADER.size + (packet - HEADER.size + load.exact_bytes) / num_ranks)
        times, coding_s = 2, coding_seconds(codec.speed, load.numel, 1, 2 * others / num_ranks)
    return SumCost(num_bytes, num_bytes * link.seconds_per_byte, times * link.latency_s, coding_s)


def _in_rounds(load: BucketLoad, codec: Codec, num_ranks: int, link: Link) -> SumCost:
    """Return the cost of a linear codec: small sums one after another, each by the cheapest algorithm."""
    # In float32 elements. The exact values travel with the first round.
    first, *later = cast(LinearCodec, codec).round_sizes(load.layout)
    sizes = [4 * first + load.exact_bytes, *(4 * size for size in later)]
    costs = [_cheapest(num_ranks, size, link) for size in sizes]
    num_bytes, wire_s = sum(cost.num_bytes for cost in costs), sum(cost.wire_s for cost in costs)
    return SumCost(num_bytes, wire_s, coding_s=coding_seconds(codec.speed, load.numel, 1, 1))


def _cheapest(num_ranks: int, num_bytes: float, link: Link) -> SumCost:
    """Return the cost of the algorithm that ranks choose for a typical link, on the given link."""
    # Chosen by the typical link, as ranks choose: they must agree without knowing their links. Priced on the real one.
    best = min(_ACROSS, key=lambda collective: collective.cost(num_ranks, num_bytes, TYPICAL_LINK))
    return SumCost(_sent(best.name, num_bytes, num_ranks), best.cost(num_ranks, num_bytes, link))


def _tree_s(num_bytes: float, placement: Placement) -> float:
    """Return the seconds of a reduction tree and a broadcast: half of the ranks send, then a quarter, at last one."""
    levels = range(1, ceil(log2(placement.num_ranks)) + 1)
    # Up and down again. The fewer ranks send at a level, the more of what they share does each have.
    return 2 * sum(
        placement.link_with_senders(ceil(placement.num_ranks / 2**level)).seconds(num_bytes) for level in levels
    )


def _in_memory(num_bytes: float, placement: Placement) -> float:
    """Return the seconds of a sum in shared memory: two barriers, and every byte read once and written once."""
    return 2 * placement.within.seconds(num_bytes)


def _sent(algorithm: str, num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that a rank sends, on average."""
    if algorithm == "recursive_doubling":
        return log2(num_ranks) * num_bytes
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
