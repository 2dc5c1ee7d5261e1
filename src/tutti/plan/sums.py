"""What one sum over all ranks costs, exact or compressed."""

from math import ceil, log2
from typing import NamedTuple, cast

from tutti.cluster import Link
from tutti.codecs import Codec, LinearCodec
from tutti.codecs.packet import HEADER
from tutti.collectives import ALGORITHMS, butterfly, recursive_doubling, ring
from tutti.collectives.compressed import GatheredSum, LinearSum, compressed_sum_for
from tutti.collectives.compressed.messages import aligned
from tutti.collectives.hierarchical import TYPICAL_LINK
from tutti.plan.coding import coding_seconds
from tutti.plan.loads import Load
from tutti.plan.place import Place
from tutti.strategies.allreduce import Algorithm

_CHOICES: tuple[Algorithm, ...] = ("native", "ring", "tree", "butterfly", "recursive_doubling")
"""What "cheapest" chooses from."""

_ACROSS = (ring, butterfly, recursive_doubling)
"""What leaders of hosts choose from."""

_LENGTH_BYTES = 8
"""Of the message that goes ahead of a sparse packet."""


class Sum(NamedTuple):
    """One bucket's, as a rank sees it."""

    num_bytes: float
    """That it sends."""
    wire_s: float
    """While which the link is in use."""
    latency_s: float = 0.0
    """Waited for besides, while which another bucket may use the link."""
    coding_s: float = 0.0
    """To encode and decode."""


def exact_sum(algorithm: Algorithm, num_bytes: float, place: Place) -> Sum:
    """The sum of so many bytes by that algorithm."""
    if algorithm == "cheapest":
        return min((exact_sum(each, num_bytes, place) for each in _CHOICES), key=lambda each: each.wire_s)
    if algorithm in ("native", "hierarchical") and place.two_levels:
        across = _cheapest(place.num_hosts, num_bytes, place.link)
        return across._replace(wire_s=across.wire_s + 2 * _in_memory(num_bytes, place))
    if algorithm in ("native", "hierarchical") and place.num_hosts == 1:
        return Sum(num_bytes, _in_memory(num_bytes, place))
    if algorithm in ("native", "hierarchical"):
        return _cheapest(place.num_ranks, num_bytes, place.link)
    if algorithm == "tree":
        return Sum(_sent(algorithm, num_bytes, place.num_ranks), _tree_s(num_bytes, place))
    # In a ring no two ranks of a host, or below a switch, send over the same link.
    link = place.link if algorithm in ("ring", "ring_blocking") else place.crowded
    return Sum(
        _sent(algorithm, num_bytes, place.num_ranks), ALGORITHMS[algorithm].cost(place.num_ranks, num_bytes, link)
    )


def compressed_sum(load: Load, codec: Codec, place: Place) -> Sum:
    """The sum of a bucket in the way that packets of this codec are summed; what is all exact has the cheapest."""
    if not load.numel:
        return exact_sum("cheapest", load.num_bytes, place)
    found = _compressed(load, codec, place.num_hosts if place.two_levels else place.num_ranks, place)
    return found._replace(wire_s=found.wire_s + 2 * _in_memory(load.num_bytes, place)) if place.two_levels else found


def _compressed(load: Load, codec: Codec, num_ranks: int, place: Place) -> Sum:
    way, others, link = compressed_sum_for(codec), num_ranks - 1, place.link if place.two_levels else place.crowded
    if way is LinearSum:
        return _in_rounds(load, codec, num_ranks, link)
    packet = codec.packet_bytes(load.numel, load.groups)
    if way is GatheredSum:  # Everyone's packet to everyone.
        num_bytes: float = others * (_LENGTH_BYTES + aligned(load.exact_bytes) + packet)
        times, coding_s = 1, coding_seconds(codec.speed, load.numel, 1, num_ranks)
    else:  # Pieces to their owners, and sums of pieces back.
        num_bytes = 2 * others * (HEADER.size + (packet - HEADER.size + load.exact_bytes) / num_ranks)
        times, coding_s = 2, coding_seconds(codec.speed, load.numel, 1, 2 * others / num_ranks)
    return Sum(num_bytes, num_bytes * link.seconds_per_byte, times * link.latency_s, coding_s)


def _in_rounds(load: Load, codec: Codec, num_ranks: int, link: Link) -> Sum:
    """Small sums one after another, each by the cheapest algorithm."""
    first, *later = cast(LinearCodec, codec).round_sizes(load.layout)
    sizes = [4 * first + load.exact_bytes, *(4 * size for size in later)]
    found = [_cheapest(num_ranks, size, link) for size in sizes]
    num_bytes, wire_s = sum(each.num_bytes for each in found), sum(each.wire_s for each in found)
    return Sum(num_bytes, wire_s, coding_s=coding_seconds(codec.speed, load.numel, 1, 1))


def _cheapest(num_ranks: int, num_bytes: float, link: Link) -> Sum:
    """As ranks on hosts of their own choose it, who know of no link but a typical one."""
    best = min(_ACROSS, key=lambda each: each.cost(num_ranks, num_bytes, TYPICAL_LINK))
    return Sum(_sent(best.name, num_bytes, num_ranks), best.cost(num_ranks, num_bytes, link))


def _tree_s(num_bytes: float, place: Place) -> float:
    """Up and down: half of the ranks send, then a quarter of them, and at last one."""
    levels = range(1, ceil(log2(place.num_ranks)) + 1)
    return 2 * sum(place.among(ceil(place.num_ranks / 2**level)).seconds(num_bytes) for level in levels)


def _in_memory(num_bytes: float, place: Place) -> float:
    """Two barriers; every byte is read once and written once."""
    return 2 * place.within.seconds(num_bytes)


def _sent(algorithm: str, num_bytes: float, num_ranks: int) -> float:
    """By a rank, on average."""
    if algorithm == "recursive_doubling":
        return log2(num_ranks) * num_bytes
    return 2 * (num_ranks - 1) / num_ranks * num_bytes
